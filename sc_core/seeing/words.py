"""Numbers and times as people read them, and text as HTML may have it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime


def escaped(text: object) -> str:
    """Any text of a run, as HTML shows it; also in a label of plotly, which knows some tags."""
    return html.escape(str(text))


def duration(seconds: float | None) -> str:
    """`190 µs`, `12 ms`, `1.25 s`, `3 min 20 s`, `2 h 5 min`; a dash for what nobody knows."""
    if seconds is None:
        return "–"
    if seconds < 0.5e-6:
        return "0"
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def decimals(number: float | None, digits: int = 3) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def when(t: float) -> str:
    """A unix time, in UTC."""
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # of a clock that was out of its mind
        return f"{t:g} s after 1970"


def mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def percent(part: float, whole: float) -> str:
    if not whole:
        return "–"
    share = 100 * part / whole
    return f"{share:.1f}%" if share < 10 else f"{share:.0f}%"
