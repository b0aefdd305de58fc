"""`Watched`: waiting for a fact about a value, and what errors and cancels do to it."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from sc_core.watched import Watched, WatchedStatistics

pytestmark = pytest.mark.anyio


async def test_a_waiter_wakes_when_the_value_is_accepted_and_gets_that_value() -> None:
    version, woke = Watched(0), {}

    async def wait_for(at_least: int) -> None:
        accepted = await version.wait_until(lambda v: v >= at_least)
        woke[at_least] = (anyio.current_time() - started, accepted)

    started = anyio.current_time()
    async with anyio.create_task_group() as tg:
        for at_least in (2, 3, 3, 4):
            tg.start_soon(wait_for, at_least)
        for value in (1, 2, 4):
            await anyio.sleep(10)
            version.set(value)
    assert woke == {2: (20, 2), 3: (30, 4), 4: (30, 4)}
    assert version.value == 4


async def test_the_accepted_value_is_returned_even_if_it_changed_before_the_waiter_ran() -> None:
    version, got, asked = Watched(0), [], []

    def accepts(value: int) -> bool:
        asked.append(value)
        return value >= 1

    async def wait() -> None:
        got.append(await version.wait_until(accepts))

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait)
        await wait_all_tasks_blocked()
        version.set(1)
        assert version.statistics().waiting == 0
        version.set(2)
    assert (got, asked) == ([1], [0, 1])


async def test_an_accepted_value_is_still_a_checkpoint() -> None:
    version, ran = Watched(1), []

    async def other() -> None:
        ran.append("other")

    async with anyio.create_task_group() as tg:
        tg.start_soon(other)
        for _ in range(20):  # trio may run us again first, but not for ever
            assert await version.wait_until(lambda v: v == 1) == 1
        assert ran == ["other"]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await version.wait_until(lambda v: v == 1)
    assert scope.cancelled_caught


async def test_touch_looks_again_at_a_value_changed_in_place() -> None:
    groups: Watched[list[str]] = Watched([])
    got: list[list[str]] = []

    async def wait() -> None:
        got.append(await groups.wait_until(lambda held: len(held) == 2))

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait)
        await wait_all_tasks_blocked()
        groups.value.append("a")
        groups.touch()
        await wait_all_tasks_blocked()
        assert not got
        groups.value.append("b")
        groups.touch()
    assert got == [["a", "b"]]
    assert got[0] is groups.value


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    version, asked = Watched(0), []

    def accepts(value: int) -> bool:
        asked.append(value)
        return False

    with anyio.move_on_after(5):
        await version.wait_until(accepts)
    assert version.statistics() == WatchedStatistics(waiting=0)
    version.set(1)
    assert asked == [0]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_wake_up_is_not_lost_with_a_cancelled_waiter(cancel_first: bool) -> None:
    version, scope, woke = Watched(0), anyio.CancelScope(), []

    async def wait(name: str) -> None:
        await version.wait_until(bool)
        woke.append(name)

    async def wait_cancellably() -> None:
        with scope:
            await wait("cancelled")

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait_cancellably)
        await wait_all_tasks_blocked()
        tg.start_soon(wait, "other")
        await wait_all_tasks_blocked()
        for step in [scope.cancel, lambda: version.set(1)][:: 1 if cancel_first else -1]:
            step()
    assert "other" in woke
    assert version.statistics().waiting == 0


async def test_a_predicate_that_raises_ends_its_own_wait_only() -> None:
    version, ended = Watched(0), []

    def fails_at_one(value: int) -> bool:
        if value == 1:
            raise LookupError("no group of version 1")
        return False

    async def wait() -> None:
        with pytest.raises(LookupError, match="no group of version 1"):
            await version.wait_until(fails_at_one)
        ended.append("failed")

    async def wait_for_one(name: str) -> None:
        await version.wait_until(lambda v: v == 1)
        ended.append(name)

    async with anyio.create_task_group() as tg:
        for start in (lambda: tg.start_soon(wait_for_one, "before"), lambda: tg.start_soon(wait)):
            start()
            await wait_all_tasks_blocked()
        tg.start_soon(wait_for_one, "after")
        await wait_all_tasks_blocked()
        version.set(1)
    assert sorted(ended) == ["after", "before", "failed"]


async def test_a_predicate_that_raises_at_once_raises_where_it_waits() -> None:
    version = Watched(0)
    with pytest.raises(ZeroDivisionError):
        await version.wait_until(lambda v: 1 / v > 0)
    assert version.statistics().waiting == 0


async def test_an_interrupt_in_a_predicate_is_nobodys_wait_to_end() -> None:
    """Only errors belong to the waiter: a `KeyboardInterrupt` stops whoever it struck."""
    version = Watched(0)

    def interrupted(value: int) -> bool:
        if value:
            raise KeyboardInterrupt
        return False

    async with anyio.create_task_group() as tg:
        tg.start_soon(version.wait_until, interrupted)
        await wait_all_tasks_blocked()
        with pytest.raises(KeyboardInterrupt):
            version.set(1)
        assert version.statistics().waiting == 1
        tg.cancel_scope.cancel()


async def test_the_repr_shows_the_value_and_how_many_wait() -> None:
    version = Watched(3)
    async with anyio.create_task_group() as tg:
        tg.start_soon(version.wait_until, lambda v: v > 3)
        await wait_all_tasks_blocked()
        assert repr(version) == "<Watched 3, 1 waiting>"
        tg.cancel_scope.cancel()
    assert repr(version) == "<Watched 3, 0 waiting>"
