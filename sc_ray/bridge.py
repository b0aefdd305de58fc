"""Work that runs elsewhere, awaited from asyncio, uvloop or trio without a thread that waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import ray
from ray.exceptions import RayTaskError

from sc_core import (
    CallTimeout,
)

R = TypeVar("R")


async def await_future(future: concurrent.futures.Future[R]) -> R:
    """The result of a future that some other thread resolves.

    A cancel ends the wait at once and leaves the work going: who wants it stopped cancels the
    future. If somebody else does, this raises `concurrent.futures.CancelledError`.
    """
    done = anyio.Event()
    wake = _waker(done.set)
    future.add_done_callback(lambda _: wake())
    await done.wait()
    return future.result()


async def await_ref(ref: ray.ObjectRef[R]) -> R:
    """The value of a Ray reference.

    A cancel ends the wait at once and leaves the task running: `ray.cancel` stops it. An error
    of the task is raised as the exception that the task raised, with Ray's report of it as its
    `__cause__`; what can't be brought across (it does not pickle, or is not an `Exception`)
    stays a `RayTaskError`. Errors of Ray itself (`ActorDiedError`, …) pass unchanged.
    """
    try:
        return await await_future(ref.future())
    except RayTaskError as report:
        cause = report.cause
        while isinstance(cause, RayTaskError):  # the task had itself waited for another
            cause = cause.cause
        if isinstance(cause, Exception):
            raise cause from report
        raise


def within(deadline_s: float, call: str, work: Callable[[], R]) -> R:
    """Run blocking `work` in a thread of its own and wait for it at most `deadline_s` seconds.

    Raises:
        CallTimeout: it did not return. Its thread waits on; it does not keep the process alive.
    """
    return result_within(deadline_s, call, begin_in_thread(call, work))


def begin_in_thread(call: str, work: Callable[[], R]) -> concurrent.futures.Future[R]:
    """Begin `work` in a thread of its own, which does not keep the process alive."""
    future: concurrent.futures.Future[R] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as exc:  # carried to the caller, not swallowed
            future.set_exception(exc)

    threading.Thread(target=run, name=call, daemon=True).start()
    return future


def result_within(deadline_s: float, call: str, future: concurrent.futures.Future[R]) -> R:
    """Wait for a future, blocking. On the deadline, or when interrupted, cancel its work.

    Raises:
        CallTimeout: the deadline passed.
    """
    try:
        concurrent.futures.wait([future], deadline_s)
        if future.done():
            return future.result()
        raise CallTimeout(call, deadline_s)
    finally:
        future.cancel()  # does nothing to one that is done, or runs in a plain thread


class LoopThread:
    """An asyncio loop in a daemon thread of its own, for a client that needs one."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Start `work` on the loop. Cancelling the future cancels it there, without waiting."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Cancel what runs, then end the loop and its thread. May be called again.

        Returns False if the thread is busy beyond the deadline; it ends later, and what it uses
        must not be taken apart.
        """
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._begin_end)
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()


def _waker(wake: Callable[[], None]) -> Callable[[], None]:
    """A function for any thread, which never waits, that lets this loop call `wake`."""
    loop: Any = anyio.lowlevel.current_token().native_token
    schedule = (
        loop.call_soon_threadsafe
        if isinstance(loop, asyncio.AbstractEventLoop)
        else loop.run_sync_soon
    )

    def wake_soon() -> None:
        with suppress(RuntimeError):  # the loop has ended, and the waiter with it
            schedule(wake)

    return wake_soon
