"""An event log in memory, which outlives the simulated process that writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sc_core.events import Event, make_events, new_incarnation
from sc_core.ports import EventKind


class MemoryEventLog:
    """An `EventSink`. `after_crash` is what the next process of the same run would open."""

    def __init__(
        self, incarnation: str | None = None, *, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.incarnation = new_incarnation() if incarnation is None else incarnation
        self.events: list[Event] = []  #: of all incarnations
        self.synced = 0  #: how many events would survive a power cut
        self._now = now

    @property
    def seq(self) -> int:
        """Of the last event, whichever incarnation wrote it; 0 where there is none."""
        return self.events[-1].seq if self.events else 0

    def append(self, kind: EventKind, **fields: Any) -> int:
        """Record one event; returns its sequence number."""
        return self.append_many(kind, (fields,))

    def append_many(self, kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        """Record events of one kind and one instant; returns the last sequence number."""
        self.events += make_events(
            kind, each, after_seq=self.seq, t=self._now(), incarnation=self.incarnation
        )
        return self.seq

    def sync(self) -> None:
        """Everything appended so far survives `after_crash(lose_unsynced=True)`."""
        self.synced = len(self.events)

    def after_crash(
        self, incarnation: str | None = None, *, lose_unsynced: bool = False
    ) -> MemoryEventLog:
        """The log of the next incarnation: a copy, so a process that lives on can't reach it."""
        log = MemoryEventLog(incarnation, now=self._now)
        log.events = self.events[: self.synced] if lose_unsynced else self.events[:]
        log.synced = len(log.events)
        return log
