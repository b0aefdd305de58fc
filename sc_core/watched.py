"""`Watched`: a value that tasks can wait on by predicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.lowlevel
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WatchedStatistics(msgspec.Struct, frozen=True):
    """A moment's view of a watched value, for logs and tests."""

    waiting: int  #: tasks in `wait_until`
    waiting_for: tuple[str, ...] = ()  #: what each said that it waits for


class Watched(Generic[T]):
    """A value that tasks wait on by predicate: `await version.wait_until(lambda v: v >= 2)`.

    Changing the value never waits. It evaluates the predicate of each waiter once, in order of
    arrival, and wakes every one that accepts, so a wake-up can't go to the wrong task or be lost
    with a cancelled one. A wake-up is news, not a permit: when the waiter runs the value may have
    changed again, so re-check and act in one synchronous step.

    Predicates are plain, quick functions of the value. One that raises ends its own wait with
    that error and disturbs neither the other waiters nor the task that changed the value.
    """

    __slots__ = ("_value", "_waiters")

    def __init__(self, value: T) -> None:
        self._value = value
        self._waiters: dict[_Waiter[T], None] = {}  # ordered, and quick to leave

    def __repr__(self) -> str:
        return f"<Watched {self._value!r}, {len(self._waiters)} waiting>"

    def statistics(self) -> WatchedStatistics:
        """Who waits for it at this instant."""
        return WatchedStatistics(len(self._waiters), tuple(waiter.what for waiter in self._waiters))

    @property
    def value(self) -> T:
        """What it is now."""
        return self._value

    def set(self, value: T) -> None:
        """Replace the value and wake those who accept the new one."""
        self._value = value
        self.touch()

    def touch(self) -> None:
        """Wake those who accept the value, after it was changed in place."""
        for waiter in [waiter for waiter in self._waiters if waiter.is_done_with(self._value)]:
            del self._waiters[waiter]
            waiter.woken.set()

    async def wait_until(self, accepts: Callable[[T], bool], what: str = "") -> T:
        """Wait until `accepts(value)` and return the value it accepted.

        `what` tells people what is waited for, in statistics and in the report of a stall.

        Always a checkpoint, also if the value is accepted at once. A cancelled wait leaves
        nothing behind.

        Raises:
            Exception: whatever `accepts` raised, here or while another task changed the value.
        """
        value = self._value
        if accepts(value):
            await anyio.lowlevel.checkpoint()
            return value
        waiter = _Waiter(accepts, what)
        self._waiters[waiter] = None
        try:
            await waiter.woken.wait()
        finally:
            self._waiters.pop(waiter, None)
        if waiter.error is not None:
            raise waiter.error
        return waiter.accepted


class _Waiter(Generic[T]):
    """A call of `wait_until` under way: its predicate, and what became of it."""

    __slots__ = ("accepted", "accepts", "error", "what", "woken")

    accepted: T  # unset until `accepts` held

    def __init__(self, accepts: Callable[[T], bool], what: str) -> None:
        self.accepts = accepts
        self.what = what
        self.error: Exception | None = None
        self.woken = anyio.Event()

    def is_done_with(self, value: T) -> bool:
        try:
            if not self.accepts(value):
                return False
        except Exception as error:  # the waiter's own: raised where it waits
            self.error = error
        else:
            self.accepted = value
        return True
