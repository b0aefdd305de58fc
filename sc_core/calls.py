"""Calls that are awaited even when cancelled, until their deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from sc_core.errors import CallCancelled, CallTimeout

R = TypeVar("R")


async def settle(
    call: str,
    deadline_s: float,
    work: Callable[[], Awaitable[R]],
    *,
    then: Callable[[R], object] | None = None,
) -> R:
    """Await `work` whatever is cancelled around it, for at most `deadline_s` seconds.

    A cancel takes effect at the next await after this one, so what the call did is known; `then`
    gets its result in the same synchronous step. Shields do not hold a native
    `asyncio.Task.cancel()`: `SingleController.run` keeps its whole tree in child tasks, where
    none arrives.

    Raises:
        CallTimeout: the deadline passed; whether the call took effect is unknown.
    """
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + deadline_s) as in_time:
        result = await work()
        if then is not None:
            then(result)
        return result
    assert in_time.cancelled_caught
    raise CallTimeout(call, deadline_s)


async def in_tree(task: Callable[..., Awaitable[R]], *args: Any) -> R:
    """Run a task of the tree; a cancel that the tree did not send is an error like any other.

    An `asyncio.CancelledError` out of a port call (of an executor that shut down, say) would
    end its task without a word, and the run would wait for ever for what that task was to do.

    Raises:
        CallCancelled: that happened.
    """
    try:
        return await task(*args)
    except anyio.get_cancelled_exc_class() as exc:
        await anyio.lowlevel.checkpoint_if_cancelled()  # one of ours goes on as it came
        raise CallCancelled(
            "a port call was cancelled by something outside this run; the traceback says which"
        ) from exc


def ended_from_outside(task: str) -> CallCancelled:
    """For after a task group that has ended although nobody in it failed or was done.

    A native cancel of a task that has not begun to run ends it, and the group, without a word.
    """
    return CallCancelled(f"{task} was cancelled by something outside this run")


async def in_thread(work: Callable[..., R], *args: Any) -> R:
    """The runner for real work: a worker thread that a cancel waits for."""
    return await anyio.to_thread.run_sync(work, *args)


async def inline(work: Callable[..., R], *args: Any) -> R:
    """The runner for tests on a virtual clock: no thread, but still a checkpoint."""
    await anyio.lowlevel.checkpoint()
    return work(*args)
