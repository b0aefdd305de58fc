"""The conservation law, checked from the event log alone, or against a run's bundles too.

And that no engine served weights that it had not confirmed.

The effective history of an incarnation is its parent's effective history up to the `parent_seq`
of its `resumed` event, then its own events. In it every prompt that left the source was
admitted once, and since then was trained once, or dropped once, or is still on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sc_core.books import Books, Findings, Instant, Violation
from sc_core.disk import LOCAL, Disk
from sc_core.errors import RestoreError
from sc_core.events import Event, read_events
from sc_core.records import Cut
from sc_core.served import EngineAudit
from sc_core.verify import candidates, verify

EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"


class Life(msgspec.Struct, frozen=True):
    """The part that one incarnation has in the effective history."""

    incarnation: str
    first_seq: int
    last_seq: int
    parent: str | None = None
    parent_seq: int | None = None  #: the parent's events after it are undone
    digest: str | None = None  #: of the bundle that it resumed from


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of every prompt, and whether that keeps the law. `str()` says so in one line."""

    history: tuple[Life, ...] = ()  #: oldest first
    incarnations: int = 0  #: in the log, also those that are no part of the history
    events: int = 0  #: of the history
    undone_events: int = 0  #: no part of it, since a later incarnation resumed from before them
    prompts: int = 0  #: that left the source
    trained: int = 0  #: prompts that a finished step learnt from
    dropped: Mapping[str, int] = {}  #: by reason, up to its first colon
    pending: Mapping[str, int] = {}  #: by state
    step: int = 0  #: finished training steps
    weight_version: int = 0  #: after the last of these steps
    engines: Mapping[str, EngineAudit] = {}  #: that the history names, and what they did
    bundles: tuple[str, ...] = ()  #: of the history, compared with it
    other_bundles: Mapping[str, str] = {}  #: not compared, and why
    violations: tuple[Violation, ...] = ()  #: the first `MAX_VIOLATIONS`
    violation_count: int = 0  #: all of them

    @property
    def ok(self) -> bool:
        """Whether nothing is violated."""
        return not self.violation_count

    @property
    def names_servers(self) -> bool:
        """Whether some group names the engines that generated it."""
        return any(one.groups for one in self.engines.values())

    @property
    def served(self) -> str:
        """What the log says of the engines, in one sentence."""
        wrong = {name: one.unconfirmed for name, one in self.engines.items() if one.unconfirmed}
        if wrong:
            said = ", ".join(f"{name} did, {count} times" for name, count in wrong.items())
            return f"engines served versions that they had not confirmed: {said}"
        if not self.names_servers:
            return "the log does not say which engine served what"
        return "no engine served a version that it had not confirmed"

    def __str__(self) -> str:
        if self.ok:
            return (
                f"conservation holds: {self.prompts} prompts = {self.trained} trained"
                f" + {sum(self.dropped.values())} dropped + {sum(self.pending.values())} pending,"
                " each exactly once"
            )
        count = f"{self.violation_count} violation{'s' if self.violation_count > 1 else ''}"
        return f"conservation is broken, {count}; the first: {self.violations[0]}"


def audit(events: Sequence[Event], bundles: Iterable[tuple[str, Cut]] = ()) -> AuditReport:
    """Check the effective history of the last incarnation in `events`.

    `bundles`, by name: a cut that belongs to this history must have recorded what the log says
    of its instant.
    """
    return _audit(lambda: iter(events), bundles)


def audit_log(path: str | Path, bundles: Iterable[tuple[str, Cut]] = ()) -> AuditReport:
    """`audit` of a file. It is read twice, and may be growing; memory grows with live prompts.

    Raises:
        RestoreError: a complete line of the log is not an event.
    """
    return _audit(lambda: read_events(path), bundles)


def _audit(read: Callable[[], Iterator[Event]], bundles: Iterable[tuple[str, Cut]]) -> AuditReport:
    findings = Findings()
    lives = lives_in(read(), findings)
    history = history_of(lives, findings)
    if findings.count:  # what came after what is not known, so nothing more can be said
        return AuditReport(
            history=tuple(history),
            incarnations=len(lives),
            violations=tuple(findings.kept),
            violation_count=findings.count,
        )
    until = {life.incarnation: life.last_seq for life in history}
    instants: list[Instant] = []
    others: dict[str, str] = {}
    for name, cut in bundles:
        if cut.event_seq <= until.get(cut.incarnation, -1):
            instants.append(Instant.of(name, cut))
        else:
            others[name] = (
                f"of another history: cut at seq {cut.event_seq} of incarnation {cut.incarnation}"
            )
    instants.sort(key=lambda instant: instant.seq, reverse=True)
    due = list(instants)
    books = Books(findings)
    counted = undone = 0
    end = max((life.last_seq for life in lives.values()), default=0)
    for event in read():
        if event.seq > end:  # appended since the first pass
            break
        if event.seq > until.get(event.incarnation, -1):
            undone += 1
            continue
        while due and due[-1].seq < event.seq:
            books.compare(due.pop())
        books.enter(event)
        counted += 1
    while due:
        books.compare(due.pop())
    books.close()
    return AuditReport(
        history=tuple(history),
        incarnations=len(lives),
        events=counted,
        undone_events=undone,
        prompts=books.prompts,
        trained=books.trained,
        dropped=dict(books.dropped.most_common()),
        pending=dict(Counter(prompt.state for prompt in books.live.values())),
        step=books.step,
        weight_version=books.weight_version,
        engines=dict(sorted(books.served.engines.items())),
        bundles=tuple(instant.bundle for instant in reversed(instants)),
        other_bundles=others,
        violations=tuple(findings.kept),
        violation_count=findings.count,
    )


def lives_in(events: Iterable[Event], findings: Findings) -> dict[str, Life]:
    """All incarnations with all their events, in the order in which they began."""
    began: dict[str, Event] = {}
    last_seq: dict[str, int] = {}
    seq, current = -1, ""
    for event in events:
        name = event.incarnation
        starts = event.event in ("run_started", "resumed")
        problem = ""
        if event.seq <= seq:
            problem = f"comes after seq {seq}"
        elif name not in began and not starts:
            problem = f"incarnation {name} begins with {event.event}, not run_started or resumed"
        elif name in began and starts:
            problem = f"{event.event} in the middle of incarnation {name}"
        elif name in began and name != current:
            problem = f"incarnation {name} goes on beside {current}: two processes wrote this log"
        elif event.event == "resumed" and (event.parent is None or event.parent_seq is None):
            problem = "resumed without parent and parent_seq"
        if problem:
            findings.add(event.seq, event.ordinal, problem)
        began.setdefault(name, event)
        last_seq[name] = seq = event.seq
        current = name
    return {
        name: Life(name, first.seq, last_seq[name], first.parent, first.parent_seq, first.digest)
        for name, first in began.items()
    }


def history_of(lives: Mapping[str, Life], findings: Findings) -> list[Life]:
    """What counts for the last incarnation, oldest first."""
    if not lives:
        return []
    life = list(lives.values())[-1]
    history = [life]
    limit = life.last_seq
    while life.parent is not None and life.parent_seq is not None:
        parent = lives.get(life.parent)
        problem = ""
        if parent is None or parent.first_seq >= life.first_seq:
            problem = "which this log knows nothing of before: its events are in another log"
        elif life.parent_seq > parent.last_seq:
            problem = f"whose events end with seq {parent.last_seq}: the log has lost some"
        if problem or parent is None:
            resumed = f"resumed from seq {life.parent_seq} of incarnation {life.parent}"
            findings.add(life.first_seq, None, f"{resumed}, {problem}")
            break
        limit = min(limit, life.parent_seq)
        life = parent
        if life.first_seq <= limit:
            history.append(msgspec.structs.replace(life, last_seq=limit))
    return history[::-1]


def audit_run(run: str | Path, disk: Disk = LOCAL, *, key: bytes | None = None) -> AuditReport:
    """`audit_log` of a run's directory, against all of its bundles. Reads each bundle once.

    A damaged bundle breaks no law: the report names it, and why it was not compared.

    Raises:
        FileNotFoundError: the run has no `events.jsonl`.
        RestoreError: a complete line of the log is not an event.
    """
    refused: dict[str, str] = {}
    report = audit_log(Path(run) / EVENTS, intact_bundles(run, disk, key, refused))
    return msgspec.structs.replace(report, other_bundles={**report.other_bundles, **refused})


def intact_bundles(
    run: str | Path, disk: Disk, key: bytes | None, refused: dict[str, str]
) -> Iterator[tuple[str, Cut]]:
    """Name and cut of a run's bundles, oldest first; why others are damaged goes to `refused`."""
    for path in reversed(candidates(Path(run) / CHECKPOINTS, disk)):
        try:
            yield path.name, verify(path, disk, key=key).cut
        except RestoreError as exc:
            refused[path.name] = str(exc)
