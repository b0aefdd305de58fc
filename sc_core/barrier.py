"""`CheckpointBarrier`: many mutations at once, or one checkpoint alone."""

from __future__ import annotations

import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar, Literal

import anyio
import msgspec

from sc_core.errors import BarrierMisuse, BarrierTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

Side = Literal["mutation", "checkpoint"]


class SectionStatistics(msgspec.Struct, frozen=True):
    """One section, held or waited for."""

    side: Side
    label: str
    age_s: float  #: seconds since it was granted, or since it began to wait

    def __str__(self) -> str:
        return f"{self.side} {self.label!r} for {self.age_s:.3g} s"


class BarrierStatistics(msgspec.Struct, frozen=True):
    """A moment's view of a barrier, for logs and tests."""

    mutations: int  #: mutation sections held, nested ones included
    checkpointing: bool
    waiting: int
    holders: tuple[SectionStatistics, ...]  #: oldest first
    waiters: tuple[SectionStatistics, ...]  #: in the order in which they will be admitted


class CheckpointBarrier:
    """Keeps a checkpoint and the mutations it must not see half done apart.

    Any number of mutations hold it together, a checkpoint holds it alone. Entering may wait;
    leaving never does, so a cancel can't interrupt it.

    **Who waits for whom.** Waiters are admitted in order of arrival, neighbouring mutations
    together. A mutation waits for the checkpoint that holds the barrier or arrived before it; a
    checkpoint waits for all who hold the barrier or arrived before it. So neither side can starve
    the other. A mutation inside a mutation waits for nobody, since a checkpoint that it waited
    for would wait for the outer one. What can still deadlock: waiting, inside a section, for a
    task that has yet to enter one and was not started inside. Give the checkpoint a deadline.

    **Nesting.** A section counts for the task that entered it and for every task started while
    it was held, until it is left (it travels in the context, which both backends copy to child
    tasks and worker threads). A mutation under a mutation is granted at once, also when a
    checkpoint waits, and is a section of its own: the barrier stays held until both are left, in
    any order. A mutation under a checkpoint, or a checkpoint under either, raises `BarrierMisuse`
    at once and changes nothing.

    **Cancellation.** Ownership moves when a section is granted, not when its task wakes. A
    cancelled waiter gives back what it was granted meanwhile, and lets in those who waited only
    for it. This holds under a native `asyncio.Task.cancel()` too. Entering an uncontended barrier
    neither yields nor looks for a pending cancel: the section's own first await does. A native
    cancel ignores shields, so a thread call may outlive the section around it; `extend` keeps the
    barrier held until the call has returned.

    **Others.** tricycle's RWLock is as fair, and refuses to nest. aiorwlock prefers writers, and
    nests within one task only. In both, readers queued behind a writer that gives up sleep until
    the holder leaves. A barrier made of an `asyncio.Condition` awaits its lock in order to leave,
    where a cancel can interrupt it and leak the section, and each of its wake-ups wakes everyone.

    Not thread-safe. `clock` gives the ages in reports: seconds from any origin. `time.monotonic`
    costs a tenth of what asking the event loop does; on a virtual clock pass `anyio.current_time`.
    """

    __slots__ = ("_clock", "_closed", "_exclusive", "_holders", "_queue")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holders: dict[Section, float] = {}  # section: when it was granted
        self._exclusive = False  # the holders are a checkpoint and its extensions
        # Invariant: no two neighbouring turns could be admitted together, unless one that stood
        # between them gave up; and the first turn is never one that could be admitted now.
        self._queue: deque[_Turn] = deque()
        self._closed = False  # a mutation must wait: _exclusive, or somebody queues

    def __repr__(self) -> str:
        now = self.statistics()
        held = f"held by {_listed(now.holders)}" if now.holders else "free"
        waiting = f"; waiting: {_listed(now.waiters)}" if now.waiters else ""
        return f"<CheckpointBarrier {held}{waiting}>"

    def statistics(self) -> BarrierStatistics:
        """Who holds the barrier, who waits for it, and for how long."""
        queued = {section: at for turn in self._queue for section, at in turn.arrivals.items()}
        return BarrierStatistics(
            mutations=0 if self._exclusive else len(self._holders),
            checkpointing=self._exclusive,
            waiting=len(queued),
            holders=self._described(self._holders),
            waiters=self._described(queued),
        )

    def mutation(self, label: str = "unnamed") -> MutationSection:
        """Hold the barrier open for one change: `async with barrier.mutation("commit"):`.

        Entering waits for a checkpoint that runs or arrived earlier; leaving never waits.

        Raises:
            BarrierMisuse: on entering under a checkpoint held by this task or a parent.
        """
        return MutationSection(self, label)

    def checkpoint(
        self, label: str = "unnamed", *, deadline_s: float | None = None
    ) -> CheckpointSection:
        """Hold the barrier alone: `async with barrier.checkpoint("save", deadline_s=60):`.

        Entering waits for all who hold the barrier or arrived earlier, for `deadline_s` seconds
        at most; leaving never waits.

        Raises:
            BarrierMisuse: on entering under a section held by this task or a parent.
            BarrierTimeout: not granted before the deadline; the message names the holders.
        """
        return CheckpointSection(self, label, deadline_s=deadline_s)

    def mutation_nowait(self, label: str = "unnamed") -> MutationSection:
        """Enter a mutation now; whoever calls this calls `leave()` on what it returns.

        Raises:
            anyio.WouldBlock: it would have to wait.
            BarrierMisuse: as for `mutation`.
        """
        section = MutationSection(self, label)
        section.enter_nowait()
        return section

    def checkpoint_nowait(self, label: str = "unnamed") -> CheckpointSection:
        """Enter a checkpoint now; whoever calls this calls `leave()` on what it returns.

        Raises:
            anyio.WouldBlock: it would have to wait.
            BarrierMisuse: as for `checkpoint`.
        """
        section = CheckpointSection(self, label)
        section.enter_nowait()
        return section

    def extend(self, label: str = "unnamed") -> Section:
        """Keep the section this runs under from ending before `leave()` is called on the result.

        For work that can outlive its task, such as a thread call under a native cancel. The
        extension is a section of the same side, and must be left on the event loop's thread.

        Raises:
            BarrierMisuse: no section is held here.
        """
        inside = self._innermost()
        if inside is None:
            raise BarrierMisuse(f"no section is held here that {label!r} could extend")
        section = type(inside)(self, label)
        section._grant()
        return section

    def holds_section(self) -> bool:
        """Whether this task, or a parent it inherited the section from, holds one now."""
        return self._innermost() is not None

    def _innermost(self) -> Section | None:
        section = _live(_entered.get())
        while section is not None and section._barrier is not self:
            section = _live(section._outer)
        return section

    def _admits(self, side: Side) -> bool:
        """Whether those who hold the barrier leave room for `side`, whoever may be queued."""
        return not self._holders or (side == "mutation" and not self._exclusive)

    def _join_queue(self, section: Section) -> _Turn:
        if not self._queue or "checkpoint" in (section.side, self._queue[-1].side):
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
            self._exclusive = turn.side == "checkpoint"
            now = self._clock()
            for section in turn.arrivals:  # ownership moves here, not when the sleepers wake
                self._holders[section] = now
                section._held = True
            turn.opened.set()
        self._exclusive = self._exclusive and bool(self._holders)
        self._closed = self._exclusive or bool(self._queue)

    def _described(self, sections: dict[Section, float]) -> tuple[SectionStatistics, ...]:
        now = self._clock()
        return tuple(
            SectionStatistics(section.side, section.label, now - at)
            for section, at in sections.items()
        )


class Section(msgspec.Struct, eq=False):
    """One use of a barrier, as `mutation` or `checkpoint` return it: entered once, left once."""

    side: ClassVar[Side]

    _barrier: CheckpointBarrier
    label: str
    _outer: Section | None = None  # the innermost live one, of any barrier, when this was entered
    _held: bool | None = None  # None: never entered nor queued

    def __repr__(self) -> str:
        return f"{self.side} {self.label!r}"

    def enter_nowait(self) -> None:
        """Enter now, or raise `anyio.WouldBlock` or `BarrierMisuse` and change nothing."""
        if not self._may_enter():
            raise anyio.WouldBlock
        self._grant()

    async def __aenter__(self) -> None:
        if self._may_enter():
            self._grant()
        else:
            await self._wait_turn()

    def leave(self) -> None:
        """Give the section up, and let in whoever waited only for it.

        Raises:
            BarrierMisuse: it is not held.
        """
        if not self._held:
            raise BarrierMisuse(f"{self!r} is not held: it was left twice, or never entered")
        barrier = self._barrier
        self._held = False
        del barrier._holders[self]
        if self._outer is not None:
            self._outer = _live(self._outer)  # else a long chain of dead sections could build up
        if barrier._closed and not barrier._holders:
            barrier._admit_waiters()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def _may_enter(self) -> bool:
        if self._held is not None:
            raise BarrierMisuse(f"{self!r} was entered before: make a new one for each use")
        inside = self._barrier._innermost()
        if inside is None:
            return not self._barrier._queue and self._barrier._admits(self.side)
        if "checkpoint" in (self.side, inside.side):
            raise BarrierMisuse(
                f"{self!r} can't be entered inside {inside!r}, which this task or a parent"
                " holds: it would wait for itself. Leave that one first"
            )
        return True

    def _grant(self) -> None:
        barrier = self._barrier
        barrier._holders[self] = barrier._clock()
        if self.side == "checkpoint":
            barrier._exclusive = barrier._closed = True
        self._held = True
        self._inherit()

    def _inherit(self) -> None:
        """Make the section count for this task and for the tasks that it starts from here on."""
        self._outer = _live(_entered.get())
        _entered.set(self)

    async def _wait_turn(self) -> None:
        self._held = False
        turn = self._barrier._join_queue(self)
        try:
            await turn.opened.wait()
        except BaseException:
            if self._held:  # granted and cancelled in the same tick
                self.leave()
            else:  # those behind may have been waiting only for this one
                self._barrier._leave_queue(self, turn)
            raise
        self._inherit()


class MutationSection(Section, eq=False):
    side: ClassVar[Side] = "mutation"

    async def __aenter__(self) -> None:
        # The common case first, written out for speed: nothing around it, nobody in the way.
        barrier = self._barrier
        outer = _entered.get()
        if (outer is None or outer._held is False and outer._outer is None) and not (
            barrier._closed or self._held is not None
        ):
            barrier._holders[self] = barrier._clock()
            self._held = True
            _entered.set(self)
        elif self._may_enter():
            self._grant()
        else:
            await self._wait_turn()


class CheckpointSection(Section, eq=False):
    side: ClassVar[Side] = "checkpoint"

    deadline_s: float | None = None

    async def _wait_turn(self) -> None:
        if self.deadline_s is None:
            await super()._wait_turn()
            return
        with anyio.move_on_after(self.deadline_s):
            await super()._wait_turn()
            return
        raise BarrierTimeout(
            f"{self!r} was not granted within {self.deadline_s:g} s: {self._barrier!r}"
        )


class _Turn:
    """Neighbours in the queue who will be admitted together: mutations, or one checkpoint."""

    __slots__ = ("arrivals", "opened", "side")

    def __init__(self, side: Side) -> None:
        self.side = side
        self.opened = anyio.Event()
        self.arrivals: dict[Section, float] = {}  # section: when it began to wait


# The section that this context entered last. It is never reset: a section that has been left says
# so itself, and its `_outer` tells what is still around it.
_entered: ContextVar[Section | None] = ContextVar("sc_core.barrier.entered", default=None)


def _live(section: Section | None) -> Section | None:
    """The innermost section that is still held, of `section` and those around it."""
    while section is not None and not section._held:
        section = section._outer
    return section


def _listed(sections: Iterable[SectionStatistics], at_most: int = 5) -> str:
    each = [str(section) for section in sections]
    more = [f"{len(each) - at_most} more"] if len(each) > at_most else []
    return ", ".join(each[:at_most] + more)
