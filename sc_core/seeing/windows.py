"""The checkpoint windows of a run: who waited how long, and what for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import msgspec

from sc_core.events import Event
from sc_core.seeing.rows import number
from sc_core.spans import COMMITS, HELD, SAVE, SNAPSHOT, TRAIN, WAITED, Span

_SLACK_S = 1e-3  #: between two clocks' views of one instant
_TIMES = {
    "barrier_wait_seconds": "waited_s",
    "exclusive_hold_seconds": "held_s",
    "tq_save_seconds": "snapshot_s",
    "total_save_seconds": "total_s",
}


class Window(msgspec.Struct, kw_only=True):
    """One save. A time is None where neither spans nor metrics tell it."""

    step: int
    incarnation: str
    published: bool = False
    waited_s: float | None = None  #: the checkpoint, for the barrier
    held_s: float | None = None  #: the barrier, alone
    snapshot_s: float | None = None  #: the data plane's part of that
    total_s: float | None = None  #: from its first file to the hand-over
    commits: int = 0  #: that waited for it, as far as spans tell
    commit_wait_s: float | None = None  #: of the one that waited longest
    until: float = 0.0  #: unix seconds, when the barrier was open again


class Windows:
    """Gathers windows from the log, then the metrics, then the spans; each may be missing.

    A window that no `checkpoint` event tells of was held, and its bundle never published. The
    metrics of a step tell of the last save before it.
    """

    def __init__(self) -> None:
        self._published: dict[str, list[Window]] = {}  #: by incarnation, in their order
        self._held: dict[str, list[Window]] = {}
        self._open: dict[str, dict[str, float]] = {}
        self._order: list[str] = []

    def see_checkpoint(self, event: Event) -> None:
        window = Window(
            step=event.step or 0, incarnation=event.incarnation, published=True, until=event.t
        )
        self._of(self._published, event.incarnation).append(window)

    def see_metrics(self, row: Mapping[str, Any]) -> None:
        incarnation = str(row.get("incarnation"))
        windows = self._published.get(incarnation, [])
        before = bisect_left(windows, row["step"], key=lambda window: window.step)
        if not before:
            return
        for name, field in _TIMES.items():
            value = number(row, f"timing/rollout_checkpoint/{name}")
            if value is not None and value >= 0:
                setattr(windows[before - 1], field, value)

    def see_span(self, span: Span) -> None:
        if span.track == TRAIN and span.name in (WAITED, SNAPSHOT):
            self._open.setdefault(span.incarnation, {})[span.name] = span.duration_s
        elif span.track == TRAIN and span.name == HELD and span.note is None:
            times = self._open.pop(span.incarnation, {})
            window = Window(
                step=span.step or 0,
                incarnation=span.incarnation,
                waited_s=times.get(WAITED),
                held_s=span.duration_s,
                snapshot_s=times.get(SNAPSHOT),
                commit_wait_s=0.0,
                until=span.t + span.duration_s,
            )
            self._of(self._held, span.incarnation).append(window)
        elif span.track == TRAIN and span.name == SAVE and span.note is None:
            held = self._held.get(span.incarnation)
            if held and held[-1].step == span.step:
                held[-1].total_s = span.duration_s
        elif span.track == COMMITS:
            self._see_wait(span)

    def _see_wait(self, span: Span) -> None:
        held = self._held.get(span.incarnation)  # its span is written before the waits end
        if held and span.t <= held[-1].until + _SLACK_S:
            held[-1].commits += 1
            held[-1].commit_wait_s = max(held[-1].commit_wait_s or 0.0, span.duration_s)

    def _of(self, windows: dict[str, list[Window]], incarnation: str) -> list[Window]:
        if incarnation not in self._order:
            self._order.append(incarnation)
        return windows.setdefault(incarnation, [])

    def all(self) -> list[Window]:
        """Every window once, in the order in which they were held."""
        found: list[Window] = []
        for incarnation in self._order:
            held = self._held.get(incarnation, [])
            published = list(self._published.get(incarnation, []))
            for window in held:
                if published and published[0].step == window.step:
                    window.published = True
                    published.pop(0)
                elif any(one.step == window.step for one in published):
                    while published[0].step != window.step:  # its spans were lost
                        found.append(published.pop(0))
                    published.pop(0)
                    window.published = True
                found.append(window)
            found += published
        return found
