"""Curves of long runs in bounded memory."""

from __future__ import annotations


class Thinned:
    """A curve of at most `at_most` points, whatever is added: neighbours share their mean."""

    def __init__(self, at_most: int = 2000) -> None:
        self._at_most = at_most
        self._each = 1  #: values that a point stands for
        self._points: list[tuple[float, float, int]] = []  #: sums of x and y, and how many

    def add(self, x: float, y: float) -> None:
        if self._points and self._points[-1][2] < self._each:
            sum_x, sum_y, count = self._points[-1]
            self._points[-1] = (sum_x + x, sum_y + y, count + 1)
            return
        if len(self._points) >= self._at_most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs] + odd
            self._each *= 2
        self._points.append((x, y, 1))

    @property
    def each(self) -> int:
        """How many values a point stands for; the last one may stand for fewer."""
        return self._each

    @property
    def x(self) -> list[float]:
        return [sum_x / count for sum_x, _, count in self._points]

    @property
    def y(self) -> list[float]:
        return [sum_y / count for _, sum_y, count in self._points]

    def __len__(self) -> int:
        return len(self._points)
