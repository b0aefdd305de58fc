"""`Places`: buffer capacity, held by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec

from sc_core.errors import ConfigError, PlaceAlreadyHeld, PlaceNotHeld

if TYPE_CHECKING:
    from collections.abc import Hashable


class PlacesStatistics(msgspec.Struct, frozen=True):
    """A moment's view of the places, for logs and tests."""

    capacity: int
    held: int
    free: int
    holders: tuple[Hashable, ...]  #: in the order in which they got their place


class Places:
    """A fixed number of places, each held in somebody's name: a leak shows whose it is.

    Nothing here waits. Whoever finds none free waits for the fact elsewhere and tries again.
    """

    __slots__ = ("_capacity", "_holders")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"places need a capacity of at least 1, got {capacity}")
        self._capacity = capacity
        self._holders: dict[Hashable, None] = {}

    def __repr__(self) -> str:
        return f"<Places {self.held} of {self._capacity} held>"

    def statistics(self) -> PlacesStatistics:
        """Who holds a place at this instant."""
        return PlacesStatistics(self._capacity, self.held, self.free, self.holders())

    def __contains__(self, name: Hashable) -> bool:
        return name in self._holders

    @property
    def capacity(self) -> int:
        """How many there are."""
        return self._capacity

    @property
    def held(self) -> int:
        """Places held, which is more than the capacity when more were restored."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Places that can be taken now: max(0, capacity - held)."""
        return max(0, self._capacity - len(self._holders))

    def holders(self) -> tuple[Hashable, ...]:
        """Who holds a place, in the order in which they got it."""
        return tuple(self._holders)

    def take(self, name: Hashable) -> None:
        """Take a place in `name`'s name.

        Raises:
            PlaceAlreadyHeld: `name` holds one; a ValueError.
            anyio.WouldBlock: none is free.
        """
        self._refuse_second(name)
        if len(self._holders) >= self._capacity:
            raise anyio.WouldBlock
        self._holders[name] = None

    def restore(self, name: Hashable) -> None:
        """Give `name` a place even if none is free: what was restored keeps its place.

        Raises:
            PlaceAlreadyHeld: `name` holds one; a ValueError.
        """
        self._refuse_second(name)
        self._holders[name] = None

    def release(self, name: Hashable) -> None:
        """Give back the place that `name` holds.

        Raises:
            PlaceNotHeld: it holds none, or gave it back before; a KeyError.
        """
        if name not in self._holders:
            raise PlaceNotHeld(repr(name))
        del self._holders[name]

    def transfer(self, old: Hashable, new: Hashable) -> None:
        """Pass the place that `old` holds to `new`: at no moment is it free.

        Raises:
            PlaceNotHeld: `old` holds none; a KeyError.
            PlaceAlreadyHeld: `new` holds one of its own; a ValueError. Nothing has changed.
        """
        self._refuse_second(new)
        self.release(old)
        self._holders[new] = None

    def _refuse_second(self, name: Hashable) -> None:
        if name in self._holders:
            raise PlaceAlreadyHeld(repr(name))
