"""An event log in memory, which outlives the simulated process that writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sc_core.events import Event, make_events, new_incarnation
from sc_core.ports import EventKind

Hook = Callable[[str], None]


class MemoryEventLog:
    """An `EventSink`. `after_crash` is what the next process of the same run would open."""

    def __init__(
        self, incarnation: str | None = None, *, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.incarnation = new_incarnation() if incarnation is None else incarnation
        self.events: list[Event] = []  #: of all incarnations
        self.synced = 0  #: how many events would survive a power cut
        self.hook: Hook | None = None  #: called with `append` or `sync` before each
        self.done: Hook | None = None  #: and after each
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
        if self.hook is not None:
            self.hook("append")
        self.events += make_events(
            kind, each, after_seq=self.seq, t=self._now(), incarnation=self.incarnation
        )
        if self.done is not None:
            self.done("append")
        return self.seq

    def sync(self) -> None:
        """Everything appended so far survives `after_crash(lose_unsynced=True)`."""
        if self.hook is not None:
            self.hook("sync")
        self.synced = len(self.events)
        if self.done is not None:
            self.done("sync")

    def after_crash(
        self,
        incarnation: str | None = None,
        *,
        lose_unsynced: bool = False,
        keep: int | None = None,
    ) -> MemoryEventLog:
        """The log of the next incarnation: a copy, so a process that lives on can't reach it.

        After a kill it has every event, or the first `keep`, and those not synced may still be
        lost later on. After a power cut it has those synced, or the first `keep`.
        """
        log = MemoryEventLog(incarnation, now=self._now)
        if keep is None:
            keep = self.synced if lose_unsynced else len(self.events)
        log.events = self.events[:keep]
        log.synced = keep if lose_unsynced else min(keep, self.synced)
        return log
