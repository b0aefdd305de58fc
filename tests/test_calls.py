"""`settle`: a call is awaited to its end, or to its deadline, whatever happens to the caller."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from sc_core.calls import in_thread, inline, settle
from sc_core.errors import CallFailed, CallTimeout, SaveError

pytestmark = pytest.mark.anyio


async def test_a_cancel_takes_effect_after_the_call() -> None:
    done: list[str] = []

    async def work() -> str:
        await anyio.sleep(5)
        done.append("work")
        return "result"

    started = anyio.current_time()
    with anyio.move_on_after(1) as scope:
        await settle("call", 60, work, then=lambda result: done.append(result))
        await checkpoint()
        done.append("not reached")
    assert scope.cancelled_caught
    assert done == ["work", "result"]
    assert anyio.current_time() - started == pytest.approx(5)


async def test_the_deadline_names_the_call() -> None:
    with pytest.raises(CallTimeout, match=r"data_plane\.put did not return within 3 s"):
        await settle("data_plane.put", 3, anyio.sleep_forever)


async def test_an_error_gets_the_name_of_the_call_unless_it_has_one_or_comes_after_it() -> None:
    async def broken() -> None:
        await checkpoint()
        raise LookupError("no such row")

    def refuse(_: None) -> None:
        raise ValueError("refused")

    async def refused() -> None:
        await checkpoint()
        raise SaveError("the disk is full")

    with pytest.raises(CallFailed, match=r"^call failed: LookupError: no such row") as caught:
        await settle("call", 3, broken)
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(SaveError, match="the disk is full"):
        await settle("call", 3, refused)
    with pytest.raises(ValueError, match="refused"):
        await settle("call", 3, checkpoint, then=refuse)


async def test_a_timeout_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    async def work() -> None:
        await checkpoint()
        raise TimeoutError("of the socket")

    with pytest.raises(CallFailed, match="call failed: TimeoutError: of the socket"):
        await settle("call", 3, work)


async def test_inline_runs_where_it_is_called() -> None:
    assert await inline(threading.get_ident) == threading.get_ident()


def test_a_native_cancel_of_the_parent_waits_for_the_thread_that_works() -> None:
    """`ray.cancel` reaches a coroutine as a bare `Task.cancel()`, which ignores shields."""

    async def main() -> tuple[bool, bool]:
        working, may_end = threading.Event(), threading.Event()

        def work() -> None:
            working.set()
            may_end.wait(10)

        async def tree() -> None:
            async with anyio.create_task_group() as tg:
                tg.start_soon(settle, "save", 60, lambda: in_thread(work))

        task = asyncio.create_task(tree())
        await asyncio.to_thread(working.wait, 10)
        for _ in range(2):  # and once more, for those who insist
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
        ended_early = task.done()
        may_end.set()
        await asyncio.wait([task])
        return ended_early, task.cancelled()

    assert asyncio.run(main()) == (False, True)
