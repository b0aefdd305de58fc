"""Calls through ports: awaited until their deadline even when cancelled, and named if they fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from sc_core.errors import CallCancelled, CallFailed, CallTimeout, ScError

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
        CallTimeout: the deadline passed; whether the call took effect is unknown. So it is if
            the call answered that with a result, or an error, after all.
        CallFailed: it raised something else than an `ScError`, which arrives as it is.
    """
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + deadline_s) as in_time:
        try:
            result = await work()
        except Exception as exc:
            if in_time.cancel_called:
                raise CallTimeout(call, deadline_s) from exc
            if isinstance(exc, ScError):
                raise
            raise failed(call, exc) from exc
        except anyio.get_cancelled_exc_class() as exc:
            exc.add_note(call)  # for `in_tree`, if the deadline is not what cancelled it
            raise
        if not in_time.cancel_called:
            if then is not None:
                then(result)
            return result
    raise CallTimeout(call, deadline_s)


def at_once(call: str, work: Callable[..., R], *args: Any) -> R:
    """Call a synchronous port.

    Raises:
        CallFailed: it raised something else than an `ScError`, which arrives as it is.
        CallCancelled: it raised what only an await may.
    """
    try:
        return work(*args)
    except ScError:
        raise
    except Exception as exc:
        raise failed(call, exc) from exc
    except anyio.get_cancelled_exc_class() as exc:
        raise ended_from_outside(call) from exc


def failed(call: str, error: Exception) -> CallFailed:
    """What to raise from an error that a port raised."""
    return CallFailed(call, told(error))


def told(error: BaseException) -> str:
    """Kind and message of an error, as a file can hold them."""
    return writable(f"{type(error).__name__}: {error}")


def writable(text: str) -> str:
    """`text` with what no file can hold written out: Python has bytes that are no text as halves
    of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


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
        noted = vars(exc).get("__notes__") or ["a port call"]
        raise ended_from_outside(noted[0]) from exc


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
