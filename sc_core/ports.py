"""What the controller needs from the world, as Protocols. It imports none of the world itself.

Every port has an in-memory implementation in `sc_core.testing`, and one conformance suite
there checks an implementation, whether in memory or real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from sc_core.records import (
    Batch,
    Group,
    LedgerRecord,
    Prompt,
    PulledPrompt,
    Sample,
    SampleId,
    Stamp,
)

P = ParamSpec("P")
R = TypeVar("R")
Columns = Mapping[str, Sequence[Any]]  #: column name -> one value per row


class DataPlane(Protocol):
    """Where rollout tensors live; bound to one partition.

    Every call may be repeated with the same ids and then has the same effect as once. A call
    that was cancelled may have happened or not. The controller awaits each for
    `async_rl.deadlines.data_plane_s` seconds, a save for `snapshot_s`, whatever is cancelled
    meanwhile; past that the run ends.
    """

    async def put_samples(
        self,
        sample_ids: Sequence[SampleId],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the named columns of these rows; other columns of existing rows stay.

        N distinct ids, N values per column, and, if given, N tags: small plain data beside a row,
        which the controller never reads back. No columns make rows without data.

        Raises:
            DataPlaneError: it was refused, or failed; some rows may have been written.
        """

    async def get_samples(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Read columns: of N ids, N values per column, in the order asked for.

        Raises:
            MissingRows: some rows don't exist, or have no data; names them.
            DataPlaneError: a row has data, but not a column asked for.
        """

    async def clear_samples(self, sample_ids: Sequence[SampleId]) -> None:
        """Remove these rows; ids that do not exist are no error."""

    async def list_sample_ids(self) -> frozenset[SampleId]:
        """All rows of the partition, also those without data."""

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write a snapshot and `metadata` into `directory`, which is not there yet.

        `metadata` is what JSON can hold. Nobody puts or clears meanwhile, and nothing needs to be
        synced to disk: the bundle's finaliser does that.

        Raises:
            SaveError: the directory is there already, or can't be written.
        """

    async def aclose(self) -> None:
        """Let go of the client; the store stays."""


class BootstrapDataPlane(Protocol):
    """The store before anything touched it. Restores; never writes rows."""

    async def is_untouched(self) -> bool:
        """Whether the *store*, seen from any process, has never held a row since it was built."""

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        """Fill the untouched store from a snapshot; returns the metadata saved with it.

        Every file has been compared with its hash. If it fails, or is cancelled, `discard` comes
        next, and an older bundle may be tried.

        Raises:
            RestoreOrderError: the store was touched before.
        """

    async def list_sample_ids(self) -> frozenset[SampleId]:
        """All rows of the partition."""

    async def discard(self) -> None:
        """Throw the store away and build an untouched one."""


class PromptSource(Protocol):
    """A stream of prompts whose place can be noted and found again.

    One call at a time, of at most `async_rl.deadlines.source_s` seconds; an error ends the run.
    """

    async def next_prompt(self) -> PulledPrompt:
        """The next prompt and the position after it.

        A pull that was cancelled or failed may be lost to this object: `seek` to the last
        recorded position repeats it.

        Raises:
            EndOfPrompts: nothing more, in this epoch or any other.
        """

    async def seek(self, position: Any) -> None:
        """Continue after the prompt that came with `position`; None is the very beginning."""

    def fingerprint(self) -> str:
        """Changes when the same position would mean another prompt."""


class ValidationPrompts(Protocol):
    """Held-out prompts, for evaluation alone."""

    def prompts(self) -> Sequence[Any]:
        """Their payloads, the same ones in the same order each time."""

    def fingerprint(self) -> str:
        """Changes when these are other prompts, or in another order."""


class RolloutWorker(Protocol):
    """Generates samples. Called for all siblings of all groups in flight at once."""

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        """Generate one sibling (0 … G-1) and its reward. Cancelling it frees what it used.

        It has `async_rl.deadlines.rollout_s` seconds; past them, as after an error, the sibling
        is tried again within its group's attempts.

        `prompt.payload` is the same object for all siblings and attempts, and is what bundles
        have: a conversation grows in a copy of it.

        Raises:
            DataFailure: the prompt itself is at fault. Any other exception counts as a
                failure of the infrastructure.
            WorkerDied: nobody is left that could generate; the run ends.
            WrongAnswer: as when it returns something that is no `Sample`: the run ends, since no
                other attempt would heal that. Nothing, or one with rubbish in it, is an attempt
                that failed.
        """


class Trainer(Protocol):
    """Owns weights and optimizer; fetches its rows from the data plane itself.

    One call at a time, but for `finalize_save`, which may run beside a step. Each has
    `async_rl.deadlines.trainer_s` seconds, also if the run is cancelled meanwhile; an error ends
    the run, and the next one goes on from the newest bundle.
    """

    async def prepare(self, batch: Batch) -> None:
        """Compute log-probs of the batch's rows under the current weights (may write columns)."""

    async def begin_step(self, step: int) -> None:
        """Open a step: gradients are empty afterwards."""

    async def train_microbatches(self, batch: Batch) -> None:
        """Accumulate the gradient of one chunk of the open step, from `batch.trained_ids` alone."""

    async def finish_step(self) -> Mapping[str, float]:
        """Apply the accumulated gradient and close the step; returns metrics (`loss`, …).

        A step in which no row was trained on is finished all the same, with finite metrics.
        """

    async def abandon_step(self) -> None:
        """Close the open step; weights, gradients and RNG are as before `begin_step`."""

    async def save(self, directory: Path) -> None:
        """Write weights, optimizer and tokenizer of the last finished step into the empty
        `directory`."""

    async def finalize_save(self) -> None:
        """Return once every file of the last `save` is complete."""

    async def load(self, directory: Path) -> None:
        """Become what `save` wrote."""


class WeightSync(Protocol):
    """Moves the trainer's weights to the engines that generate.

    Its engines are those that get requests. One that joins between two syncs has confirmed the
    weights of the last one before its first request; one that joins during a sync comes after
    it. One that leaves takes part in no further sync.

    Every call may be repeated, and asks all engines, also when one of them fails.

    Raises:
        EnginesFailed: from each call: these engines failed, and all others have done it.
        WorkerDied: no engine is left, and none is expected. One that died while others live is
            left out instead.
    """

    async def pause(self) -> None:
        """Engines hold their requests; nothing is generated until `resume`."""

    async def transfer(self, version: int) -> Mapping[str, int]:
        """Give the trainer's weights to all engines; returns the version each confirmed."""

    async def resume(self) -> None:
        """Engines go on. Safe to call when nothing is paused."""


class EngineFleet(Protocol):
    """Can go on without an engine that fails; a run that has none ends with its first failure."""

    def put_out(self, engine: str, reason: str) -> int:
        """Send this engine neither requests nor weights any more; returns how many are left.

        One that will soon come in its place may be counted: `transfer` then waits for it.
        Its requests under way end in a `RolloutError`, and go to others as retries.
        """


EstimatorScope = Literal["group", "chunk"]  #: see `AdvantageEstimator.scope`


class AdvantageEstimator(Protocol):
    """Makes advantages, or whatever else `Trainer` reads, of the columns of finished groups."""

    @property
    def select_fields(self) -> Sequence[str]:
        """The columns it reads."""

    @property
    def scope(self) -> EstimatorScope:
        """Which rows have a say in a row's columns.

        `group`: those of its group alone; the chunk comes in slices of whole groups. `chunk`: all
        that train together, as in a normalisation over the batch; they come in one call, and
        `async_rl.min_groups_for_streaming_train` may not be less than a step.
        """

    @property
    def heavy(self) -> bool:
        """Whether it should run through the runner, which ends after `deadlines.estimator_s`,
        rather than on the event loop, where nothing can end it."""

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """Columns in, new columns out; rows of one group are neighbours, groups in order.

        Each new column has one finite value per row: a number, an array of numbers, or a list
        of them. One that reads the column `masked` is given a bool for every row; masked rows
        move no baseline, and nothing is learnt from what they get.
        """


class IndexView(Protocol):
    """Ready (committed, not selected) groups, for choosing k of n in O(k)."""

    @property
    def ready_count(self) -> int:
        """How many there are."""

    def ready_in_commit_order(self) -> Iterator[Group]:
        """The first to be committed first."""

    def ready_of_target(self, step: int | None) -> Iterator[Group]:
        """By start version, then ordinal; None: those that have no target."""

    def ready_of_version(self, version: int) -> Iterator[Group]:
        """By ordinal."""

    def oldest_ready_version(self) -> int | None:
        """The first of `ready_versions`, at the cost of one."""

    def ready_versions(self) -> Sequence[int]:
        """Start versions that ready groups have, ascending."""

    def ready_targets(self) -> Sequence[int]:
        """Target steps that ready groups have, ascending."""


class SamplerView(Protocol):
    """What a sampler may look at. Live groups are admitted ones, in any state."""

    @property
    def weight_version(self) -> int:
        """Of the current weights; the step to fill starts from it."""

    @property
    def prompts_per_step(self) -> int:
        """Groups per step (P)."""

    @property
    def index(self) -> IndexView:
        """The groups that are ready."""

    @property
    def live_count(self) -> int:
        """How many groups are live."""

    def live_of_target(self, step: int) -> int:
        """How many live groups are meant for that step."""

    def groups_of_target(self, step: int) -> int:
        """How many groups that step takes: P, unless it goes without some that failed."""

    def groups_of_next(self, steps: int) -> int:
        """How many groups the next so many steps take together."""

    def in_flight_of_version(self, version: int) -> int:
        """Groups not yet committed (in flight, or waiting for a retry) with this start version."""

    def oldest_live_version(self) -> int | None:
        """Lowest start version of a live group that is not selected."""


class Sampler(Protocol):
    """Which prompts go out, which groups train, which are too old. Pure and synchronous."""

    @property
    def name(self) -> str:
        """In bundles: a state is given back to a sampler of that name alone."""

    @property
    def stamps_targets(self) -> bool:
        """Whether every group is meant for one step: its stamps carry a target."""

    def admit(self, view: SamplerView) -> Stamp | None:
        """A stamp for one more group now, or None."""

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        """Between `at_least` and `at_most` ready groups, or none at all. Changes nothing."""

    def evict(self, view: SamplerView) -> Sequence[Group]:
        """Ready groups that no `select` at this or a later version could return."""

    def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
        """Whether a group in flight since that version could no longer be selected."""

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        """The step that goes without this prompt, by the weight version that it starts from, if
        the prompt is dropped after failures and not replaced. None: no step counts on it."""

    def required_capacity(self, prompts_per_step: int) -> int:
        """Places below which a step could never fill, or the policy could not be kept."""

    def state(self) -> Mapping[str, Any]:
        """What must survive a restart, beyond ledger and index."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` returned."""


class GroupFilter(Protocol):
    """Decides which finished groups are worth training on; `ZeroVarianceFilter` is one.

    Another prompt takes the place of each that it rejects. If it rejects more than
    `async_rl.max_consecutive_filtered_groups` with no commit in between, the run ends with
    `TooManyFiltered`.
    """

    def keep(self, rewards: Sequence[float]) -> bool:
        """Whether a finished group is worth training on; a dropped one is recorded as such.

        `rewards` are those of the siblings that are not masked. There may be none.
        """


class EventSink(Protocol):
    """Where events go. Appending is synchronous, so an event belongs to one instant.

    An error ends the run: what is not in the log can't be audited.
    """

    def append(self, kind: EventKind, **fields: Any) -> int:
        """Record one event of this incarnation; returns its sequence number."""

    def append_many(self, kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        """Record events of one kind and one instant; returns the last sequence number."""

    @property
    def seq(self) -> int:
        """Of the last event."""

    @property
    def incarnation(self) -> str:
        """The process life whose events these are; no other has the same."""

    def sync(self) -> None:
        """Make everything appended so far survive a power cut. Blocks: call it in a thread."""


class MetricsSink(Protocol):
    """Where metrics go."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Record one object per finished step, by a plain call on the event loop.

        Numbers by name, such as `step`, `train/reward` and what the trainer returned. An error
        ends the run.
        """


class SpanSink(Protocol):
    """Where spans go: what took from when to when, for people to look at.

    Nothing depends on them. After the first call that raises, the run logs a warning, and goes on
    without.
    """

    def now(self) -> float:
        """Unix seconds, on the event log's clock."""

    def add(self, track: str, name: str, began: float, **of: Any) -> None:
        """Record what began then and ends now. Called often: must return at once.

        `of` may have `step`, `weight_version`, `group_id`, `sibling`, `engine`, `note`.
        """

    def flush(self) -> None:
        """A step is over: a good moment to write."""


class Runner(Protocol):
    """Runs blocking work: in a thread, or inline where a virtual clock must not jump."""

    async def __call__(self, work: Callable[..., R], *args: Any) -> R: ...


EngineState = Literal["serving", "quarantined", "restarting", "awaited", "out"]
"""`serving`: it gets weights and requests. `quarantined`: neither, for now. `restarting`: it died,
and a new one is on its way. `awaited`: it comes once there is room for it, which may be never.
`out`: for good."""
EventKind = Literal[
    "run_started", "resumed", "admitted", "dispatched", "committed", "selected", "abandoned",
    "trained", "dropped", "evicted", "aborted", "redispatched", "exhausted", "weight_sync",
    "engine", "checkpoint", "stopped",
]  # fmt: skip
