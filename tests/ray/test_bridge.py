"""Waiting on any event loop for what other threads and Ray's processes do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from sc_core.errors import CallTimeout, MissingRows
from sc_ray.bridge import LoopThread, await_future, await_ref, result_within, within

pytestmark = pytest.mark.anyio


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test loop")
    yield thread
    thread.close()


async def resolve_soon(how: Any) -> None:
    """Resolve from another thread, once the waiter waits."""
    await anyio.wait_all_tasks_blocked()
    await anyio.to_thread.run_sync(how)


async def test_future_gives_its_result() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    async with anyio.create_task_group() as tg:
        tg.start_soon(resolve_soon, partial(future.set_result, 7))
        assert await await_future(future) == 7
    assert await await_future(future) == 7


async def test_future_raises_its_error() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    error = MissingRows(["a"])
    async with anyio.create_task_group() as tg:
        tg.start_soon(resolve_soon, partial(future.set_exception, error))
        with pytest.raises(MissingRows) as caught:
            await await_future(future)
    assert caught.value is error


async def test_future_that_someone_cancels_raises_their_cancel() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    async with anyio.create_task_group() as tg:
        tg.start_soon(resolve_soon, future.cancel)
        with pytest.raises(concurrent.futures.CancelledError):
            await await_future(future)


async def test_cancelled_wait_leaves_the_work_going(loop: LoopThread) -> None:
    finish = asyncio.Event()

    async def work() -> int:
        await finish.wait()
        return 5

    future = loop.submit(work())
    with anyio.move_on_after(0.01) as scope:
        await await_future(future)
    assert scope.cancelled_caught
    assert not future.done()

    async def let_finish() -> None:
        finish.set()

    loop.submit(let_finish())
    assert await await_future(future) == 5


async def test_many_waits_need_no_threads(loop: LoopThread) -> None:
    finish = asyncio.Event()

    async def work(number: int) -> int:
        await finish.wait()
        return number

    async def let_finish() -> int:
        before = threading.active_count()
        finish.set()
        return before

    before = threading.active_count()
    results: list[int] = []

    async def wait_for(number: int) -> None:
        results.append(await await_future(loop.submit(work(number))))

    async with anyio.create_task_group() as tg:
        for number in range(200):
            tg.start_soon(wait_for, number)
        await anyio.wait_all_tasks_blocked()
        during = await await_future(loop.submit(let_finish()))
    assert sorted(results) == list(range(200))
    assert during == before


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_future_may_outlive_the_loop(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def give_up() -> None:
        with anyio.move_on_after(0):
            await await_future(future)

    anyio.run(give_up, backend=backend)
    with caplog.at_level(logging.DEBUG):
        future.set_result(1)
    assert caplog.records == []


# references ----------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self._go = threading.Event()
        self._done = False

    def answer(self) -> int:
        return 42

    def fail(self) -> None:
        raise MissingRows(["a", "b"])

    def fail_like_python(self) -> None:
        raise KeyError("a")

    def fail_further_away(self) -> None:
        @ray.remote(num_cpus=0)
        def inner() -> None:
            raise MissingRows(["far"])

        ray.get(inner.remote())

    def fail_unpicklably(self) -> None:
        error = ValueError("held a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def wait_and_finish(self) -> None:
        self._go.wait()
        self._done = True

    def go(self) -> None:
        self._go.set()

    def is_done(self) -> bool:
        return self._done


@pytest.fixture(scope="module")
def worker(local_ray: None) -> Any:
    return Worker.options(max_concurrency=3).remote()


async def test_reference_gives_its_value(worker: Any) -> None:
    assert await await_ref(worker.answer.remote()) == 42


async def test_error_of_a_task_is_the_one_it_raised(worker: Any) -> None:
    with pytest.raises(MissingRows) as caught:
        await await_ref(worker.fail.remote())
    assert type(caught.value) is MissingRows
    assert caught.value.missing == ("a", "b")
    assert isinstance(caught.value.__cause__, RayTaskError)
    assert "in fail" in str(caught.value.__cause__)  # where it happened
    with pytest.raises(KeyError) as other:
        await await_ref(worker.fail_like_python.remote())
    assert other.value.args == ("a",)


async def test_error_of_a_task_of_a_task_is_unwrapped(worker: Any) -> None:
    with pytest.raises(MissingRows) as caught:
        await await_ref(worker.fail_further_away.remote())
    assert type(caught.value) is MissingRows
    assert caught.value.missing == ("far",)


async def test_error_that_does_not_pickle_keeps_its_story(worker: Any) -> None:
    with pytest.raises(Exception, match="held a lock") as caught:
        await await_ref(worker.fail_unpicklably.remote())
    assert not isinstance(caught.value, ValueError)


async def test_death_of_an_actor_is_rays_own_error(local_ray: None) -> None:
    doomed = Worker.remote()
    await await_ref(doomed.answer.remote())
    waiting = doomed.wait_and_finish.remote()
    ray.kill(doomed)
    with pytest.raises(ActorDiedError):
        await await_ref(waiting)


async def test_cancelled_wait_leaves_the_task_running(local_ray: None) -> None:
    worker = Worker.options(max_concurrency=2).remote()
    ref = worker.wait_and_finish.remote()
    with anyio.move_on_after(0.01) as scope:
        await await_ref(ref)
    assert scope.cancelled_caught
    await await_ref(worker.go.remote())
    await await_ref(ref)
    assert await await_ref(worker.is_done.remote())
    ray.kill(worker)


# blocking ------------------------------------------------------------------------------


def test_within_gives_result_error_or_timeout() -> None:
    assert within(10, "work", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, "work", lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        within(10, "work", partial(_raise, TimeoutError("its own")))
    release = threading.Event()
    with pytest.raises(CallTimeout, match=r"^slow work did not return within 0\.01 s$"):
        within(0.01, "slow work", release.wait)
    release.set()


def test_late_work_is_cancelled_on_its_loop(loop: LoopThread) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(CallTimeout):
        result_within(0.05, "work", loop.submit(work()))
    assert ended.wait(10)


def test_closing_a_loop_thread_cancels_what_runs_there() -> None:
    thread = LoopThread("short")
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    future = thread.submit(work())
    assert started.wait(10)
    assert thread.close()
    assert future.cancelled()
    assert thread.close()
    assert "short" not in [one.name for one in threading.enumerate()]


def test_closing_a_busy_loop_thread_says_that_it_goes_on() -> None:
    thread = LoopThread("busy")
    started, release = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        release.wait()

    future = thread.submit(work())
    assert started.wait(10)
    assert not thread.close(0.05)
    release.set()
    future.result(10)
    assert thread.close()


def _raise(error: Exception) -> None:
    raise error
