"""The samplers: which prompts go out, which groups train, which are too old.

They choose and change nothing. Everything they go by is in the ledger and the index, so a
restart needs no state of theirs. v stands for the current weight version, P for the groups of
a step, K for the bound that each takes. Among equals the order is start version, then ordinal.
"""

from __future__ import annotations

import pkgutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from sc_core.config import ControllerConfig, SamplerConfig
from sc_core.errors import ConfigError, RestoreError
from sc_core.ports import Sampler, SamplerView
from sc_core.records import Group, LedgerRecord, Stamp


class _Stateless:
    name: str
    stamps_targets = False

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        """The one that is being filled."""
        return view.weight_version

    def required_capacity(self, prompts_per_step: int) -> int:
        """A step holds the places of all its groups until it is finished."""
        return prompts_per_step

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            raise RestoreError(
                f"sampler {self.name} keeps no state, but the cut has {', '.join(state)} for it"
            )


class InOrder(_Stateless):
    """Each group is meant for one step; steps wait for their own groups, however slow.

    Admits while a target step in [v, v+K] has fewer live groups than it takes (P, or fewer if
    it goes without some), and stamps the lowest such target: a dropped group is replaced without
    further ado. Trains only what is meant for v, so every group trains with a lag of at most K.
    """

    name = "in_order"
    stamps_targets = True

    def __init__(self, max_lookahead_versions: int) -> None:
        self._lookahead = max_lookahead_versions

    def admit(self, view: SamplerView) -> Stamp | None:
        version = view.weight_version
        for target in range(version, version + self._lookahead + 1):
            if view.live_of_target(target) < view.groups_of_target(target):
                return Stamp(target_step=target)
        return None

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        return _between(at_least, at_most, view.index.ready_of_target(view.weight_version))

    def evict(self, view: SamplerView) -> Sequence[Group]:
        """Those whose step has passed, or who were never meant for one."""
        index = view.index
        passed = index.ready_targets()
        passed = passed[: bisect_left(passed, view.weight_version)]
        return [group for target in (None, *passed) for group in index.ready_of_target(target)]

    def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
        return False

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        return record.target_step


class WeightFifo(_Stateless):
    """First started, first trained: a slow group is waited for, and none is dropped as stale.

    Admits while fewer groups are live than the next K+1 steps take, (K+1)·P if none is short.
    Trains the oldest start version there is, and goes on to the next once none of that version
    is in flight. All groups that are live when one starts, itself included, fit into K+1 steps
    and none started later overtakes it, so it trains with a lag of at most K.
    """

    name = "weight_fifo"

    def __init__(self, max_staleness_versions: int) -> None:
        self._steps_live = max_staleness_versions + 1

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        """The last that could have trained it: one before could be needed by groups before it."""
        start = record.start_weight_version
        return None if start is None else start + self._steps_live - 1

    def admit(self, view: SamplerView) -> Stamp | None:
        return Stamp() if view.live_count < view.groups_of_next(self._steps_live) else None

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        oldest = view.oldest_live_version()
        if oldest is None:
            return ()
        chosen: list[Group] = []
        for version in range(oldest, view.weight_version + 1):
            chosen += islice(view.index.ready_of_version(version), at_most - len(chosen))
            if len(chosen) == at_most or view.in_flight_of_version(version):
                break
        return _between(at_least, at_most, chosen)

    def evict(self, view: SamplerView) -> Sequence[Group]:
        return ()

    def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
        return False


class ReadyFirst(_Stateless):
    """First finished, first trained. Lag is reported, not bounded; nothing is ever dropped.

    Admits while fewer groups are live than the next K+1 steps take, (K+1)·P if none is short.
    The order of commits survives a restart.
    """

    name = "ready_first"

    def __init__(self, max_staleness_versions: int) -> None:
        self._steps_live = max_staleness_versions + 1

    def admit(self, view: SamplerView) -> Stamp | None:
        return Stamp() if view.live_count < view.groups_of_next(self._steps_live) else None

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        return _between(at_least, at_most, view.index.ready_in_commit_order())

    def evict(self, view: SamplerView) -> Sequence[Group]:
        return ()

    def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
        return False


class Windowed(_Stateless):
    """Trains whatever started in [v-K, v]; older groups are evicted, or aborted in flight.

    Always admits: the places bound it.
    """

    name = "windowed"

    def __init__(self, max_staleness_versions: int, *, freshest_first: bool = False) -> None:
        self._staleness = max_staleness_versions
        self._freshest_first = freshest_first

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        """The last that could have trained it, as oldest come first; else the one being filled."""
        start, version = record.start_weight_version, view.weight_version
        if start is None or self._freshest_first:
            return version
        return max(version, start + self._staleness)

    def admit(self, view: SamplerView) -> Stamp | None:
        return Stamp()

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        versions = view.index.ready_versions()
        oldest, newest = view.weight_version - self._staleness, view.weight_version
        usable = versions[bisect_left(versions, oldest) : bisect_right(versions, newest)]
        ordered = reversed(usable) if self._freshest_first else usable
        return _between(
            at_least, at_most, chain.from_iterable(map(view.index.ready_of_version, ordered))
        )

    def evict(self, view: SamplerView) -> Sequence[Group]:
        oldest = view.index.oldest_ready_version()
        if oldest is None or oldest >= view.weight_version - self._staleness:
            return ()  # asked at every commit, and mostly so
        versions = view.index.ready_versions()
        stale = versions[: bisect_left(versions, view.weight_version - self._staleness)]
        return [group for version in stale for group in view.index.ready_of_version(version)]

    def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
        return start_weight_version < weight_version - self._staleness


def _between(at_least: int, at_most: int, groups: Iterable[Group]) -> Sequence[Group]:
    chosen = tuple(islice(groups, at_most))
    return chosen if len(chosen) >= at_least else ()


def build_sampler(config: SamplerConfig, prompts_per_step: int) -> Sampler:
    """The sampler that the settings name.

    A `custom` one is built as `Class(config, prompts_per_step)`.

    Raises:
        ConfigError: a custom target that can't be imported, or that is no sampler.
    """
    match config.name:
        case "in_order":
            return InOrder(config.max_lookahead_versions)
        case "weight_fifo":
            return WeightFifo(config.max_staleness_versions)
        case "ready_first":
            return ReadyFirst(config.max_staleness_versions)
        case "windowed":
            return Windowed(
                config.max_staleness_versions, freshest_first=config.sample_freshest_first
            )
        case "custom":
            return _custom(config, prompts_per_step)


_MEMBERS = frozenset(name for name in vars(Sampler) if not name.startswith("_"))


def _custom(config: SamplerConfig, prompts_per_step: int) -> Sampler:
    key, target = "async_rl.sampler.target", config.target
    if target is None or ":" not in target:
        raise ConfigError(f"{key} is {target!r}; a custom sampler needs it as `module:Class`")
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{key} {target} can't be imported: {exc}") from exc
    if not callable(found):
        raise ConfigError(f"{key} {target} is no class, but {found!r}")
    sampler: Sampler = found(config, prompts_per_step)
    missing = _MEMBERS.difference(dir(sampler))
    if missing:
        raise ConfigError(f"{key} {target} is no sampler; it lacks {', '.join(sorted(missing))}")
    return sampler


def check_capacity(config: ControllerConfig, sampler: Sampler) -> tuple[int, int]:
    """Places, and how many of them may be in flight at once.

    A step's groups keep their places until the step is finished, also when it is trained in
    chunks, so a step fills exactly if the places take P groups: every sampler lets at least P
    in, any number in flight above 0 finishes them one by one, and a chunk is at most a step.
    A custom sampler may require more. Left out, the places are (K+1)·P: as many as the
    sampler can make use of while one step trains.

    Raises:
        ConfigError: the settings can never fill a step.
    """
    rl, groups_per_step = config.async_rl, config.grpo.num_prompts_per_step
    required = max(groups_per_step, sampler.required_capacity(groups_per_step))
    places = rl.max_buffered_rollouts
    if places is None:
        places = max(required, _versions_live(rl.sampler) * groups_per_step)
    if places < required:
        raise ConfigError(
            f"async_rl.max_buffered_rollouts is {places}, but a step of {groups_per_step} groups"
            f" (grpo.num_prompts_per_step) needs {required} places with the sampler"
            f" {sampler.name}: it could never fill"
        )
    return places, min(places, rl.max_inflight_prompts or places)


def _versions_live(config: SamplerConfig) -> int:
    match config.name:
        case "in_order":
            return config.max_lookahead_versions + 1
        case "custom":
            return 1
        case _:
            return config.max_staleness_versions + 1
