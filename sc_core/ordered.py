"""`OrderedKeys`: a sorted set of integer tuples that changes cheaply at any size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[int, ...]

_BLOCK = 256
"""Keys to which a full block is split, twice as many at most: a change moves fewer than 512
pointers, about 0.1 us, and the list of blocks stays short enough for the same to hold there."""


class OrderedKeys:
    """Distinct tuples, ascending, in a list of short sorted blocks.

    Adding, removing and finding a place cost O(log n) and the shift of one block; iterating is
    lazy and costs what it yields. As with a dict, an iterator that is used again after a
    change raises RuntimeError.
    """

    def __init__(self) -> None:
        # Invariant: no block is empty; _last[i] == _blocks[i][-1]; both ascend.
        self._blocks: list[list[Key]] = []
        self._last: list[Key] = []
        self._length = 0
        self._changes = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Key]:
        return self.at_or_after(())

    def at_or_after(self, first: Key) -> Iterator[Key]:
        """The keys from `first` on; a prefix stands before all keys that it begins."""
        changes = self._changes
        at, start = self._find(first)
        for number in range(at, len(self._blocks)):
            block = self._blocks[number]
            for position in range(start, len(block)):
                yield block[position]
                if self._changes != changes:
                    raise RuntimeError("ordered keys changed during iteration")
            start = 0

    def first(self) -> Key | None:
        return self._blocks[0][0] if self._blocks else None

    def beginning(self, head: int) -> Iterator[Key]:
        """The keys whose first number is `head`."""
        for key in self.at_or_after((head,)):
            if key[0] != head:
                return
            yield key

    def heads(self) -> list[int]:
        """The first numbers that keys have, each once."""
        heads: list[int] = []
        at, position = self._find(())
        while at < len(self._blocks):
            heads.append(self._blocks[at][position][0])
            at, position = self._find((heads[-1] + 1,))
        return heads

    def _find(self, first: Key) -> tuple[int, int]:
        """Block, and position in it, of the first key from `first` on; else one past the blocks."""
        at = bisect_left(self._last, first)
        return at, bisect_left(self._blocks[at], first) if at < len(self._blocks) else 0

    def add(self, key: Key) -> None:
        """Put in `key`, which must not be there."""
        at = bisect_left(self._last, key)
        if at == len(self._blocks):
            if at == 0:
                self._blocks.append([])
                self._last.append(key)
            else:
                at -= 1
        block = self._blocks[at]
        insort(block, key)
        self._last[at] = block[-1]
        if len(block) == 2 * _BLOCK:
            self._blocks.insert(at + 1, block[_BLOCK:])
            del block[_BLOCK:]
            self._last.insert(at, block[-1])
        self._length += 1
        self._changes += 1

    def remove(self, key: Key) -> None:
        """Take out `key`.

        Raises:
            KeyError: it is not there.
        """
        at, position = self._find(key)
        if at == len(self._blocks) or self._blocks[at][position] != key:
            raise KeyError(key)
        block = self._blocks[at]
        del block[position]
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]
        self._length -= 1
        self._changes += 1
