"""Curves of long runs in bounded memory."""

from __future__ import annotations

_Point = tuple[float, float, int]  # sums of x and y, and of how many values; none: a break


class Thinned:
    """A curve of some `at_most` points, whatever is added: neighbours share their mean.

    Breaks come on top of that: nothing is drawn across them.
    """

    def __init__(self, at_most: int = 2000) -> None:
        self._at_most = at_most
        self._each = 1
        self._points: list[_Point] = []
        self._breaks = 0

    def add(self, x: float, y: float) -> None:
        last = self._points[-1] if self._points else (0.0, 0.0, 0)
        if 0 < last[2] < self._each:
            self._points[-1] = (last[0] + x, last[1] + y, last[2] + 1)
            return
        if len(self._points) - self._breaks >= self._at_most:
            self._each *= 2
            self._points = self._merged()
        self._points.append((x, y, 1))

    def interrupt(self) -> None:
        """What is added next is not a continuation."""
        if self._points and self._points[-1][2]:
            self._points.append((self._points[-1][0] / self._points[-1][2], 0.0, 0))
            self._breaks += 1

    def _merged(self) -> list[_Point]:
        merged: list[_Point] = []
        for x, y, count in self._points:
            last = merged[-1] if merged else (0.0, 0.0, 0)
            if last[2] and count and last[2] + count <= self._each:
                merged[-1] = (last[0] + x, last[1] + y, last[2] + count)
            else:
                merged.append((x, y, count))
        return merged

    @property
    def each(self) -> int:
        """How many values a point stands for; at the end of a piece, it may be fewer."""
        return self._each

    @property
    def x(self) -> list[float]:
        return [sum_x / (count or 1) for sum_x, _, count in self._points]

    @property
    def y(self) -> list[float | None]:
        """None at a break."""
        return [sum_y / count if count else None for _, sum_y, count in self._points]

    def __len__(self) -> int:
        return len(self._points)
