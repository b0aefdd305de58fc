"""A controller in a thread and an event loop of its own, steered from any other thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from sc_core import (
    ControllerStatistics,
    RunResult,
)
from sc_ray.failures import ControllerFailed

R = TypeVar("R")
EventLoop = Literal["asyncio", "uvloop", "trio"]
State = Literal["starting", "running", "ended"]


class Controller(Protocol):
    """What a `SingleController` offers to whoever steers it."""

    async def run(self) -> RunResult: ...
    def stop(self, reason: str = "stopped", *, checkpoint: bool = True) -> None: ...
    def request_checkpoint(self) -> None: ...
    def statistics(self) -> ControllerStatistics: ...
    def audit(self) -> None: ...


class HostedController:
    """Runs one controller to its end; `call` reaches it there and never waits.

    Args:
        open_controller: entered on the new loop, so that clients belong to it.
        event_loop: which loop to make.
    """

    def __init__(
        self,
        open_controller: Callable[[], AbstractAsyncContextManager[Controller]],
        event_loop: EventLoop = "asyncio",
    ) -> None:
        self._open = open_controller
        self._event_loop = event_loop
        self._thread = threading.Thread(target=self._main, name="controller", daemon=True)
        self._ended: concurrent.futures.Future[RunResult] = concurrent.futures.Future()
        # Under the lock: a call is either in the queue of a loop that will still look at it, or
        # sees that the controller rests.
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._schedule: Callable[[], None] | None = None
        self._controller: Controller | None = None
        self._over = False

    @property
    def state(self) -> State:
        if self._over:
            return "ended"
        return "starting" if self._controller is None else "running"

    @property
    def ended(self) -> concurrent.futures.Future[RunResult]:
        """The run's result, or a `ControllerFailed`. Cancelling it does nothing."""
        return self._ended

    def start(self) -> None:
        """Start the thread, unless it was started before. Call it from one thread."""
        if self._thread.ident is None:
            self._ended.set_running_or_notify_cancel()
            self._thread.start()

    def call(self, work: Callable[[Controller], R]) -> concurrent.futures.Future[R]:
        """Have `work` called with the controller on its own loop, between two of its steps.

        Calls made before the controller is there wait for it, in order. Once the run has ended
        `work` is called at once, here; if there never was a controller, the future is cancelled.
        """
        future: concurrent.futures.Future[R] = concurrent.futures.Future()

        def perform() -> None:
            if self._controller is None:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._controller))
                except BaseException as exc:  # carried to the caller, not swallowed
                    future.set_exception(exc)

        with self._lock:
            over, schedule = self._over, self._schedule
            if not over:
                self._calls.append(perform)
        if over:
            perform()
        elif schedule is not None:
            schedule()
        return future

    # in the controller's thread --------------------------------------------------------

    def _main(self) -> None:
        backend = "trio" if self._event_loop == "trio" else "asyncio"
        options: dict[str, dict[str, Any]] = {
            "asyncio": {"loop_factory": asyncio.SelectorEventLoop},  # the policy may be uvloop's
            "uvloop": {"use_uvloop": True},
            "trio": {},
        }
        try:
            result = anyio.run(
                self._run, backend=backend, backend_options=options[self._event_loop]
            )
        except BaseException as exc:  # carried to whoever waits, not swallowed
            self._end()
            self._ended.set_exception(ControllerFailed.of(exc))
        else:
            self._end()
            self._ended.set_result(result)

    async def _run(self) -> RunResult:
        async with self._open() as controller:
            with self._lock:
                self._controller = controller
                self._schedule = _scheduler(self._perform_calls)
            self._perform_calls()
            return await controller.run()

    def _perform_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _end(self) -> None:
        with self._lock:
            self._over = True
        self._perform_calls()


class LoopCalls:
    """Has work done on the event loop that made this, between two steps of its tasks."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._schedule = _scheduler(self._perform)

    def call(self, work: Callable[[], R]) -> concurrent.futures.Future[R]:
        """Callable in any thread, and never waits. If the loop has ended, nothing ever happens."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()

        def perform() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as exc:  # carried to the caller, not swallowed
                    future.set_exception(exc)

        self._calls.append(perform)
        self._schedule()
        return future

    def _perform(self) -> None:
        while self._calls:
            self._calls.popleft()()


async def in_abandonable_thread(work: Callable[..., R], *args: Any) -> R:
    """A runner whose thread is left behind when its call's deadline passes.

    A thread can't be ended, so the process must be: a `CallTimeout` makes the actor do so.
    """
    return await anyio.to_thread.run_sync(work, *args, abandon_on_cancel=True)


def _scheduler(work: Callable[[], None]) -> Callable[[], None]:
    """A function for any thread, which never waits, that has this loop call `work`."""
    loop: Any = anyio.lowlevel.current_token().native_token
    schedule = (
        loop.call_soon_threadsafe
        if isinstance(loop, asyncio.AbstractEventLoop)
        else loop.run_sync_soon
    )

    def soon() -> None:
        try:
            schedule(work)
        except RuntimeError:  # the loop has ended: `_end` performs what is left
            pass

    return soon
