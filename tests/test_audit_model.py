"""Any lawful history is accepted, however it was resumed; one wrong event is not."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import assume, given, settings

from sc_core.audit import AuditReport, audit
from sc_core.events import Event
from sc_core.records import Cut, Group, LedgerRecord, State
from sc_core.testing.events import MemoryEventLog


class Model:
    """A run without time, trainer or rows: only what the law speaks of, and saves and crashes."""

    def __init__(self) -> None:
        self.log = MemoryEventLog("0")
        self.saved: list[tuple[Cut, Model]] = []
        self.begin()

    def begin(self) -> None:
        self.records: dict[int, LedgerRecord] = {}
        self.next_ordinal = self.step = self.trained = self.dropped = 0
        self.log.append("run_started", step=0, weight_version=0)

    def say(self, kind: Any, ordinal: int, **fields: Any) -> None:
        fields.setdefault("group_id", self.records[ordinal].group_id)
        self.log.append(kind, ordinal=ordinal, **fields)

    def become(self, ordinal: int, **changes: Any) -> None:
        self.records[ordinal] = msgspec.structs.replace(self.records[ordinal], **changes)

    def pick(self, state: State, choice: int) -> list[int]:
        there = [ordinal for ordinal, record in self.records.items() if record.state == state]
        return there[choice % len(there) :][:1] if there else []

    # what may happen ------------------------------------------------------------------

    def admit(self, choice: int) -> None:
        self.records[self.next_ordinal] = LedgerRecord(ordinal=self.next_ordinal, payload=None)
        self.log.append("admitted", ordinal=self.next_ordinal)
        self.next_ordinal += 1

    def dispatch(self, choice: int) -> None:
        for ordinal in self.pick("waiting", choice):
            self.become(ordinal, state="in_flight", start_weight_version=self.step)
            self.say("dispatched", ordinal, weight_version=self.step)

    def commit(self, choice: int) -> None:
        for ordinal in self.pick("in_flight", choice):
            self.become(ordinal, state="committed")
            start = self.records[ordinal].start_weight_version
            self.say("committed", ordinal, weight_version=start)

    def fail(self, choice: int) -> None:
        for ordinal in self.pick("in_flight", choice):
            self.again_or_drop(ordinal, choice)

    def abort(self, choice: int) -> None:
        for ordinal in self.pick("in_flight", choice):
            self.say("aborted", ordinal, reason="stale")
            self.again_or_drop(ordinal, choice)

    def evict(self, choice: int) -> None:
        for ordinal in self.pick("committed", choice):
            self.say("evicted", ordinal, reason="stale")
            self.again_or_drop(ordinal, choice)

    def give_up(self, choice: int) -> None:
        for ordinal in self.pick("waiting", choice):
            self.again_or_drop(ordinal, 0)

    def again_or_drop(self, ordinal: int, choice: int) -> None:
        if choice % 2:
            record = self.records[ordinal]
            self.become(ordinal, state="waiting", attempt=record.attempt + 1)
            self.say("redispatched", ordinal, reason="again")
        else:
            self.say("dropped", ordinal, reason="enough")
            del self.records[ordinal]
            self.dropped += 1

    def select(self, choice: int) -> None:
        for ordinal in self.pick("committed", choice):
            self.become(ordinal, state="selected")
            self.say("selected", ordinal, step=self.step + 1)

    def abandon(self, choice: int) -> None:
        for ordinal in list(self.records):
            if self.records[ordinal].state == "selected":
                self.become(ordinal, state="committed")
                self.say("abandoned", ordinal, step=self.step + 1)

    def train(self, choice: int) -> None:
        selected = [o for o, record in self.records.items() if record.state == "selected"]
        if selected:
            self.step += 1
        for ordinal in selected:
            self.say("trained", ordinal, step=self.step, weight_version=self.step)
            del self.records[ordinal]
            self.trained += 1
        if selected and choice % 3:  # else killed in between, perhaps
            self.log.append("weight_sync", step=self.step, weight_version=self.step)

    def save(self, choice: int) -> None:
        cut = Cut(
            incarnation=self.log.incarnation,
            event_seq=self.log.seq,
            step=self.step,
            weight_version=self.step,
            group_size=0,
            prompts_per_step=1,
            next_ordinal=self.next_ordinal,
            position=None,
            records=tuple(self.records.values()),
            groups=tuple(
                Group(
                    group_id=record.group_id,
                    ordinal=record.ordinal,
                    sample_ids=(),
                    start_weight_version=record.start_weight_version or 0,
                    end_weight_version=self.step,
                    commit_seq=0,
                )
                for record in self.records.values()
                if record.state in ("committed", "selected")
            ),
        )
        self.saved.append((cut, copy.copy(self)))
        self.saved[-1][1].records = dict(self.records)
        self.log.append("checkpoint", step=self.step, weight_version=self.step, digest="d")

    def crash(self, choice: int) -> None:
        """Go on from any bundle that was ever saved, or afresh if there is none."""
        self.log = self.log.after_crash(f"{self.log.incarnation}{choice % 3}")
        if not self.saved:
            self.begin()
            return
        cut, then = self.saved[-1 - choice % min(3, len(self.saved))]
        self.log.append(
            "resumed",
            parent=cut.incarnation,
            parent_seq=cut.event_seq,
            digest="d",
            step=cut.step,
            weight_version=cut.weight_version,
        )
        self.next_ordinal, self.step = cut.next_ordinal, cut.step
        self.trained, self.dropped = then.trained, then.dropped
        self.records = dict(then.records)
        for ordinal, record in self.records.items():
            if record.state == "in_flight":
                self.become(ordinal, state="waiting", attempt=record.attempt + 1)
            elif record.state == "selected":
                self.become(ordinal, state="committed")


NEEDS: dict[Any, State | None] = {
    Model.admit: None,
    Model.dispatch: "waiting",
    Model.commit: "in_flight",
    Model.select: "committed",
    Model.train: "selected",
    Model.abandon: "selected",
    Model.fail: "in_flight",
    Model.abort: "in_flight",
    Model.evict: "committed",
    Model.give_up: "waiting",
    Model.save: None,
    Model.crash: None,
}
OFTEN = (Model.dispatch, Model.commit, Model.select, Model.train)


@st.composite
def histories(draw: st.DrawFn) -> Model:
    model = Model()
    for _ in range(draw(st.integers(0, 60))):
        states = {record.state for record in model.records.values()}
        possible = [move for move, state in NEEDS.items() if state is None or state in states]
        possible += 4 * [move for move in OFTEN if move in possible]
        draw(st.sampled_from(possible))(model, draw(st.integers(0, 11)))
    if draw(st.booleans()):
        model.log.append("stopped", reason="max_steps", step=model.step)
    return model


@settings(deadline=None)
@given(histories())
def test_every_lawful_history_is_accepted_and_counted(model: Model) -> None:
    bundles = [(f"cut_{number}", cut) for number, (cut, _) in enumerate(model.saved)]
    report = audit(model.log.events, bundles)
    assert report.violations == ()
    assert report.prompts == model.next_ordinal
    assert report.trained == model.trained
    assert sum(report.dropped.values()) == model.dropped
    assert sum(report.pending.values()) == len(model.records)
    assert (report.step, report.weight_version) == (model.step, model.step)
    assert len(report.bundles) + len(report.other_bundles) == len(bundles)


def effective(model: Model, report: AuditReport) -> list[Event]:
    until = {life.incarnation: life.last_seq for life in report.history}
    return [e for e in model.log.events if e.seq <= until.get(e.incarnation, -1)]


MATTER = (
    "run_started", "resumed", "admitted", "dispatched", "redispatched", "aborted", "committed",
    "evicted", "selected", "abandoned", "trained", "dropped",
)  # fmt: skip


@settings(deadline=None)
@given(histories(), st.data())
def test_an_event_that_happened_twice_is_refused(model: Model, data: st.DataObject) -> None:
    history = effective(model, audit(model.log.events))
    again = data.draw(st.sampled_from([event for event in history if event.event in MATTER]))
    assume(again.event != "redispatched")  # says only that another attempt will follow
    events = []
    for event in model.log.events:
        if event.seq > again.seq:
            event = msgspec.structs.replace(event, seq=event.seq + 1)
        if (event.parent_seq or 0) >= again.seq:
            event = msgspec.structs.replace(event, parent_seq=(event.parent_seq or 0) + 1)
        events.append(event)
        if event.seq == again.seq:
            events.append(msgspec.structs.replace(event, seq=event.seq + 1))
    assert not audit(events).ok


@settings(deadline=None)
@given(histories(), st.data())
def test_an_event_that_is_missing_is_refused_where_the_rest_needs_it(
    model: Model, data: st.DataObject
) -> None:
    history = effective(model, audit(model.log.events))
    gone = data.draw(st.sampled_from([event for event in history if event.event in MATTER]))
    events = [event for event in model.log.events if event.seq != gone.seq]
    report = audit(events)
    assert report.ok == (not needed(gone, history, model.log.events)), report.violations


def needed(gone: Event, history: list[Event], log: list[Event]) -> bool:
    """Whether what is left of the log can't have happened without that event."""
    after = [event for event in history if event.seq > gone.seq]
    children = [e for e in history if e.event == "resumed" and e.parent == gone.incarnation]
    siblings = [e for e in log if e.incarnation == gone.incarnation and e.seq != gone.seq]
    if any((e.parent_seq or 0) > max((s.seq for s in siblings), default=0) for e in children):
        return True  # the end of an incarnation, up to which another one resumed from it
    if gone.event in ("run_started", "resumed"):
        return bool(siblings)
    mine = [event for event in after if event.ordinal == gone.ordinal]
    resumes = [event for event in after if event.event == "resumed"]
    next_kind = mine[0].event if mine else None
    at_once = bool(mine) and not any(event.seq < mine[0].seq for event in resumes)
    before = [e for e in history if e.ordinal == gone.ordinal and e.seq < gone.seq]
    loose = before and before[-1].event == "evicted"  # waits for its end, and `gone` is that
    if gone.event == "admitted":
        return bool(mine) or any(event.event == "admitted" for event in after)
    if gone.event in ("dropped", "redispatched") and loose:
        if at_once:
            return next_kind == "dispatched"
        return bool(resumes) or any(event.event == "stopped" for event in after[-1:])
    if gone.event == "redispatched":
        return at_once and next_kind == "dispatched" and before[-1].event != "admitted"
    if gone.event == "dispatched":
        return at_once and next_kind in ("committed", "aborted")
    if gone.event == "committed":
        return next_kind in ("selected", "evicted")
    if gone.event == "selected":
        return at_once and next_kind in ("trained", "abandoned")
    if gone.event == "abandoned":
        return at_once and next_kind in ("selected", "evicted")
    if gone.event == "trained":
        of_step = [e for e in history if e.event == "trained" and e.step == gone.step]
        return len(of_step) == 1 and any(e.event in ("trained", "resumed") for e in after)
    return False  # `aborted` and `evicted` only say why
