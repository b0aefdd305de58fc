"""Calls that are awaited even when cancelled, until their deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from sc_core.errors import CallTimeout

R = TypeVar("R")


async def settle(
    call: str,
    deadline_s: float,
    work: Callable[[], Awaitable[R]],
    *,
    then: Callable[[R], None] | None = None,
) -> R:
    """Await `work` whatever happens to this task, for at most `deadline_s` seconds.

    A cancel takes effect after `work` has returned, so what it did is known; `then` gets its
    result in the same synchronous step, also when this task is about to be cancelled. The work
    runs in a child task: a native `asyncio.Task.cancel()`, which ignores shields, ends the
    wait only once the child is done.

    Raises:
        CallTimeout: the deadline passed; whether the call took effect is unknown.
    """
    outcome: list[R] = []
    failure: list[Exception] = []

    async def child() -> None:
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(deadline_s) as deadline:
                result = await work()
                if then is not None:
                    then(result)
                outcome.append(result)
        except TimeoutError as exc:
            failure.append(CallTimeout(call, deadline_s) if deadline.cancelled_caught else exc)
        except Exception as exc:  # carried to the caller, not swallowed
            failure.append(exc)

    async with anyio.create_task_group() as tg:
        tg.start_soon(child)
    if failure:
        raise failure[0]
    await anyio.lowlevel.checkpoint_if_cancelled()
    return outcome[0]


async def in_thread(work: Callable[..., R], *args: Any) -> R:
    """The runner for real work: a worker thread that a cancel waits for."""
    return await anyio.to_thread.run_sync(work, *args)


async def inline(work: Callable[..., R], *args: Any) -> R:
    """The runner for tests on a virtual clock: no thread, but still a checkpoint."""
    await anyio.lowlevel.checkpoint()
    return work(*args)
