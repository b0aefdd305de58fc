"""Places slices on lines so that any two on a line are apart, or one inside the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Slice(msgspec.Struct, Generic[T], frozen=True):
    begin: int
    end: int
    of: T


def in_lanes(slices: Iterable[Slice[T]], *, nest: bool) -> list[list[Slice[T]]]:
    """As few lanes as it takes, each in order of time, outer slices before inner ones.

    Without `nest`, none lies inside another: they would look as if they were parts of it.
    """
    lanes: list[list[Slice[T]]] = []
    opened: list[list[int]] = []  # of each lane, where the slices that are open end
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        at = next((at for at, ends in enumerate(opened) if _fits(one, ends, nest)), None)
        if at is None:
            at = len(lanes)
            lanes.append([])
            opened.append([])
        lanes[at].append(one)
        opened[at].append(one.end)
    return lanes


def _fits(one: Slice[T], ends: list[int], nest: bool) -> bool:
    while ends and ends[-1] <= one.begin:
        ends.pop()
    return not ends or (nest and one.end <= ends[-1])
