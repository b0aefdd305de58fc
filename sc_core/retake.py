"""One effective history, decided anew event by event on a real `RunState` and `Ledger`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import anyio
import msgspec

from sc_core.decisions import DecisionSettings
from sc_core.difference import (
    Decision,
    Difference,
    Differs,
    View,
    describe,
    describe_groups,
    for_step,
)
from sc_core.errors import ScError
from sc_core.events import Event
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.ports import EventKind, Sampler
from sc_core.records import (
    Cut,
    FinishedSibling,
    Group,
    GroupId,
    LedgerRecord,
    PulledPrompt,
    sample_ids,
)
from sc_core.state import RunState

R = TypeVar("R")
BuildSampler = Callable[[DecisionSettings], Sampler]


class Instant(msgspec.Struct, frozen=True, kw_only=True):
    """What of a bundle's cut follows from the log."""

    bundle: str
    seq: int
    exhausted: bool
    records: Mapping[int, str]
    commit_order: tuple[GroupId, ...]

    @staticmethod
    def of(bundle: str, cut: Cut) -> Instant:
        return Instant(
            bundle=bundle,
            seq=cut.event_seq,
            exhausted=cut.exhausted,
            records={record.ordinal: _told(record) for record in cut.records},
            commit_order=tuple(group.group_id for group in cut.groups),
        )


class _Predicted:
    """An event sink that keeps what a `RunState` says must come next in the log."""

    incarnation = "replay"
    seq = 0

    def __init__(self) -> None:
        self.events: deque[tuple[EventKind, Mapping[str, Any]]] = deque()

    def append(self, kind: EventKind, **fields: Any) -> int:
        self.events.append((kind, fields))
        return 0

    def append_many(self, kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        self.events.extend((kind, fields) for fields in each)
        return 0

    def sync(self) -> None:
        pass


class Retake:
    """The state of the run so far. One event at a time; the first difference ends it."""

    def __init__(self, build: BuildSampler) -> None:
        self.admissions = self.selections = self.evictions = 0
        self._build = build
        self._state: RunState | None = None
        self._settings: DecisionSettings
        self._next = _Predicted()
        self._open: list[Group] = []  #: the open step, in the order of selection
        self._chosen: Sequence[Group] = ()  #: by the last `select`
        self._stale: dict[GroupId, Group] | None = None  #: still to be evicted in this instant
        self._gives_up_tail = False  #: these, at the end of prompts
        self._event: Event

    def enter(self, event: Event) -> None:
        """Take the next event of the effective history.

        Raises:
            Differs: it is not what was decided, or not what follows from it.
            RestoreError: the settings of this incarnation are not recorded.
        """
        if event.event == "engine":  # the sampler does not know of engines
            return
        self._event = event
        if self._next.events:
            self._follows(event)
        elif event.event in ("run_started", "resumed"):
            self._starts(event)
        elif self._state is None:
            self._differs("ledger", f"has {describe(event)}", "no run has started")
        else:
            with _Lawful(self):
                self._decides(self._state, event)
                if self._next.events:
                    self._follows(event)

    # an incarnation ---------------------------------------------------------------------

    def _starts(self, event: Event) -> None:
        settings = DecisionSettings.read(
            event.settings, f"seq {event.seq}: {event.event} of incarnation {event.incarnation}"
        )
        sampler = self._build(settings)
        with _Lawful(self):
            if event.event == "run_started" or self._state is None:
                ledger = Ledger(prompts_per_step=settings.groups_per_step)
                cut = None
            else:
                self._evictions_over(self._state)
                ledger, cut = self._as_restored(self._state, settings, sampler)
        self._settings = settings
        self._open, self._chosen = [], ()
        places = Places(settings.places)
        self._state = RunState(ledger, places, sampler, self._next, clock=lambda: 0.0)
        if cut is not None:
            for record in ledger.records():
                if record.admitted:
                    places.restore(record.ordinal)
            self._state.restored(cut, load_replay_buffer=settings.load_replay_buffer)
            ledger.exhausted = False  # the source is asked once more

    def _as_restored(
        self, state: RunState, settings: DecisionSettings, sampler: Sampler
    ) -> tuple[Ledger, Cut]:
        cut = state.ledger.cut(
            incarnation="",
            event_seq=0,
            group_size=1,
            sampler=state.sampler.name,
            sampler_state=state.sampler.state(),
            source_fingerprint="",
            suspects=(),
        )
        if cut.sampler == sampler.name:
            sampler.restore(cut.sampler_state)
        ledger = Ledger.restored(cut, prompts_per_step=settings.groups_per_step, group_size=1)
        if settings.granularity != "sibling" or not settings.load_replay_buffer:
            for record in ledger.records():
                if record.finished:
                    ledger.forget_siblings(record.ordinal)
        return ledger, cut

    def compare(self, cut: Instant) -> None:
        """Check that a bundle has the ledger that the log leads to.

        Raises:
            Differs: naming the first prompt of which they disagree.
        """
        state = self._state
        if state is None:
            return
        with _Lawful(self):
            self._evictions_over(state)
        ledger = state.ledger
        if cut.exhausted and not ledger.waiting_count and not ledger.in_flight_count:
            if cut.records != _all_told(ledger):  # a step was tried, and a stop came between
                ledger.retarget()
        told = _all_told(ledger)
        for ordinal in sorted(told.keys() | cut.records.keys()):
            mine, its = told.get(ordinal, "not live"), cut.records.get(ordinal, "not live")
            if mine != its:
                self._differs_at(
                    cut.seq,
                    ordinal,
                    "ledger",
                    f"leads to prompt {ordinal}: {mine}",
                    f"{cut.bundle} has it {its}",
                )
        order = tuple(group.group_id for group in ledger.index.groups())
        if order != cut.commit_order:
            logged, answer = (" ".join(map(str, ids)) for ids in (order, cut.commit_order))
            self._differs_at(
                cut.seq, None, "ledger", f"has the commits {logged}", f"{cut.bundle} has {answer}"
            )

    # an event ---------------------------------------------------------------------------

    def _follows(self, event: Event) -> None:
        """The event must be the next of those that the last decision led to."""
        kind, fields = self._next.events.popleft()
        names = "ordinal", "group_id", "step", "weight_version"
        if kind == event.event and all(getattr(event, n) == fields.get(n) for n in names):
            return
        if kind == "selected" and self._state is not None:
            self._state.ledger.abandon(self._chosen)  # so that the view is the one before
            answer = f"the sampler selects {describe_groups(self._chosen)}"
            self._differs("select", f"has {describe(event)}", answer)
        expected = Event(seq=0, t=0.0, incarnation="", event=kind, **fields)
        self._differs("ledger", f"has {describe(event)}", f"what comes is {describe(expected)}")

    def _decides(self, state: RunState, event: Event) -> None:
        kind, ordinal = event.event, event.ordinal
        if kind == "evicted":
            self._evicts(state, event)
            return
        self._evictions_over(state)
        if kind == "exhausted":
            state.end_of_prompts()
            return
        if kind in ("weight_sync", "checkpoint", "stopped"):
            return
        if ordinal is None:
            self._differs("ledger", f"has {kind}", "it needs the ordinal of a prompt")
        if kind == "admitted":
            state.pulled(PulledPrompt(None, None))
        elif kind == "dispatched":
            self._dispatches(state, event, ordinal)
        elif kind == "committed":
            record = state.ledger.get(ordinal)
            version = 0 if record is None else record.start_weight_version or 0
            state.committed(ordinal, rewards=[0.0], tokens=0, end_weight_version=version)
        elif kind == "redispatched":
            state.retried(ordinal, "infra", event.reason or "")
        elif kind == "aborted":
            self._aborts(state, event, ordinal)
        elif kind == "dropped":
            record, short = state.ledger.get(ordinal), None
            if event.step is not None and record is not None:
                short = state.ledger.can_shorten(state.sampler.step_of(state.ledger, record))
            state.dropped(ordinal, event.reason or "", short_step=short)
        elif kind == "selected":
            self._selects(state, event)
        elif not self._open:
            self._differs("ledger", f"has {describe(event)}", "no step is open")
        elif kind == "abandoned":
            state.abandoned(self._open, state.ledger.step + 1)
            self._open = []
        else:
            self._trains(state, event)

    def _trains(self, state: RunState, event: Event) -> None:
        missing = self._missing(state)
        if missing > 0 and not (state.nothing_more and self._settings.short_last_step == "train"):
            answer = f"the step has {missing} groups too few"
            self._differs("ledger", f"has {describe(event)}", answer)
        state.trained(self._open)
        self._open = []

    # decisions --------------------------------------------------------------------------

    def _dispatches(self, state: RunState, event: Event, ordinal: int) -> None:
        ledger, stamp = state.ledger, None
        record = ledger.get(ordinal)
        if record is not None and not record.admitted:
            logged = f"dispatches prompt {ordinal}{for_step(event.step)}"
            stamp = self._ask("admit", lambda: state.sampler.admit(ledger))
            if stamp is None:
                self._differs("admit", logged, "the sampler admits nothing")
            if stamp.target_step != event.step:
                answer = f"the sampler stamps it{for_step(stamp.target_step) or ' with no step'}"
                self._differs("admit", logged, answer)
            if ordinal not in state.places and not state.places.free:
                self._differs("admit", logged, "no place is free")
            self.admissions += 1
        elif record is not None and record.finished and record.state == "waiting":
            if event.weight_version != record.start_weight_version:  # none had finished, or too old
                ledger.forget_siblings(ordinal)
        record = state.dispatched(ordinal, stamp)
        if self._settings.granularity == "sibling" and not record.finished:
            # Which siblings finish is not in the log; one stands for those that might.
            ledger.finish_sibling(ordinal, _stand_in(record))

    def _selects(self, state: RunState, event: Event) -> None:
        ledger, sampler = state.ledger, state.sampler
        at_most = self._missing(state)
        at_least = min(self._settings.groups_per_chunk, at_most)
        logged = f"has {describe(event)}"
        if at_most < 1:
            self._differs("select", logged, f"step {ledger.step + 1} has all of its groups")
        chosen = list(self._ask("select", lambda: sampler.select(ledger, at_least, at_most)))
        if state.nothing_more and len(chosen) < at_most:
            if self._settings.short_last_step == "drop" and ledger.index.ready_count < at_most:
                self._differs("select", logged, "the prompts have ended, and the rest is dropped")
            ledger.retarget()
            chosen = list(self._ask("select", lambda: sampler.select(ledger, 1, at_most)))
        if not 0 < len(chosen) <= at_most:
            wanted = f"{at_least} to {at_most}" if at_least < at_most else f"{at_most}"
            answer = f"the sampler, asked for {wanted}, selects {describe_groups(chosen)}"
            self._differs("select", logged, answer)
        chosen.sort(key=lambda group: group.ordinal)
        state.selected(chosen, ledger.step + 1)
        self._chosen = chosen
        self._open += chosen
        self.selections += 1

    def _evicts(self, state: RunState, event: Event) -> None:
        if not self._stale:  # a new instant, maybe right after another
            self._evictions_over(state)
            stale = self._ask("evict", lambda: state.sampler.evict(state.ledger))
            self._gives_up_tail = not stale and self._is_tail(state)
            if self._gives_up_tail:
                stale = list(state.ledger.index.ready_in_commit_order())
            self._stale = {group.group_id: group for group in stale}
        group = self._stale.pop(GroupId(event.group_id or ""), None)
        if group is None:
            answer = f"the sampler gives up {describe_groups(self._stale.values())}"
            self._differs("evict", f"has {describe(event)}", answer)
        record = state.ledger.get(group.ordinal)
        requeue = not self._gives_up_tail and self._requeues(record)
        state.evicted(group, requeue=requeue, reason=event.reason or "")
        self.evictions += 1

    def _is_tail(self, state: RunState) -> bool:
        """Whether what is ready is given up, since it is too little for a step."""
        return (
            self._settings.short_last_step == "drop"
            and state.nothing_more
            and not self._open
            and state.ledger.index.ready_count < self._missing(state)
        )

    def _missing(self, state: RunState) -> int:
        """How many more groups the open step takes."""
        return state.ledger.groups_of_target(state.ledger.weight_version) - len(self._open)

    def _aborts(self, state: RunState, event: Event, ordinal: int) -> None:
        record, version = state.ledger.get(ordinal), state.ledger.weight_version
        start = None if record is None else record.start_weight_version
        if record is not None and start is not None:
            if not self._ask("abort", lambda: state.sampler.may_abort(start, version)):
                answer = f"the sampler may still select what started at version {start}"
                self._differs("abort", f"has {describe(event)}", answer)
            state.aborted(record, requeue=self._requeues(record), reason=event.reason or "")
            self.evictions += 1
        else:
            self._differs("ledger", f"has {describe(event)}", f"prompt {ordinal} is not in flight")

    def _requeues(self, record: LedgerRecord | None) -> bool:
        """Whether a prompt whose group is too old goes out again."""
        settings = self._settings
        return (
            settings.on_stale_prompt == "requeue"
            and record is not None
            and record.stale_requeues < settings.max_stale_requeues
        )

    def _evictions_over(self, state: RunState) -> None:
        """All that were too old are gone: those that are left close up."""
        if self._stale is None:
            return
        if self._stale:
            answer = f"the sampler also gives up {describe_groups(self._stale.values())}"
            self._differs("evict", f"goes on with {describe(self._event)}", answer)
        self._stale = None
        if state.sampler.stamps_targets:
            state.ledger.retarget(untargeted=True)

    def _ask(self, decision: Decision, question: Callable[[], R]) -> R:
        try:
            return question()
        except Exception as exc:  # of user code
            answer = f"the sampler raises {type(exc).__name__}: {exc}"
            self._differs(decision, f"has {describe(self._event)}", answer)

    # differences ------------------------------------------------------------------------

    def _differs(self, decision: Decision, logged: str, answer: str) -> NoReturn:
        self._differs_at(self._event.seq, self._event.ordinal, decision, logged, answer)

    def _differs_at(
        self, seq: int, ordinal: int | None, decision: Decision, logged: str, answer: str
    ) -> NoReturn:
        view = None if self._state is None else View.of(self._state)
        raise Differs(
            Difference(
                seq=seq,
                ordinal=ordinal,
                decision=decision,
                logged=logged,
                answer=answer,
                view=view,
            )
        )

    def unlawful(self, error: Exception) -> NoReturn:
        answer = "no place is free" if isinstance(error, anyio.WouldBlock) else str(error)
        self._differs("ledger", f"has {describe(self._event)}", answer)


class _Lawful:
    """What ledger and places refuse is a difference."""

    def __init__(self, run: Retake) -> None:
        self._run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (ScError, anyio.WouldBlock)):
            self._run.unlawful(error)


def _stand_in(record: LedgerRecord) -> FinishedSibling:
    assert record.start_weight_version is not None
    return FinishedSibling(
        sibling=0,
        sample_id=sample_ids(record.group_id, 1)[0],
        reward=0.0,
        tokens=0,
        end_weight_version=record.start_weight_version,
    )


def _told(record: LedgerRecord) -> str:
    """Of a record, what follows from the log."""
    started = "" if record.start_weight_version is None else f" v{record.start_weight_version}"
    return f"{record.state} as {record.group_id}{started}{for_step(record.target_step)}"


def _all_told(ledger: Ledger) -> dict[int, str]:
    return {record.ordinal: _told(record) for record in ledger.records()}
