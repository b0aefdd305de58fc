"""Settings, with the names that users of NeMo RL know, and what they refuse.

`decode` turns plain data (JSON, YAML) into a settings Struct and answers an unknown key with
the nearest one that exists.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

import msgspec

from sc_core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
_BUDGET = re.compile(r"([0-9]{1,3}):([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])")
_PROBLEM = re.compile(
    r"(?:Expected `(?P<wanted>[^`]+)`, got `[^`]+`|Invalid enum value .*)"
    r" - at `\$\.(?P<path>\w+(?:\.\w+)*)`",
    re.DOTALL,
)
_KINDS = {
    "int": "an int", "float": "a number", "str": "text", "bool": "true or false", "null": "null",
    "object": "a mapping", "array": "a list",
}  # fmt: skip
_SHOWN = 10  #: unknown keys that one error names
VAL_METRICS = ("val/reward", "val/reward_std", "val/prompts", "val/failed", "val/tokens")
"""Mean reward over prompts, and its standard deviation over them, unless all failed; how many were
evaluated, and how many could not be; generated tokens."""
SamplerName = Literal["in_order", "weight_fifo", "ready_first", "windowed", "custom"]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class GrpoConfig(_Settings, frozen=True):
    """How many prompts, siblings and steps there are, and when the policy is evaluated."""

    num_prompts_per_step: int = 8  #: groups per step (P)
    num_generations_per_prompt: int = 8  #: siblings per group (G)
    max_num_steps: int = 100  #: training steps of the whole run, restarts included
    max_num_epochs: int | None = None  #: passes over the prompts; None: as many as it takes
    short_last_step: Literal["train", "drop"] = "train"
    """What becomes of the groups that are left when the prompts have ended and are too few for a
    step: they make one short step, or are dropped, which the event log records. Steps run on from
    one epoch into the next, unless the source itself leaves out an epoch's short last batch."""
    seed: int = 0
    """Of the order of prompts, fresh weights and all sampling; the same seed draws the same."""
    overlong_filtering: bool = False
    """Mask siblings that were cut off at a length limit: they count as siblings, and nothing is
    learnt from them. For whoever builds the rollout worker, which knows them."""
    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and fill the step with others: relative to their
    mean they teach nothing. Each is recorded as dropped, and
    `async_rl.max_consecutive_filtered_groups` bounds how many in a row. A `Ports.group_filter` goes
    before it."""
    val_period: int = 0  #: steps between evaluations on held-out prompts; 0: none on the way
    val_at_start: bool = False  #: evaluate before the first step, too
    val_at_end: bool = False  #: and after the last one
    max_val_samples: int | None = None  #: held-out prompts per evaluation; None: all there are
    num_val_generations_per_prompt: int = 1  #: completions of each prompt of an evaluation

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)


class SamplerConfig(_Settings, frozen=True):
    """Which prompts go out, and which finished groups may be trained on."""

    name: SamplerName = "windowed"
    """`in_order`: each group is meant for one step, at most K ahead. `weight_fifo`: oldest start
    version first. `ready_first`: in order of completion. `windowed`: any that is at most K versions
    old; older ones are given up. `custom`: as `target` says."""
    max_staleness_versions: int = 1  #: K of `windowed`, `weight_fifo`, `ready_first`
    sample_freshest_first: bool = False  #: `windowed` only
    max_lookahead_versions: int = 0  #: K of `in_order`
    target: str | None = None  #: `module:Class` of a `custom` sampler


class RolloutFailureConfig(_Settings, frozen=True):
    """What follows when a prompt's rollouts fail."""

    max_infra_attempts_per_prompt: int = 3
    """Attempts that may fail by an engine, a deadline or anything else that is not the prompt's."""
    max_data_attempts_per_prompt: int = 1
    """Attempts that may fail by the prompt itself: it is too long, say, or its reward raises."""
    backoff_base_s: float = 0.5  #: wait before attempt n + 1: base * 2 ** (n - 1)
    max_backoff_s: float = 30.0  #: the longest such wait
    on_dropped_prompt: Literal["replace", "shortfall", "fail"] = "replace"
    """What follows when a prompt has used up its attempts. `replace`: it is dropped, and the next
    prompt takes its place. `shortfall`: it is dropped, and its step trains one group less: the
    step it was meant for under `in_order`, the last that could have trained it under
    `weight_fifo`, else the one being filled. The last group of a step is replaced. `fail`: the
    run ends. Groups dropped as stale, or by a filter, are always replaced."""
    max_consecutive_dropped_prompts: int = 32
    """Drops after failures, with no commit in between; one more ends the run: it is not the
    prompts."""
    max_skipped_prompts: int | None = None
    """Drops after failures over the whole run, restarts included; one more ends the run. None:
    no bound."""
    replacement_reserve_prompts: int = 0
    """Prompts to have at hand beyond those that the sampler has let in, so that a dropped one is
    replaced without waiting for a slow source. They hold no places, and are in every bundle."""


class StallWatchdogConfig(_Settings, frozen=True):
    """When a run that does not go on is ended, with a report of what it waits for."""

    stall_timeout_s: float = 3600.0
    """Without a trained step, an evaluation, a sync or a save. Longer than any deadline below, so
    that a call that hangs is reported by its own name."""


class DeadlinesConfig(_Settings, frozen=True):
    """How long a port call may take before the run fails with its name, in seconds."""

    rollout_s: float = 600.0  #: one sibling; past it the sibling has failed, not the run
    source_s: float = 600.0  #: one prompt
    data_plane_s: float = 60.0  #: one put, get, clear or list
    snapshot_s: float = 600.0  #: the data plane's own save
    estimator_s: float = 600.0  #: one call of the estimator, if it is heavy
    trainer_s: float = 1800.0  #: prepare, one train_microbatches, finish_step, save, load
    weight_sync_s: float = 300.0  #: each of pause, transfer and resume
    disk_s: float = 600.0  #: writing, publishing or verifying one bundle

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:  # a wait without a bound is no setting
                raise ConfigError(
                    f"async_rl.deadlines.{name} is {seconds}; it must be above 0 and finite"
                )


class GenerationFleetHealthConfig(_Settings, frozen=True):
    """What becomes of generation engines that don't answer, or die. For whoever runs them: the
    controller itself asks no engine."""

    enabled: bool = True
    """Whether engines are probed, and `on_dead_shard` followed. Without, a dead one is left out."""
    probe_interval_s: float = 5.0  #: between two probes of an engine, from answer to question
    probe_timeout_s: float = 30.0
    """Without an answer a probe has failed. An engine whose machine is busy may take seconds."""
    unhealthy_threshold: int = 3
    """Failed probes in a row that quarantine an engine: it gets neither requests nor weights, and
    those that it has go on. As many more, and it counts as dead."""
    healthy_threshold: int = 2
    """Successful ones in a row that end it, once the engine has confirmed the current weights."""
    on_dead_shard: Literal["restart", "leave_out", "fail"] = "restart"
    """What follows when an engine's process has ended, when the engine says that it can't go on,
    or when it failed a weight sync. `restart`: it is made anew, under its name, and serves once it
    has confirmed the current weights; if it was the last one, rollouts and syncs wait for it until
    their own deadlines. `leave_out`: the run goes on without it. `fail`: the run ends."""
    max_restart_attempts_per_shard: int = 3
    """Over the life of the controller's process; an engine that needs one more is left out."""
    min_healthy_shards: int = 1
    """Engines that live, quarantined ones included, or are being restarted. With fewer the run
    ends, and says what each has died of. Those that are awaited, for want of room, do not count."""


class AsyncRlConfig(_Settings, frozen=True):
    """How far generation runs ahead of training, and what follows when something fails."""

    sampler: SamplerConfig = SamplerConfig()  #: which prompts go out, and which groups train
    min_groups_for_streaming_train: int | None = None  #: groups per chunk; None: the whole step
    max_inflight_prompts: int | None = None  #: None: as many as there are places
    max_buffered_rollouts: int | None = None  #: places; None: what the sampler requires
    on_stale_prompt: Literal["drop", "requeue"] = "drop"
    """What becomes of the prompt of a group that is too old to train on: it is given up, which the
    event log records, or goes out again."""
    max_stale_requeues: int = 2  #: times that a prompt goes out again for that, at most
    max_consecutive_filtered_groups: int | None = 1000
    """Groups that a filter rejects with no commit in between; one more ends the run: the filter
    keeps nothing. A tenth of it, or 100 in a row, is worth a warning. None: no bound."""
    weight_sync_mode: Literal["in_flight", "drain", "abort_stale"] = "in_flight"
    """What becomes of requests that are under way when the weights move.

    `in_flight`: engines hold them, take the new weights and go on. `drain`: they are waited for,
    for at most `deadlines.rollout_s + deadlines.weight_sync_s`; new ones, retries and later turns
    of a conversation wait behind the gate. `abort_stale`: as `in_flight`, but groups that no step
    could train on any more end at once and free their engines.

    In all of them only `windowed`, and maybe a custom sampler, gives up groups that have become
    too old, by `on_stale_prompt`: with the first two when they are finished (`evicted`), with
    `abort_stale` while they are in flight (`aborted`)."""
    weight_sync_attempts: int = 2
    """Times that each of pause, transfer and resume is tried in one sync. Not after a timeout:
    what that call did, or will do yet, is unknown."""
    stop_grace_s: float = 600.0
    """How much longer than the longest step and save so far a stop may take, from the request to
    the end of the run. Past it the run fails and says what it waits for; a call that is under way
    then still has until its own deadline."""
    rollout_failure: RolloutFailureConfig = RolloutFailureConfig()
    """What follows when a sibling can't be generated."""
    stall_watchdog: StallWatchdogConfig = StallWatchdogConfig()  #: when a run counts as stuck
    generation_fleet_health: GenerationFleetHealthConfig = GenerationFleetHealthConfig()
    """What becomes of engines that don't answer."""
    deadlines: DeadlinesConfig = DeadlinesConfig()  #: of port calls, in seconds


class CheckpointingConfig(_Settings, frozen=True):
    """When a bundle is saved, and which are kept."""

    enabled: bool = True  #: whether bundles are saved at all; without, a run can't be resumed
    save_period: int = 10  #: steps between bundles; the last step is always saved
    ft_save_period: int | None = None
    """Steps between further bundles, which are there to go on from and to be replaced soon:
    `keep_top_k` does not count them, and `ft_keep_latest_k` alone keeps them. None: there are
    none, and both rules go for every bundle."""
    checkpoint_must_save_by: str | None = None
    """Time from the start of `run()`, of each process life, as `dd:hh:mm:ss`, such as
    "00:03:45:00": a bundle is there by then and the run has ended. It begins to end as much
    earlier as the longest save and the longest step without its waiting for groups took."""
    metric_name: str | None = None
    """Of `keep_top_k`; a bundle without that number comes last. `val:reward` is the same as
    `val/reward`, which only bundles of steps with an evaluation have."""
    higher_is_better: bool = True  #: whether the best bundles have the highest `metric_name`
    keep_top_k: int | None = None  #: best bundles to keep; None: keep all
    ft_keep_latest_k: int | None = None  #: newest bundles to keep; None: keep all
    load_replay_buffer: bool = True
    """Whether a resume takes over finished groups that wait for training; without, their prompts go
    out again."""
    allow_changed_source: bool = False  #: resume although the prompt source's fingerprint differs

    def __post_init__(self) -> None:
        key, budget = "checkpointing.checkpoint_must_save_by", self.checkpoint_must_save_by
        if budget is None:
            return
        if _BUDGET.fullmatch(budget) is None:
            raise ConfigError(f"{key} is {budget!r}; it must be dd:hh:mm:ss, such as 00:03:45:00")
        if not self.enabled:
            raise ConfigError(f"{key} is set and checkpointing.enabled is false: nothing is saved")

    @property
    def ranked_by(self) -> str | None:
        """`metric_name` as `training_info.json` spells it."""
        name = self.metric_name
        if name is None or not name.startswith(("train:", "val:")):
            return name
        return name.replace(":", "/", 1)

    @property
    def must_save_by_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class RolloutRecoveryConfig(_Settings, frozen=True):
    """What is kept of a group that was not whole."""

    default_granularity: Literal["prompt_group", "sibling"] = "prompt_group"
    """What a failed attempt or a restart takes from a group that is not whole: everything, or
    only the siblings that had not finished. With `sibling` each finished one is written to the
    data plane at once, and a group counts as old as its oldest sibling."""


class ControllerConfig(_Settings, frozen=True):
    """All settings of a controller, with good defaults; `decode` makes one of plain data.

    Raises:
        ConfigError: a value makes no sense, alone or beside another; names its dotted key.
    """

    grpo: GrpoConfig = GrpoConfig()  #: sizes, lengths, evaluation
    async_rl: AsyncRlConfig = AsyncRlConfig()  #: how generation and training overlap
    rollout_recovery: RolloutRecoveryConfig = RolloutRecoveryConfig()
    """What is kept of a group that is not whole."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """When bundles are written, and which are kept."""

    def __post_init__(self) -> None:
        grpo, rl = self.grpo, self.async_rl
        _at_least(1, "grpo.num_prompts_per_step", grpo.num_prompts_per_step)
        _at_least(1, "grpo.num_generations_per_prompt", grpo.num_generations_per_prompt)
        if grpo.use_dynamic_sampling and grpo.num_generations_per_prompt < 2:
            raise ConfigError(
                "grpo.use_dynamic_sampling is true and grpo.num_generations_per_prompt is 1: the"
                " rewards of every group would be equal, and none be trained on"
            )
        _at_least(0, "grpo.max_num_steps", grpo.max_num_steps)
        _at_least(1, "grpo.max_num_epochs", grpo.max_num_epochs)
        _at_least(0, "grpo.val_period", grpo.val_period)
        _at_least(1, "grpo.max_val_samples", grpo.max_val_samples)
        generations = grpo.num_val_generations_per_prompt
        _at_least(1, "grpo.num_val_generations_per_prompt", generations)
        self._check_metric()
        _at_least(1, "async_rl.max_inflight_prompts", rl.max_inflight_prompts)
        _at_least(1, "async_rl.max_buffered_rollouts", rl.max_buffered_rollouts)
        _at_least(0, "async_rl.sampler.max_staleness_versions", rl.sampler.max_staleness_versions)
        _at_least(0, "async_rl.sampler.max_lookahead_versions", rl.sampler.max_lookahead_versions)
        failure = rl.rollout_failure
        in_a_row = failure.max_consecutive_dropped_prompts
        key = "async_rl.rollout_failure."
        _at_least(1, f"{key}max_consecutive_dropped_prompts", in_a_row)
        _at_least(1, f"{key}max_infra_attempts_per_prompt", failure.max_infra_attempts_per_prompt)
        _at_least(1, f"{key}max_data_attempts_per_prompt", failure.max_data_attempts_per_prompt)
        _at_least(0, f"{key}max_skipped_prompts", failure.max_skipped_prompts)
        _at_least(0, f"{key}replacement_reserve_prompts", failure.replacement_reserve_prompts)
        _at_least(0, f"{key}backoff_base_s", failure.backoff_base_s)
        _at_least(0, f"{key}max_backoff_s", failure.max_backoff_s)
        _at_least(0, "async_rl.max_stale_requeues", rl.max_stale_requeues)
        filtered = rl.max_consecutive_filtered_groups
        _at_least(1, "async_rl.max_consecutive_filtered_groups", filtered)
        _at_least(1, "async_rl.weight_sync_attempts", rl.weight_sync_attempts)
        _at_least(0, "async_rl.stop_grace_s", rl.stop_grace_s)
        stall_timeout_s = rl.stall_watchdog.stall_timeout_s
        _at_least(0, "async_rl.stall_watchdog.stall_timeout_s", stall_timeout_s)
        health, key = rl.generation_fleet_health, "async_rl.generation_fleet_health."
        _above_0(f"{key}probe_interval_s", health.probe_interval_s)
        _above_0(f"{key}probe_timeout_s", health.probe_timeout_s)
        _at_least(1, f"{key}unhealthy_threshold", health.unhealthy_threshold)
        _at_least(1, f"{key}healthy_threshold", health.healthy_threshold)
        restarts = health.max_restart_attempts_per_shard
        _at_least(0, f"{key}max_restart_attempts_per_shard", restarts)
        _at_least(1, f"{key}min_healthy_shards", health.min_healthy_shards)
        _at_least(1, "checkpointing.save_period", self.checkpointing.save_period)
        _at_least(1, "checkpointing.ft_save_period", self.checkpointing.ft_save_period)
        chunk = rl.min_groups_for_streaming_train
        _at_least(1, "async_rl.min_groups_for_streaming_train", chunk)
        if chunk is not None and chunk > grpo.num_prompts_per_step:
            raise ConfigError(
                f"async_rl.min_groups_for_streaming_train is {chunk}, more than the"
                f" {grpo.num_prompts_per_step} groups of a step (grpo.num_prompts_per_step)"
            )

    def _check_metric(self) -> None:
        metric = self.checkpointing.ranked_by or ""
        if not metric.startswith("val/"):
            return
        key = f"checkpointing.metric_name is {self.checkpointing.metric_name}"
        if metric not in VAL_METRICS:
            raise ConfigError(f"{key}; an evaluation has {', '.join(VAL_METRICS)}")
        if not self.grpo.evaluates:
            raise ConfigError(f"{key}, and nothing is evaluated: set grpo.val_period")


def _at_least(least: float, key: str, value: float | None) -> None:
    if value is not None and not value >= least:  # nor is it NaN
        raise ConfigError(f"{key} is {value}; it must be at least {least}")


def _above_0(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value}; it must be above 0 and finite")


def decode(
    data: Mapping[str, Any],
    into: type[T],
    *,
    source: str = "config",
    elsewhere: Mapping[str, str] = {},
) -> T:
    """Build settings from plain data.

    Args:
        elsewhere: what to say to whoever knows a key from another project, by its dotted path.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a wrong type or value; the
            message starts with `source` and names the key by its dotted path.
    """
    check_keys(data, into, source=source, elsewhere=elsewhere)
    try:
        return msgspec.convert(data, into)
    except msgspec.ValidationError as exc:
        cause = exc.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{source}: {cause}") from exc
        raise ConfigError(f"{source}: {_told(str(exc), data, into)}") from exc


def check_config(config: object) -> None:
    """Refuse what are no settings of a controller, such as the plain data of some.

    Raises:
        ConfigError: they are none; says how to make them.
    """
    if not isinstance(config, ControllerConfig):
        raise ConfigError(
            f"the settings are a value of type {type(config).__name__}, not a ControllerConfig;"
            " sc_core.decode(…, ControllerConfig) makes one of plain data"
        )


def check_keys(
    data: Mapping[str, Any],
    into: type[msgspec.Struct],
    *,
    source: str = "config",
    elsewhere: Mapping[str, str] = {},
) -> None:
    """Refuse keys that the settings don't have; values are not looked at.

    Raises:
        ConfigError: as `decode` for an unknown key; of several, all are named, or the first ten.
    """
    unknown = list(_unknown(data, into, "", elsewhere))
    if len(unknown) == 1:
        raise ConfigError(f"{source}: unknown key {unknown[0]}")
    if unknown:
        shown = " ".join(f"({n}) {one}" for n, one in enumerate(unknown[:_SHOWN], 1))
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ConfigError(f"{source}: {len(unknown)} unknown keys: {shown}{more}")


def _told(problem: str, data: Mapping[str, Any], into: type[msgspec.Struct]) -> str:
    """What msgspec says of a value, in the words of whoever wrote the settings."""
    found = _PROBLEM.fullmatch(problem)
    if found is None:
        return problem
    path, wanted = found["path"], found["wanted"]
    value: Any = data
    kind: Any = into
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) else ()
        kind = next((f.type for f in fields if f.encode_name == name), None)
    if wanted is None:
        return f"{path} is {value!r}; it is one of {', '.join(_values_of(kind))}"
    kinds = [_KINDS.get(one, one) for one in wanted.split(" | ")]
    return f"{path} is {value!r}; it must be {' or '.join(kinds)}"


def _values_of(wanted: Any) -> Iterator[str]:
    """Those of a `Literal`, also of one among other types."""
    for one in get_args(wanted):
        if one is bool:
            yield from ("true", "false")
        elif get_args(one):
            yield from _values_of(one)
        else:
            yield "null" if one is type(None) else str(one)


def _unknown(
    data: Mapping[str, Any], into: type[msgspec.Struct], at: str, elsewhere: Mapping[str, str]
) -> Iterator[str]:
    """Each unknown key with the answer to it."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(into)}
    for key, value in data.items():
        if key not in known:
            path, answer = _answer(f"{at}{key}", value, elsewhere)
            if answer is None:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                answer = (
                    f"did you mean {at}{near[0]}?" if near else f"known here: {', '.join(known)}"
                )
            yield f"{path}; {answer}"
            continue
        inner = known[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if isinstance(value, Mapping):
                yield from _unknown(value, inner, f"{at}{key}.", elsewhere)


def _answer(path: str, value: Any, elsewhere: Mapping[str, str]) -> tuple[str, str | None]:
    """What there is to say of a key, or of the one inside it if it holds no other."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((key, inner),) = value.items()
        deeper, answer = _answer(f"{path}.{key}", inner, elsewhere)
        if answer is not None:
            return deeper, answer
    return path, elsewhere.get(path)
