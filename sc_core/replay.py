"""A run's decisions, taken anew: from its event log alone, or against its bundles too.

The effective history drives a real `RunState` and `Ledger`. At each decision that the log tells
of, the sampler is asked as the pumps asked it: whether a prompt may go out and for which step,
which groups train, which are too old. What follows from a decision must be in the log as well.

A sampler that goes by rewards, tokens or the end version of a group can't be replayed: the log
does not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from sc_core.audit import EVENTS, Life, history_of, intact_bundles, lives_in
from sc_core.books import Findings
from sc_core.decisions import DecisionSettings
from sc_core.difference import Difference, Differs
from sc_core.disk import LOCAL, Disk
from sc_core.errors import RestoreError
from sc_core.events import Event, read_events
from sc_core.records import Cut
from sc_core.retake import BuildSampler, Instant, Retake


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the sampler decides again as the log says. `str()` says so in one line."""

    history: tuple[Life, ...] = ()  #: as far as it counts, oldest first
    events: int = 0  #: of the history, up to the difference
    admissions: int = 0  #: decisions that agree, as are the next two
    selections: int = 0  #: choices of groups to train on
    evictions: int = 0  #: aborts too
    bundles: tuple[str, ...] = ()  #: of the history, compared with what the log led to
    difference: Difference | None = None  #: the first one

    @property
    def ok(self) -> bool:
        """Whether it does, everywhere."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"the replay differs: {self.difference}"
        return (
            f"the replay agrees: {self.admissions} admissions, {self.selections} selections and"
            f" {self.evictions} evictions, each as the sampler decides it"
        )


def replay(
    events: Sequence[Event],
    bundles: Iterable[tuple[str, Cut]] = (),
    *,
    sampler: BuildSampler = DecisionSettings.build_sampler,
) -> ReplayReport:
    """Take the decisions of the last incarnation's effective history anew, in order.

    Ends at the first that differs. `bundles`, by name: the ledger must be as the cut has it.
    `sampler` builds one for each incarnation: another than the log names shows where it would
    have decided otherwise.

    Raises:
        RestoreError: the log has no history that holds together, or not the settings.
    """
    return _replay(lambda: iter(events), bundles, sampler)


def replay_log(
    path: str | Path,
    bundles: Iterable[tuple[str, Cut]] = (),
    *,
    sampler: BuildSampler = DecisionSettings.build_sampler,
) -> ReplayReport:
    """`replay` of a file. It is read twice, and may be growing; memory grows with live prompts.

    Raises:
        RestoreError: as `replay`, or a complete line is not an event.
    """
    return _replay(lambda: read_events(path), bundles, sampler)


def replay_run(
    run: str | Path,
    disk: Disk = LOCAL,
    *,
    key: bytes | None = None,
    sampler: BuildSampler = DecisionSettings.build_sampler,
) -> ReplayReport:
    """`replay_log` of a run's directory, against those of its bundles that are intact.

    Raises:
        FileNotFoundError: the run has no `events.jsonl`.
        RestoreError: as `replay_log`.
    """
    bundles = intact_bundles(run, disk, key, {})
    return replay_log(Path(run) / EVENTS, bundles, sampler=sampler)


def _replay(
    read: Callable[[], Iterator[Event]],
    bundles: Iterable[tuple[str, Cut]],
    build: BuildSampler,
) -> ReplayReport:
    findings = Findings()
    lives = lives_in(read(), findings)
    history = history_of(lives, findings)
    if findings.count:
        raise RestoreError(f"the log has no history to replay: {findings.kept[0]}")
    until = {life.incarnation: life.last_seq for life in history}
    instants = [
        Instant.of(name, cut)
        for name, cut in bundles
        if cut.event_seq <= until.get(cut.incarnation, -1)
    ]
    instants.sort(key=lambda instant: instant.seq, reverse=True)
    due = list(instants)
    end = max((life.last_seq for life in lives.values()), default=0)
    run, count, difference = Retake(build), 0, None
    try:
        for event in read():
            if event.seq > end:  # appended since the first pass
                break
            if event.seq > until.get(event.incarnation, -1):
                continue
            while due and due[-1].seq < event.seq:
                run.compare(due.pop())
            run.enter(event)
            count += 1
        while due:
            run.compare(due.pop())
    except Differs as differs:
        difference = differs.difference
    return ReplayReport(
        history=tuple(history),
        events=count,
        admissions=run.admissions,
        selections=run.selections,
        evictions=run.evictions,
        bundles=tuple(instant.bundle for instant in reversed(instants) if instant not in due),
        difference=difference,
    )
