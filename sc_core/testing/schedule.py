"""One schedule, the same on every run: an asyncio loop on a virtual clock, watched at each step.

asyncio only. It runs what is ready first in, first out, so a step's number means the same instant
on every run; trio shuffles what is ready on purpose.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
MOST_PASSES = 100_000  #: of one run; of 12 small steps it has about 2,000


class Deadlock(Exception):
    """Every task waits, and neither a timer nor anybody else is left to wake one."""


class Endless(Exception):
    """A run goes round in circles."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: when nothing is ready, moves the loop's clock to the next timer."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop.alone:
            self.loop.passes += 1
            if self.loop.passes > MOST_PASSES:
                raise Endless(f"no end after {MOST_PASSES} passes of the event loop")
            if timeout is None:
                raise Deadlock("every task waits, and no timer is left to wake one")
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock jumps instead of waiting."""

    alone = False  #: no other thread will ever wake this loop
    passes = 0  #: of a loop that is alone

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class StepLoop(VirtualClockLoop):
    """Calls `before_step` before each callback it runs: there every task waits at an await."""

    alone = True

    def __init__(self, before_step: Callable[[], None]) -> None:
        super().__init__()
        self._before_step = before_step

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def _step(self, callback: Callable[[Unpack[Ts]], object], args: tuple[*Ts]) -> None:
        self._before_step()
        callback(*args)


def run_alone(
    main: Coroutine[Any, Any, None], before_step: Callable[[], None] | None = None
) -> list[str]:
    """Run `main` to its end on a loop of its own; returns the errors that nobody handled.

    Raises:
        Deadlock, Endless: it can't end.
    """
    loop = VirtualClockLoop() if before_step is None else StepLoop(before_step)
    loop.alone = True
    unhandled: list[str] = []
    loop.set_exception_handler(
        lambda _, context: unhandled.append(f"{context['message']}: {context.get('exception')!r}")
    )
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main)
    finally:
        loop.close()
    return unhandled


class Stepped:
    """A `Runner` whose work takes `pause_s` virtual seconds at each call of `pause`.

    The work has a thread, which runs only while the loop waits for it, and the loop only while
    the thread is paused. So blocking work overlaps with everything else as in a real thread, at
    the same instants on every run.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._turns: dict[int, _Turn] = {}  #: by thread

    def pause(self) -> None:
        """Called by the work: let the others go on. Outside such work, does nothing."""
        turn = self._turns.get(threading.get_ident())
        if turn is not None:
            turn.of_loop.release()
            turn.of_thread.acquire()

    async def __call__(self, work: Callable[..., R], *args: Any) -> R:
        turn = _Turn()
        results: list[R] = []
        errors: list[BaseException] = []

        def body() -> None:
            self._turns[threading.get_ident()] = turn
            turn.of_thread.acquire()
            try:
                results.append(work(*args))
            except BaseException as exc:
                errors.append(exc)
            finally:
                del self._turns[threading.get_ident()]
                turn.over = True
                turn.of_loop.release()

        thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True)
        thread.start()
        with anyio.CancelScope(shield=True):  # as a real thread: a cancel waits for it
            while True:
                await anyio.sleep(self._pause_s)
                turn.of_thread.release()
                turn.of_loop.acquire()
                if turn.over:
                    break
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


class _Turn:
    def __init__(self) -> None:
        self.of_loop = threading.Semaphore(0)
        self.of_thread = threading.Semaphore(0)
        self.over = False
