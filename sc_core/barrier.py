"""`CheckpointBarrier`: many mutations at once, or one checkpoint alone."""

from __future__ import annotations

import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar, Literal

import anyio
import msgspec

from sc_core.errors import BarrierMisuse, BarrierTimeout, CallTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

Side = Literal["mutation", "checkpoint"]


class SectionStatistics(msgspec.Struct, frozen=True):
    """One section, held or waited for."""

    side: Side
    label: str
    age_s: float  #: seconds since it was granted, or since it began to wait

    def __str__(self) -> str:
        return f"{self.side} {self.label!r} for {round(self.age_s, 3):g} s"


class BarrierStatistics(msgspec.Struct, frozen=True):
    """A moment's view of a barrier, for logs and tests."""

    mutations: int  #: mutation sections held, nested ones included
    checkpointing: bool  #: a checkpoint holds it
    waiting: int  #: sections that wait to be entered
    holders: tuple[SectionStatistics, ...]  #: oldest first
    waiters: tuple[SectionStatistics, ...]  #: in the order in which they will be admitted


class CheckpointBarrier:
    """Keeps a checkpoint apart from the mutations that it must not see half done.

    Any number of mutations hold it together, a checkpoint holds it alone. Entering may wait;
    leaving never does, so no cancel can interrupt it.

    **Who waits for whom.** Waiters are admitted in order of arrival, neighbouring mutations
    together. A mutation waits for the checkpoint that holds the barrier and for those that
    arrived before it; a checkpoint waits for all who hold the barrier or arrived before it. So
    neither side can starve the other. A mutation inside a mutation waits for nobody: a checkpoint
    that it waited for would itself wait for the outer one. What can still deadlock is waiting,
    inside a section, for a task that has yet to enter one and was not started inside, while a
    checkpoint waits between the two; its deadline ends that as well.

    **Nesting.** A section counts for the task that entered it and for every task and thread
    started while it was held (it travels in their context), until it is left. A mutation under a
    mutation is granted at once, also when a checkpoint waits. It is a section of its own: the
    barrier stays held until both are left, in whichever order. A mutation under a checkpoint, or
    a checkpoint under either, raises `BarrierMisuse` at once and leaves the barrier as it was.

    **Cancellation.** Ownership moves when a section is granted, not when its task wakes. A
    cancelled waiter gives back what it was granted meanwhile and lets in those who waited only
    for it, also under a native `asyncio.Task.cancel()`. Entering an uncontended barrier neither
    yields nor looks for a pending cancel: the section's own first await does. A native cancel
    ignores shields, so it can end a section whose thread call still runs; but it reaches one task
    only, so enter sections in a child of the one that may be hit, as `SingleController.run` does.

    **Deadlines.** A section whose body ends with a `CallTimeout`, or with what one has caused, is
    never left: the call may still be writing, and nothing that it could tear may begin. The run
    has to end, and what waits for the barrier with it.

    **Elsewhere.** tricycle's RWLock is as fair, and refuses to nest. aiorwlock prefers writers,
    and nests within one task only. In both, readers queued behind a writer that gives up sleep on
    until the holder leaves. A barrier made of an `asyncio.Condition` has to await its lock in
    order to leave, so a cancel can leak the section, and wakes every waiter for every change.

    Not thread-safe. `clock` dates the ages in reports, in seconds from any origin. The default
    takes a tenth of what asking the event loop does; on a virtual clock, pass
    `anyio.current_time`.
    """

    __slots__ = ("_clock", "_closed", "_holders", "_queue", "entered")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Invariant: any number of mutations, or one checkpoint. Values: when they were granted.
        self._holders: dict[Section, float] = {}
        # Invariant: its first turn, if any, could not be admitted beside the holders.
        self._queue: deque[_Turn] = deque()
        # Invariant: true when a checkpoint holds or somebody queues; a newcomer looks only here.
        self._closed = False
        self.entered = 0  #: sections so far, both sides together

    def __repr__(self) -> str:
        now = self.statistics()
        held = f"held by {_listed(now.holders)}" if now.holders else "free"
        waiting = f"; waiting: {_listed(now.waiters)}" if now.waiters else ""
        return f"<CheckpointBarrier {held}{waiting}>"

    def statistics(self) -> BarrierStatistics:
        """Who holds the barrier, who waits for it, and for how long."""
        now = self._clock()
        holders = _described(self._holders, now)
        waiters = [each for turn in self._queue for each in _described(turn.arrivals, now)]
        checkpointing = self._side() == "checkpoint"
        return BarrierStatistics(
            mutations=0 if checkpointing else len(holders),
            checkpointing=checkpointing,
            waiting=len(waiters),
            holders=tuple(holders),
            waiters=tuple(waiters),
        )

    def mutation(self, label: str = "unnamed") -> MutationSection:
        """Hold the barrier for one change: `async with barrier.mutation("commit"):`.

        Entering waits for the checkpoints that hold it or arrived earlier; leaving never waits.

        Raises:
            BarrierMisuse: on entering under a checkpoint held by this task or a parent.
        """
        section = MutationSection()  # filled in here: an __init__ would slow entering by a tenth
        section._barrier = self
        section.label = label
        section.waited_s = 0.0
        section._outer = None
        section._held = None
        return section

    def checkpoint(
        self, label: str = "unnamed", *, deadline_s: float | None = None
    ) -> CheckpointSection:
        """Hold the barrier alone: `async with barrier.checkpoint("save", deadline_s=60):`.

        Entering waits for all who hold it or arrived earlier, for `deadline_s` seconds at most;
        leaving never waits.

        Raises:
            BarrierMisuse: on entering under a section held by this task or a parent.
            BarrierTimeout: not granted before the deadline; the message names the holders.
        """
        section = CheckpointSection()
        section._barrier = self
        section.label = label
        section.waited_s = 0.0
        section._outer = None
        section._held = None
        section.deadline_s = deadline_s
        return section

    def mutation_nowait(self, label: str = "unnamed") -> MutationSection:
        """Enter a mutation now; the caller must `leave()` what this returns.

        Raises:
            anyio.WouldBlock: it would have to wait.
            BarrierMisuse: as for `mutation`.
        """
        section = self.mutation(label)
        section.enter_nowait()
        return section

    def checkpoint_nowait(self, label: str = "unnamed") -> CheckpointSection:
        """Enter a checkpoint now; the caller must `leave()` what this returns.

        Raises:
            anyio.WouldBlock: it would have to wait.
            BarrierMisuse: as for `checkpoint`.
        """
        section = self.checkpoint(label)
        section.enter_nowait()
        return section

    def holds_section(self) -> bool:
        """Whether this code runs under a section that is still held: its own or an inherited one.

        Writes that need a section can count or refuse those that come without.
        """
        return self._innermost() is not None

    def _innermost(self) -> Section | None:
        section = _live(_entered.get())
        while section is not None and section._barrier is not self:
            section = _live(section._outer)
        return section

    def _side(self) -> Side | None:
        for section in self._holders:
            return section.side
        return None

    def _admits(self, side: Side) -> bool:
        """Whether `side` can hold the barrier beside those who do, whoever may be queued."""
        return not self._holders or self._side() == side == "mutation"

    def _join_queue(self, section: Section) -> _Turn:
        if not self._queue or not self._queue[-1].side == section.side == "mutation":
            self._queue.append(_Turn(section.side))
        turn = self._queue[-1]
        turn.arrivals[section] = self._clock()
        self._closed = True
        return turn

    def _leave_queue(self, section: Section, turn: _Turn) -> None:
        del turn.arrivals[section]
        if not turn.arrivals:
            self._queue.remove(turn)
            self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._queue and self._admits(self._queue[0].side):
            turn = self._queue.popleft()
            now = self._clock()
            for section in turn.arrivals:  # ownership moves here, not when the sleepers wake
                self._holders[section] = now
                section._held = True
                self.entered += 1
            turn.opened.set()
        self._closed = bool(self._queue) or self._side() == "checkpoint"


class Section:
    """One use of a barrier, made by `mutation` or `checkpoint`: entered once, left once."""

    __slots__ = ("_barrier", "_held", "_outer", "label", "waited_s")

    side: ClassVar[Side]

    label: str
    waited_s: float  #: how long entering took: seconds of the barrier's clock
    _barrier: CheckpointBarrier
    _outer: Section | None  # the live one, of any barrier, that this was entered in
    _held: bool | None  # None: neither granted nor queued yet

    def __repr__(self) -> str:
        return f"{self.side} {self.label!r}"

    def enter_nowait(self) -> None:
        """Enter now, or raise `anyio.WouldBlock` or `BarrierMisuse` and change nothing."""
        if not self._may_enter():
            raise anyio.WouldBlock
        self._grant()

    def leave(self) -> None:
        """Give the section up and let in whoever waited only for it.

        Raises:
            BarrierMisuse: it is not held.
        """
        if not self._held:
            raise BarrierMisuse(f"{self!r} is not held: it was left twice, or never entered")
        barrier = self._barrier
        self._held = False
        del barrier._holders[self]
        if self._outer is not None:
            self._outer = _live(self._outer)  # or chains of dead sections could pile up
        if barrier._closed and not barrier._holders:
            barrier._admit_waiters()

    def _may_enter(self) -> bool:
        """Whether to enter now, rather than queue.

        Raises:
            BarrierMisuse: neither would be right.
        """
        if self._held is not None:
            raise BarrierMisuse(f"{self!r} was entered before: make a new one for each use")
        inside = self._barrier._innermost()
        if inside is None:
            return not self._barrier._queue and self._barrier._admits(self.side)
        if not self.side == inside.side == "mutation":
            raise BarrierMisuse(
                f"{self!r} can't be entered inside {inside!r}, which this task or a parent"
                " holds: leave that one first"
            )
        return True

    def _grant(self) -> None:
        barrier = self._barrier
        barrier._holders[self] = barrier._clock()
        barrier.entered += 1
        barrier._closed = barrier._closed or self.side == "checkpoint"
        self._held = True
        self._mark_entered()

    def _mark_entered(self) -> None:
        """Let the section count for this task and for the tasks it starts from here on."""
        self._outer = _live(_entered.get())
        _entered.set(self)

    async def _wait_turn(self) -> None:
        self._held = False
        self._mark_entered()  # it counts for nothing until granted
        turn = self._barrier._join_queue(self)
        since = turn.arrivals[self]
        try:
            await turn.opened.wait()
        except BaseException:
            if self._held:  # granted and cancelled in the same tick
                self.leave()
            else:  # those behind may have been waiting only for this one
                self._barrier._leave_queue(self, turn)
            raise
        self.waited_s = self._barrier._holders[self] - since


class MutationSection(Section):
    """Shares the barrier with other mutations."""

    __slots__ = ()

    side: ClassVar[Side] = "mutation"

    # Both methods first try the common case, written out for speed: nothing around this section
    # and nobody in its way.

    async def __aenter__(self) -> None:
        barrier = self._barrier
        outer = _entered.get()
        if (outer is None or (not outer._held and outer._outer is None)) and not (
            barrier._closed or self._held is not None
        ):
            barrier._holders[self] = barrier._clock()
            barrier.entered += 1
            self._held = True
            _entered.set(self)
        elif self._may_enter():
            self._grant()
        else:
            await self._wait_turn()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is not None and _outlived_its_deadline(exc):
            return
        barrier = self._barrier
        if self._held and self._outer is None and not barrier._closed:
            self._held = False
            del barrier._holders[self]
        else:
            self.leave()


class CheckpointSection(Section):
    """Has the barrier to itself."""

    __slots__ = ("deadline_s",)

    side: ClassVar[Side] = "checkpoint"

    deadline_s: float | None

    async def __aenter__(self) -> None:
        if self._may_enter():
            self._grant()
            return
        if self.deadline_s is None:
            await self._wait_turn()
            return
        with anyio.move_on_after(self.deadline_s):
            await self._wait_turn()
            return
        raise BarrierTimeout(
            f"{self!r} was not granted within {self.deadline_s:g} s: {self._barrier!r}"
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None or not _outlived_its_deadline(exc):
            self.leave()


class _Turn:
    """Neighbours in the queue, who will be admitted together: mutations, or one checkpoint."""

    __slots__ = ("arrivals", "opened", "side")

    def __init__(self, side: Side) -> None:
        self.side = side
        self.opened = anyio.Event()
        self.arrivals: dict[Section, float] = {}  # and when each began to wait


# The section that this context entered last. Never reset: one that has been left says so itself,
# and its `_outer` tells what is still around it. So leaving works in any context, in any order.
_entered: ContextVar[Section | None] = ContextVar("sc_core.barrier.entered", default=None)


def _outlived_its_deadline(error: BaseException) -> bool:
    """Whether a call may still be under way in some thread or process, in spite of its error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CallTimeout):
        cause = cause.__cause__
    return cause is not None


def _live(section: Section | None) -> Section | None:
    """The innermost section that is still held, of `section` and those around it."""
    while section is not None and not section._held:
        section = section._outer
    return section


def _described(sections: Mapping[Section, float], now: float) -> list[SectionStatistics]:
    return [
        SectionStatistics(section.side, section.label, now - since)
        for section, since in sections.items()
    ]


def _listed(sections: Sequence[SectionStatistics], at_most: int = 5) -> str:
    more = [f"{len(sections) - at_most} more"] if len(sections) > at_most else []
    return ", ".join([*map(str, sections[:at_most]), *more])
