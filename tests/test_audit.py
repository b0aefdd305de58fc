"""Each broken log differs from a lawful one in one event."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sc_core import books
from sc_core.audit import AuditReport, audit, audit_log
from sc_core.errors import RestoreError
from sc_core.events import Event, JsonlEventLog
from sc_core.records import Cut, Group, GroupId, LedgerRecord, State, group_id, sample_ids
from sc_core.testing.events import MemoryEventLog


class Story:
    """Writes a lawful log, a few words at a time."""

    def __init__(self) -> None:
        self.log = MemoryEventLog("a")
        self.log.append("run_started", step=0, weight_version=0)
        self.step = 0
        self.attempts: dict[int, int] = {}

    def tell(self, kind: Any, *ordinals: int, **fields: Any) -> Story:
        for ordinal in ordinals:
            group = group_id(ordinal, self.attempts.get(ordinal, 0))
            self.log.append(kind, ordinal=ordinal, group_id=group, **fields)
        return self

    def admit(self, *ordinals: int) -> Story:
        for ordinal in ordinals:
            self.log.append("admitted", ordinal=ordinal)
        return self

    def dispatch(self, *ordinals: int) -> Story:
        return self.tell("dispatched", *ordinals, weight_version=self.step)

    def commit(self, *ordinals: int, start: int | None = None) -> Story:
        version = self.step if start is None else start
        return self.tell("committed", *ordinals, weight_version=version)

    def again(self, *ordinals: int, reason: str = "infra failure: lost") -> Story:
        for ordinal in ordinals:
            self.attempts[ordinal] = self.attempts.get(ordinal, 0) + 1
        return self.tell("redispatched", *ordinals, reason=reason)

    def ready(self, *ordinals: int) -> Story:
        return self.admit(*ordinals).dispatch(*ordinals).commit(*ordinals)

    def select(self, *ordinals: int) -> Story:
        return self.tell("selected", *ordinals, step=self.step + 1)

    def train(self, *ordinals: int) -> Story:
        self.step += 1
        self.tell("trained", *ordinals, step=self.step, weight_version=self.step)
        self.log.append("weight_sync", step=self.step, weight_version=self.step)
        return self

    def stop(self) -> Story:
        self.log.append("stopped", reason="max_steps", step=self.step)
        return self

    def crash(self, name: str, *, back_to: tuple[str, int, int], attempts: Any = None) -> Story:
        """Resume as incarnation `name` from the cut (incarnation, seq, step)."""
        parent, parent_seq, self.step = back_to
        self.attempts = dict(self.attempts if attempts is None else attempts)
        self.log = self.log.after_crash(name)
        self.log.append(
            "resumed",
            parent=parent,
            parent_seq=parent_seq,
            digest="d" * 64,
            step=self.step,
            weight_version=self.step,
        )
        return self

    def cut(self) -> tuple[str, int, int]:
        return self.log.incarnation, self.log.seq, self.step

    def report(self) -> AuditReport:
        return audit(self.log.events)


def clean() -> Story:
    """Two steps of two prompts: with a retry, an abandoned step, a drop, an eviction."""
    story = Story().ready(0, 1).admit(2).dispatch(2).again(2).dispatch(2)
    story.select(0, 1).tell("abandoned", 0, 1, step=1).select(0, 1).train(0, 1)
    story.commit(2, start=0).admit(3).dispatch(3).tell("aborted", 3, reason="stale").again(3)
    story.dispatch(3).commit(3).tell("evicted", 3, reason="stale").again(3, reason="stale")
    story.ready(4).select(2, 4).train(2, 4).tell("dropped", 3, reason="stale: 2 versions old")
    return story.admit(5).stop()


def test_a_clean_run_adds_up() -> None:
    report = clean().report()
    assert report.violations == ()
    assert (report.prompts, report.trained, report.step, report.weight_version) == (6, 4, 2, 2)
    assert report.dropped == {"stale": 1}
    assert report.pending == {"waiting": 1}
    assert report.ok
    assert str(report) == (
        "conservation holds: 6 prompts = 4 trained + 1 dropped + 1 pending, each exactly once"
    )


def test_an_empty_log_breaks_no_law() -> None:
    assert str(audit([])).startswith("conservation holds: 0 prompts")


# resumes -------------------------------------------------------------------------------


def resumed_twice() -> Story:
    story = Story().ready(0, 1, 2).admit(3).dispatch(3).select(0, 1)
    first_cut, attempts = story.cut(), dict(story.attempts)
    story.train(0, 1).commit(3, start=0)  # undone by the first crash
    story.crash("b", back_to=first_cut, attempts=attempts)
    story.attempts[3] = 1
    story.dispatch(3).select(0, 1).train(0, 1).commit(3, start=0)
    second_cut, attempts = story.cut(), dict(story.attempts)
    story.select(2, 3).train(2, 3).ready(4)  # undone by the second
    story.crash("c", back_to=second_cut, attempts=attempts)
    return story.select(2, 3).train(2, 3).ready(4, 5).select(4, 5).train(4, 5).stop()


def test_a_run_that_was_resumed_twice_adds_up_over_its_effective_history() -> None:
    story = resumed_twice()
    report = story.report()
    assert report.violations == ()
    assert (report.prompts, report.trained, report.step) == (6, 6, 3)
    assert [(life.incarnation, life.parent) for life in report.history] == [
        ("a", None),
        ("b", "a"),
        ("c", "b"),
    ]
    assert report.incarnations == 3
    assert report.events + report.undone_events == len(story.log.events)
    first, second, third = report.history
    undone_of_a = second.first_seq - 1 - first.last_seq
    undone_of_b = third.first_seq - 1 - second.last_seq
    assert (undone_of_a, undone_of_b) == (4, 8)
    assert report.undone_events == 12


def test_only_the_last_incarnation_counts() -> None:
    """Two processes went on from one cut: what the first of them trained is undone."""
    story = Story().ready(0, 1).select(0, 1)
    cut = story.cut()
    story.crash("b", back_to=cut).select(0, 1).train(0, 1)
    report = story.crash("c", back_to=cut).report()
    assert [life.incarnation for life in report.history] == ["a", "c"]
    assert (report.trained, report.pending) == (0, {"committed": 2})
    assert report.ok


def test_a_cut_of_a_grandparent_may_be_named_through_an_incarnation_without_a_bundle() -> None:
    story = Story().ready(0, 1)
    _, seq, _ = cut = story.cut()
    story.crash("b", back_to=cut).select(0, 1).train(0, 1)
    report = story.crash("c", back_to=("b", seq, 0)).select(0, 1).train(0, 1).report()
    assert [life.incarnation for life in report.history] == ["a", "c"]
    assert (report.trained, report.violations) == (2, ())


def test_a_fresh_start_begins_a_history_of_its_own() -> None:
    story = Story().ready(0, 1).select(0, 1).train(0, 1)
    story.log = story.log.after_crash("b")
    story.log.append("run_started", step=0, weight_version=0)
    story.step = 0
    report = story.ready(0, 1).report()
    assert (report.prompts, report.trained, report.violations) == (2, 0, ())


def test_what_was_under_way_at_the_cut_starts_again_and_what_was_ready_stays_ready() -> None:
    story = Story().ready(0, 1, 2).admit(3, 4).dispatch(3).select(0)
    story.tell("aborted", 3, reason="stale")
    report = story.crash("b", back_to=story.cut()).report()
    assert report.pending == {"committed": 3, "waiting": 2}


def test_a_killed_run_may_end_anywhere() -> None:
    whole = clean().log.events
    for length in range(1, len(whole)):
        assert audit(whole[:length]).violations == ()


# one event wrong -----------------------------------------------------------------------

Change = Callable[[list[Event]], list[Event]]


def where(kind: str, ordinal: int | None = None, *, nth: int = 0) -> Callable[[Event], bool]:
    seen = iter(range(1000))
    return lambda event: (
        event.event == kind and (ordinal is None or event.ordinal == ordinal) and next(seen) == nth
    )


def without(kind: str, ordinal: int | None = None, *, nth: int = 0) -> Change:
    def change(events: list[Event]) -> list[Event]:
        gone = where(kind, ordinal, nth=nth)
        return [event for event in events if not gone(event)]

    return change


def with_fields(kind: str, ordinal: int | None = None, /, *, nth: int = 0, **fields: Any) -> Change:
    def change(events: list[Event]) -> list[Event]:
        that = where(kind, ordinal, nth=nth)
        return [msgspec.structs.replace(e, **fields) if that(e) else e for e in events]

    return change


def twice(kind: str, ordinal: int | None = None, *, nth: int = 0, then: int = 0) -> Change:
    """The event once more, `then` events after the first time."""

    def change(events: list[Event]) -> list[Event]:
        at = next(i for i, that in enumerate(map(where(kind, ordinal, nth=nth), events)) if that)
        return renumbered([*events[: at + 1 + then], events[at], *events[at + 1 + then :]])

    return change


def inserted(before: str, kind: Any, ordinal: int, attempt: int = 0, **fields: Any) -> Change:
    def change(events: list[Event]) -> list[Event]:
        at = next(i for i, that in enumerate(map(where(before), events)) if that)
        group = group_id(ordinal, attempt)
        new = msgspec.structs.replace(
            events[at], event=kind, ordinal=ordinal, group_id=group, **fields
        )
        return renumbered([*events[:at], new, *events[at:]])

    return change


def renumbered(events: Sequence[Event]) -> list[Event]:
    """The same events with the numbers 1, 2, …; a `parent_seq` names the event it named."""
    new = {event.seq: seq for seq, event in enumerate(events, 1)}
    return [
        msgspec.structs.replace(
            event,
            seq=seq,
            parent_seq=None if event.parent_seq is None else new.get(event.parent_seq, 0),
        )
        for seq, event in enumerate(events, 1)
    ]


BROKEN: list[tuple[str, Callable[[], Story], Change, str]] = [
    ("never admitted", clean, without("admitted", 1), "1: dispatched after it was never admitted"),
    (
        "a gap in the ordinals",
        lambda: Story().admit(0, 1, 2, 3),
        without("admitted", 2),
        "2: 2 was never admitted; 3 was",
    ),
    (
        "a long gap in the ordinals",
        lambda: Story().admit(0),
        inserted("admitted", "admitted", 100_000),
        "1: 1 to 99999 were never admitted; 100000 was",
    ),
    ("admitted twice", clean, twice("admitted", 1), "1: admitted after it was admitted"),
    ("admitted again", clean, twice("admitted", 0, then=20), "0: admitted after it was trained"),
    ("no ordinal", clean, with_fields("admitted", 5, ordinal=None), "admitted without an ordinal"),
    ("trained twice", clean, twice("trained", 0), "0: trained after it was trained"),
    (
        "trained and dropped",
        clean,
        inserted("stopped", "dropped", 4, reason="stale"),
        "4: dropped after it was trained",
    ),
    (
        "dropped and trained",
        clean,
        inserted("stopped", "trained", 3, 2, step=2, weight_version=2),
        "3: trained after it was dropped",
    ),
    (
        "dropped twice",
        clean,
        twice("dropped", 3),
        "3: dropped after it was dropped",
    ),
    (
        "an event after the end",
        clean,
        inserted("stopped", "dispatched", 0, 1, weight_version=2),
        "0: dispatched after it was trained",
    ),
    ("dropped without a reason", clean, with_fields("dropped", reason=None), "without a reason"),
    (
        "trained without a commit",
        clean,
        without("committed", 4),
        "4: selected while in_flight, not committed",
    ),
    (
        "trained without a selection",
        clean,
        without("selected", 4),
        "4: trained while committed, not selected",
    ),
    (
        "dropped while selected",
        clean,
        inserted("trained", "dropped", 0, reason="stale"),
        "0: dropped while selected",
    ),
    (
        "abandoned and not back",
        lambda: Story().ready(0, 1).select(0, 1).tell("abandoned", 0, 1, step=1).select(0, 1),
        without("abandoned", 1),
        "1: selected while selected, not committed",
    ),
    (
        "committed without a dispatch",
        clean,
        without("dispatched", 2, nth=1),
        "2: committed while waiting, not in_flight",
    ),
    (
        "dispatched while in flight",
        clean,
        without("redispatched", 2),
        "2: dispatched while in_flight, not waiting",
    ),
    (
        "an attempt that goes out twice",
        clean,
        with_fields("dispatched", 2, nth=1, group_id="2.0"),
        "2: dispatched as group 2.0; 2.0 went out before",
    ),
    (
        "redispatched as the same attempt",
        clean,
        with_fields("redispatched", 2, group_id="2.0"),
        "2: redispatched as group 2.0; 2.0 went out before",
    ),
    (
        "a late commit of an old attempt",
        clean,
        with_fields("committed", 2, group_id="2.0"),
        "2: committed as group 2.0; 2.1 went out last",
    ),
    (
        "trained as another attempt",
        clean,
        with_fields("trained", 2, group_id="2.0"),
        "2: trained as group 2.0; 2.1 went out last",
    ),
    (
        "the group of another prompt",
        clean,
        with_fields("selected", 2, group_id="4.0"),
        "2: selected as group 4.0, which is no attempt at this prompt",
    ),
    (
        "a group without a name",
        clean,
        with_fields("dropped", group_id=None),
        "3: dropped as group None, which is no attempt at this prompt",
    ),
    (
        "the start version changes at the commit",
        clean,
        with_fields("committed", 2, weight_version=1),
        "2: committed with start version 1; it went out with version 0",
    ),
    (
        "evicted, and then nothing",
        lambda: (
            Story().ready(0).tell("evicted", 0, reason="s").tell("dropped", 0, reason="s").stop()
        ),
        without("dropped"),
        "0: evicted, then neither dropped nor redispatched",
    ),
    (
        "evicted while in flight",
        clean,
        inserted("aborted", "evicted", 3, reason="stale"),
        "3: evicted while in_flight, not committed",
    ),
    (
        "aborted while ready",
        clean,
        inserted("evicted", "aborted", 3, 1, reason="stale"),
        "3: aborted while committed, not in_flight",
    ),
    (
        "a step is left out",
        clean,
        lambda events: with_fields("trained", 4, step=3)(with_fields("trained", 2, step=3)(events)),
        "2: trained in step 3; the last finished step is 1",
    ),
    (
        "a step goes back",
        clean,
        with_fields("trained", 4, step=1),
        "4: trained in step 1; the last finished step is 2",
    ),
    ("a step without number", clean, with_fields("trained", 4, step=None), "trained in step None"),
    (
        "selected for a finished step",
        clean,
        with_fields("selected", 4, step=1),
        "4: selected for step 1; step 1 is finished",
    ),
    (
        "a sync goes back to an earlier step",
        clean,
        with_fields("weight_sync", nth=1, step=1),
        "weight_sync goes back to step 1 from step 2",
    ),
    (
        "the version goes back at a sync",
        clean,
        with_fields("weight_sync", nth=1, weight_version=1),
        "weight_sync goes back to weight version 1 from version 2",
    ),
    (
        "the version goes back at a step",
        clean,
        with_fields("trained", 4, weight_version=1),
        "4: trained goes back to weight version 1 from version 2",
    ),
    (
        "a first attempt with an old stamp",
        clean,
        with_fields("dispatched", 4, weight_version=0),
        "4: dispatched goes back to weight version 0 from version 1",
    ),
    (
        "a retry with an older stamp",
        clean,
        with_fields("dispatched", 3, nth=1, weight_version=0),
        "3: dispatched with weight version 0; an earlier attempt had version 1",
    ),
    (
        "numbers repeat",
        clean,
        with_fields("weight_sync", seq=3),
        "seq 3: comes after seq",
    ),
    (
        "no beginning",
        clean,
        without("run_started"),
        "incarnation a begins with admitted, not run_started or resumed",
    ),
    (
        "a second beginning",
        clean,
        twice("run_started", then=3),
        "run_started in the middle of incarnation a",
    ),
    (
        "two writers",
        resumed_twice,
        with_fields("stopped", incarnation="a"),
        "incarnation a goes on beside c: two processes wrote this log",
    ),
    (
        "a parent from another log",
        resumed_twice,
        with_fields("resumed", nth=1, parent="x"),
        "incarnation x, which this log knows nothing of before: its events are in another log",
    ),
    (
        "its own parent",
        resumed_twice,
        with_fields("resumed", nth=1, parent="c"),
        "incarnation c, which this log knows nothing of before",
    ),
    (
        "a parent without number",
        resumed_twice,
        with_fields("resumed", parent_seq=None),
        "resumed without parent and parent_seq",
    ),
    (
        "events of the parent are lost",
        resumed_twice,
        with_fields("resumed", parent_seq=19),
        "resumed from seq 19 of incarnation a, whose events end with seq 18",
    ),
    (
        "resumed at another step than the history's",
        resumed_twice,
        with_fields("resumed", step=1),
        "resumed at step 1; its history ends with step 0",
    ),
    (
        "resumed with an older version",
        resumed_twice,
        with_fields("resumed", nth=1, weight_version=0),
        "resumed goes back to weight version 0 from version 1",
    ),
    (
        "resumed between an eviction and its end",
        lambda: (s := Story().ready(0).tell("evicted", 0, reason="s")).crash("b", back_to=s.cut()),
        lambda events: events,
        "0: evicted, then neither dropped nor redispatched",
    ),
    (
        "a step goes on after a resume",
        lambda: (
            (s := Story().ready(0, 1).select(0).train(0))
            .crash("b", back_to=s.cut())
            .select(1)
            .train(1)
        ),
        with_fields("trained", 1, step=1),
        "1: trained in step 1; the last finished step is 1",
    ),
    (
        "an attempt goes on over a resume",
        resumed_twice,
        without("dispatched", 3, nth=1),
        "3: committed while waiting, not in_flight",
    ),
    (
        "a selection goes on over a resume",
        resumed_twice,
        without("selected", 0, nth=1),
        "0: trained while committed, not selected",
    ),
]


MORE_THAN_ONE = {  # the log goes on as if nothing had happened, which is wrong as well
    "dropped while selected": 2,
    "evicted while in flight": 2,
    "aborted while ready": 2,
    "an attempt that goes out twice": 2,
    "a late commit of an old attempt": 2,
    "the group of another prompt": 2,
    "a first attempt with an old stamp": 2,
    "a retry with an older stamp": 2,
    "a step is left out": 3,
}


@pytest.mark.parametrize(
    ("lawful", "change", "problem", "count"),
    [pytest.param(*case, MORE_THAN_ONE.get(name, 1), id=name) for name, *case in BROKEN],
)
def test_one_wrong_event_is_found(
    lawful: Callable[[], Story], change: Change, problem: str, count: int
) -> None:
    events = lawful().log.events
    if change(events) != events:
        assert audit(events).violations == ()
    report = audit(change(events))
    assert not report.ok
    assert problem in str(report.violations[0])
    assert report.violation_count == count
    assert str(report).startswith("conservation is broken, ")


def test_one_missing_event_of_a_prompt_is_told_once() -> None:
    """The rest of its life is checked as if it had happened."""
    report = audit(without("admitted", 0)(clean().log.events))
    assert [str(violation) for violation in report.violations] == [
        "seq 4: ordinal 0: dispatched after it was never admitted"
    ]


def test_a_prompt_that_is_only_trained_is_counted_as_trained() -> None:
    log = MemoryEventLog("a")
    log.append("run_started", step=0, weight_version=0)
    log.append("trained", ordinal=0, group_id="0.0", step=1, weight_version=1)
    report = audit(log.events)
    assert [str(violation) for violation in report.violations] == [
        "seq 2: ordinal 0: trained after it was never admitted"
    ]
    assert (report.prompts, report.trained, report.pending) == (1, 1, {})


def test_an_end_that_happens_twice_is_counted_once() -> None:
    report = audit(twice("trained", 0)(clean().log.events))
    assert (report.trained, report.prompts, report.pending) == (4, 6, {"waiting": 1})


def test_a_loose_end_is_told_once() -> None:
    story = Story().ready(0).tell("evicted", 0, reason="stale")
    story.crash("b", back_to=story.cut()).attempts[0] = 1
    assert story.dispatch(0).commit(0).stop().report().violation_count == 1


def test_a_run_need_not_begin_at_step_0() -> None:
    log = MemoryEventLog("a")
    log.append("run_started", step=7, weight_version=9)
    story = Story()
    story.log, story.step = log, 7
    report = story.admit(0).tell("dispatched", 0, weight_version=9).commit(0, start=9).select(0)
    report.tell("trained", 0, step=8, weight_version=8)
    assert [str(violation) for violation in story.report().violations] == [
        "seq 6: ordinal 0: trained goes back to weight version 8 from version 9"
    ]
    assert (story.report().step, story.report().weight_version) == (8, 9)


def test_steps_and_versions_that_are_left_out_are_not_checked() -> None:
    log = MemoryEventLog("a")
    log.append("run_started")
    log.append("admitted", ordinal=0)
    log.append("dispatched", ordinal=0, group_id="0.0")
    log.append("committed", ordinal=0, group_id="0.0")
    log.append("selected", ordinal=0, group_id="0.0")
    log.append("weight_sync")
    log.append("stopped")
    assert audit(log.events).violations == ()


def test_a_prompt_beyond_all_that_were_admitted_is_found() -> None:
    report = Story().admit(0).dispatch(9).report()
    assert [str(violation) for violation in report.violations] == [
        "seq 3: ordinal 9: dispatched after it was never admitted",
        "seq 3: ordinal 1: 1 to 8 were never admitted; 9 was",
    ]


def test_a_log_full_of_errors_is_counted_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "MAX_VIOLATIONS", 5)
    log = MemoryEventLog("a")
    log.append("run_started")
    for ordinal in range(20):
        log.append("dispatched", ordinal=ordinal, group_id=group_id(ordinal, 0), weight_version=0)
    report = audit(log.events)
    assert (len(report.violations), report.violation_count) == (5, 20)


# files ---------------------------------------------------------------------------------


def written(path: Path, events: Sequence[Event]) -> Path:
    path.write_bytes(msgspec.json.Encoder().encode_lines(events))
    return path


def test_a_file_is_audited_as_the_events_in_it(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", resumed_twice().log.events)
    with path.open("ab") as file:
        file.write(b'{"seq":99,"t":1.0,"inc')
    assert audit_log(path) == resumed_twice().report()
    log = JsonlEventLog(path, incarnation="d")
    log.append("run_started")
    log.close()
    assert [life.incarnation for life in audit_log(path).history] == ["d"]


def test_a_broken_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", clean().log.events)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:6], b"oops\n", *lines[7:]]))
    with pytest.raises(RestoreError, match="line 7 is not an event"):
        audit_log(path)


def test_a_log_may_grow_while_it_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story().ready(0)
    growing = iter([story.log.events[:], story.admit(1).tell("trained", 1).log.events])

    class Log(list[Event]):
        def __iter__(self) -> Iterator[Event]:
            return iter(next(growing))

    report = audit(Log())
    assert (report.prompts, report.undone_events, report.violations) == (1, 0, ())


# bundles -------------------------------------------------------------------------------


def cut_of(
    at: tuple[str, int, int], states: dict[int, State], *, next_ordinal: int, **changes: Any
) -> Cut:
    incarnation, seq, step = at
    groups = tuple(
        Group(
            group_id=group_id(ordinal, 0),
            ordinal=ordinal,
            sample_ids=sample_ids(group_id(ordinal, 0), 2),
            start_weight_version=0,
            end_weight_version=0,
            commit_seq=ordinal,
        )
        for ordinal, state in states.items()
        if state in ("committed", "selected")
    )
    cut = Cut(
        incarnation=incarnation,
        event_seq=seq,
        step=step,
        weight_version=step,
        group_size=2,
        prompts_per_step=2,
        next_ordinal=next_ordinal,
        position=None,
        records=tuple(
            LedgerRecord(ordinal=ordinal, payload=None, state=state)
            for ordinal, state in states.items()
        ),
        groups=groups,
    )
    return msgspec.structs.replace(cut, **changes)


def saved() -> tuple[Story, Cut]:
    """A run that was saved in the middle of its first step, and went on."""
    story = Story().ready(0, 1, 2).admit(3, 4).dispatch(3).select(0, 1)
    states: dict[int, State] = {0: "selected", 1: "selected", 2: "committed"}
    states |= {3: "in_flight", 4: "waiting"}
    cut = cut_of(story.cut(), states, next_ordinal=5)
    return story.train(0, 1).commit(3, start=0), cut


def test_a_bundle_that_recorded_what_the_log_says_is_named() -> None:
    story, cut = saved()
    report = audit(story.log.events, [("step_0", cut)])
    assert (report.violations, report.bundles) == ((), ("step_0",))
    resumed = story.crash("b", back_to=(cut.incarnation, cut.event_seq, 0)).log.events
    assert audit(resumed, [("step_0", cut)]).violations == ()


def test_an_aborted_attempt_is_waiting_in_a_bundle() -> None:
    story = Story().admit(0).dispatch(0).tell("aborted", 0, reason="stale")
    cut = cut_of(story.cut(), {0: "waiting"}, next_ordinal=1)
    assert audit(story.again(0).log.events, [("step_0", cut)]).violations == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": 1}, "step_0 has 1 finished steps; the log has 0"),
        ({"next_ordinal": 6}, "step_0 has 6 prompts that left the source; the log has 5"),
        (
            {"records": cut_of(("a", 1, 0), {0: "waiting"}, next_ordinal=1).records},
            "ordinal 0: waiting as 0.0 in step_0; selected as 0.0 in the log",
        ),
    ],
)
def test_a_bundle_that_contradicts_the_log_is_found(changes: dict[str, Any], problem: str) -> None:
    story, cut = saved()
    report = audit(story.log.events, [("step_0", msgspec.structs.replace(cut, **changes))])
    assert str(report.violations[0]) == f"seq {cut.event_seq}: {problem}"


def test_each_record_of_a_bundle_is_looked_at() -> None:
    story, cut = saved()
    records = {record.ordinal: record for record in cut.records}
    del records[2], records[4]
    records[7] = LedgerRecord(ordinal=7, payload=None)
    groups = (msgspec.structs.replace(cut.groups[0], group_id=GroupId("0.1")), *cut.groups[1:])
    wrong = msgspec.structs.replace(cut, records=tuple(records.values()), groups=groups)
    report = audit(story.log.events, [("step_0", wrong)])
    assert [str(v).partition("ordinal ")[2] for v in report.violations] == [
        "0: selected as 0.1 in step_0; selected as 0.0 in the log",
        "2: not live as 2.0 in step_0; committed as 2.0 in the log",
        "4: not live in step_0; waiting in the log",
        "7: waiting in step_0; never admitted in the log",
    ]


def test_a_bundle_of_an_older_version_than_the_logs_is_found() -> None:
    story = Story().ready(0).select(0).train(0)
    cut = cut_of(story.cut(), {}, next_ordinal=1, weight_version=0)
    report = audit(story.log.events, [("step_1", cut)])
    assert "step_1 has weight version 0; the log has 1" in str(report.violations[0])


def test_a_bundle_of_another_history_is_not_compared() -> None:
    story = Story().ready(0, 1).select(0, 1)
    cut = story.cut()
    story.train(0, 1)
    undone = cut_of(story.cut(), {}, next_ordinal=2)
    foreign = cut_of(("x", 3, 1), {}, next_ordinal=2)
    report = audit(
        story.crash("b", back_to=cut).log.events, [("step_1", undone), ("step_2", foreign)]
    )
    assert (report.violations, report.bundles) == ((), ())
    assert report.other_bundles == {
        "step_1": f"of another history: cut at seq {undone.event_seq} of incarnation a",
        "step_2": "of another history: cut at seq 3 of incarnation x",
    }
