"""`StallReport`: what a run waits for, for whoever is woken at 3 am."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from sc_core.barrier import BarrierStatistics, CheckpointBarrier
from sc_core.causes import WATCHING, likely_cause
from sc_core.config import ControllerConfig
from sc_core.records import LedgerRecord
from sc_core.state import RunState
from sc_core.waits import Wait, seconds, tree, waits_below

_SHOWN = 4  #: of each list that may be long: the first ones tell the story


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Live groups of one target step, or of one start version."""

    of: int
    ready: int = 0
    under_way: int = 0  #: in flight, or waiting for their next attempt
    selected: int = 0

    def __str__(self) -> str:
        parts = [
            f"{count} {word}"
            for count, word in (
                (self.ready, "ready"),
                (self.under_way, "under way"),
                (self.selected, "selected"),
            )
            if count
        ]
        return f"{self.of}: {', '.join(parts)}"


class StallReport(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a run, and the likeliest reason why it does not go on. `str()` is for people.

    Ages and times are seconds. What has no age began before anybody looked.
    """

    cause: str  #: the likeliest reason, in one line
    quiet_s: float  #: since the last step, evaluation, weight sync or save; or since the start
    since: Mapping[str, int]  #: what was counted in that time
    step: int  #: finished training steps
    weight_version: int  #: that groups are stamped with
    trained_s: float | None  #: since the last step was trained, in this process life
    gate_closed_for: str | None  #: what nothing is dispatched for; None: the gate is open
    engines: tuple[str, ...]  #: that confirmed the last weight sync, or joined since
    engines_away: Mapping[str, str]  #: neither serving nor out: what, and why
    engines_out: Mapping[str, str]  #: put out of service, and why
    stop_reason: str | None  #: of a stop that was asked for
    barrier: BarrierStatistics  #: who holds it, who waits
    places_held: int  #: units of buffer capacity in use
    places_capacity: int  #: all of them
    states: Mapping[str, int]  #: prompts in the ledger
    exhausted: bool  #: the prompts have ended
    targets: tuple[GroupCounts, ...]  #: ready and under way, by the step they are meant for
    versions: tuple[GroupCounts, ...]  #: ready and under way, by start version
    oldest: tuple[Wait, ...]  #: of the attempts under way, what has waited longest
    requests: int  #: rollout calls
    dropped: int  #: prompts given up, over the whole run
    last_drops: tuple[str, ...]  #: the latest of them, and why
    last_failures: tuple[str, ...]  #: of siblings, the latest
    tasks: tuple[str, ...]  #: the task tree, indented, without those that look on

    def __str__(self) -> str:
        return "\n".join(
            [f"no progress for {seconds(self.quiet_s)}: {self.cause}", *self.details()]
        )

    def details(self) -> list[str]:
        """The lines below the first."""
        trained = (
            "none in this life" if self.trained_s is None else f"{seconds(self.trained_s)} ago"
        )
        since = _listed([f"{count} {name}" for name, count in self.since.items()], 9)
        exhausted = "; the source has ended" if self.exhausted else ""
        told = {
            "step": f"{self.step}, weight version {self.weight_version}; last trained: {trained}",
            "progress": f"{seconds(self.quiet_s)} ago; since then: {since or 'nothing'}",
            "gate": "open" if self.gate_closed_for is None else f"closed: {self.gate_closed_for}",
            "engines": self._engines(),
            "stop": self.stop_reason or "",
            "barrier": _barrier_line(self.barrier),
            "places": f"{self.places_held} of {self.places_capacity} held",
            "prompts": ", ".join(f"{n} {name}" for name, n in self.states.items()) + exhausted,
            "targets": _listed(list(map(str, self.targets)), _SHOWN, "; "),
            "versions": _listed(list(map(str, self.versions)), _SHOWN, "; "),
            "oldest": _listed([f"{w.group_id}, {w}" for w in self.oldest], _SHOWN, "; "),
            "requests": f"{self.requests} rollouts under way",
            "failures": _listed(list(self.last_failures), _SHOWN, "; "),
            "drops": _listed([f"{self.dropped} so far", *self.last_drops], _SHOWN, "; "),
        }
        lines = [f"  {name:<10} {text}" for name, text in told.items() if text]
        return [*lines, "  tasks", *(f"    {line}" for line in self.tasks)]

    def _engines(self) -> str:
        serve = f"{len(self.engines)} confirmed the last weight sync"
        away = [f"{engine} is {reason}" for engine, reason in self.engines_away.items()]
        out = [f"{engine} is out: {reason}" for engine, reason in self.engines_out.items()]
        return _listed([serve, *away, *out], _SHOWN, "; ")


class Reporter:
    """Writes reports on one run. Nothing of it runs, or costs anything, in between."""

    def __init__(self, state: RunState, barrier: CheckpointBarrier, config: ControllerConfig):
        self._state = state
        self._barrier = barrier
        chunk = config.async_rl.min_groups_for_streaming_train
        self._at_least = chunk or config.grpo.num_prompts_per_step
        self._rollout_s = config.async_rl.deadlines.rollout_s
        self.root: int | None = None  #: id of the run's uppermost task
        self._counted: dict[str, int] = {}

    def progress_seen(self) -> None:
        """From now on count anew what happens without progress."""
        self._counted = dict(self._state.ledger.counters)

    def report(self, *, now: float, quiet_s: float) -> StallReport:
        """What is true now, at `now` on the loop's clock."""
        state, ledger = self._state, self._state.ledger
        waits = waits_below(self.root, rollout_s=self._rollout_s)
        records = ledger.records()
        since = {
            name: more
            for name, count in ledger.counters.items()
            if (more := count - self._counted.get(name, 0))
        }
        return StallReport(
            cause=likely_cause(
                state,
                self._barrier,
                waits,
                at_least=self._at_least,
                quiet_s=quiet_s,
                since=since,
            ),
            quiet_s=quiet_s,
            since=since,
            step=ledger.step,
            weight_version=ledger.weight_version,
            trained_s=None if state.trained_at is None else now - state.trained_at,
            gate_closed_for=state.gate_closed_for,
            engines=state.engines,
            engines_away=dict(state.engines_away),
            engines_out=dict(state.engines_out),
            stop_reason=state.stop_reason,
            barrier=self._barrier.statistics(),
            places_held=state.places.held,
            places_capacity=state.places.capacity,
            states={
                "waiting": ledger.waiting_count,
                "in flight": ledger.in_flight_count,
                "committed": ledger.index.ready_count,
                "selected": ledger.index.selected_count,
            },
            exhausted=ledger.exhausted,
            targets=_counts(records, lambda record: record.target_step),
            versions=_counts(records, lambda record: record.start_weight_version),
            oldest=_oldest(waits),
            requests=state.requests.value,
            dropped=ledger.counters["dropped"],
            last_drops=tuple(state.last_drops),
            last_failures=tuple(state.last_failures),
            tasks=tuple(tree([wait for wait in waits if wait.task not in WATCHING])),
        )


def _oldest(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Of each group under way, the attempt or sibling that has waited longest; longest first."""
    of_group: dict[str, Wait] = {}
    for wait in sorted(waits, key=lambda wait: -(wait.age_s or 0.0)):
        if wait.group_id is not None and wait.depth:
            of_group.setdefault(wait.group_id, wait)
    return tuple(of_group.values())[:_SHOWN]


def _counts(
    records: Iterable[LedgerRecord], key: Callable[[LedgerRecord], int | None]
) -> tuple[GroupCounts, ...]:
    """Admitted groups by `key`, ascending; those without one are left out."""
    words = {"committed": "ready", "selected": "selected"}
    counted: dict[int, Counter[str]] = {}
    for record in records:
        of = key(record)
        if record.admitted and of is not None:
            counted.setdefault(of, Counter())[words.get(record.state, "under_way")] += 1
    return tuple(GroupCounts(of=of, **counted[of]) for of in sorted(counted))


def _barrier_line(barrier: BarrierStatistics) -> str:
    if not barrier.holders:
        return "free"
    held = f"held by {_listed(list(map(str, barrier.holders)), _SHOWN)}"
    if not barrier.waiters:
        return held
    return f"{held}; waiting: {_listed(list(map(str, barrier.waiters)), _SHOWN)}"


def _listed(items: Sequence[str], at_most: int, between: str = ", ") -> str:
    more = [f"{len(items) - at_most} more"] if len(items) > at_most else []
    return between.join([*items[:at_most], *more])
