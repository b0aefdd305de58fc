"""`CheckpointBarrier`: who is admitted when, what nests, and that nothing is ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock
from virtual_clock import VirtualClockLoop

from sc_core.barrier import (
    BarrierStatistics,
    CheckpointBarrier,
    MutationSection,
    SectionStatistics,
    Side,
)
from sc_core.calls import in_thread, settle
from sc_core.errors import BarrierMisuse, BarrierTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.anyio

FREE = BarrierStatistics(mutations=0, checkpointing=False, waiting=0, holders=(), waiters=())


class Part(msgspec.Struct, frozen=True):
    """One task of a timetable: arrives, enters, holds and leaves, in virtual seconds."""

    label: str
    at: float
    hold: float = 1
    cancel_at: float = float("inf")
    deadline_s: float | None = None

    @property
    def side(self) -> Side:
        return "mutation" if self.label.startswith("M") else "checkpoint"


def section_of(barrier: CheckpointBarrier, side: Side, label: str = "test") -> Any:
    return barrier.mutation(label) if side == "mutation" else barrier.checkpoint(label)


async def play(barrier: CheckpointBarrier, *parts: Part) -> dict[str, float]:
    """Run the timetable; when each got in. Fails if anybody waits for ever."""
    entered: dict[str, float] = {}
    started = anyio.current_time()

    async def act(part: Part) -> None:
        await anyio.sleep(part.at)
        section = (
            barrier.mutation(part.label)
            if part.side == "mutation"
            else barrier.checkpoint(part.label, deadline_s=part.deadline_s)
        )
        with anyio.CancelScope(deadline=started + part.cancel_at):
            async with section:
                entered[part.label] = anyio.current_time() - started
                now = barrier.statistics()
                assert len(now.holders) == 1 or not now.checkpointing
                await anyio.sleep(part.hold)

    with anyio.fail_after(10_000):
        async with anyio.create_task_group() as tg:
            for part in parts:
                tg.start_soon(act, part)
    assert barrier.statistics() == FREE
    return entered


# admission -----------------------------------------------------------------------------


async def test_mutations_share_and_a_checkpoint_is_alone() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("M1", at=0, hold=10),
        Part("M2", at=1, hold=10),
        Part("C1", at=2, hold=10),
        Part("C2", at=3, hold=10),
    )
    assert entered == {"M1": 0, "M2": 1, "C1": 11, "C2": 21}


async def test_waiters_are_admitted_in_order_of_arrival_neighbouring_mutations_together() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("M1", at=0, hold=10),
        Part("C1", at=1, hold=10),
        Part("M2", at=2, hold=10),
        Part("M3", at=3, hold=5),
        Part("C2", at=4, hold=10),
        Part("C3", at=5, hold=10),
        Part("M4", at=6),
        Part("M5", at=21),  # arrives while M2 and M3 run, but after C2
    )
    assert entered == {
        "M1": 0, "C1": 10, "M2": 20, "M3": 20, "C2": 30, "C3": 40, "M4": 50, "M5": 50,
    }  # fmt: skip


async def test_mutations_that_arrive_under_a_checkpoint_enter_when_it_leaves() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("C1", at=0, hold=10),
        *(Part(f"M{i}", at=i) for i in range(1, 200)),
    )
    assert entered == {"C1": 0} | {f"M{i}": max(i, 10) for i in range(1, 200)}


async def test_nobody_enters_beside_a_checkpoint_that_had_to_wait() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("M1", at=0, hold=10),
        Part("C1", at=1, hold=10),
        Part("M2", at=15),
        Part("C2", at=16),
    )
    assert entered == {"M1": 0, "C1": 10, "M2": 20, "C2": 21}


async def test_a_stream_of_checkpoints_does_not_starve_a_mutation() -> None:
    entered = await play(
        CheckpointBarrier(),
        *(Part(f"C{i}", at=i, hold=3) for i in range(20)),
        Part("M1", at=4.5),
    )
    assert entered["M1"] == 15  # after the five that arrived before it
    assert entered["C5"] == 16


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
async def test_uncontended_entry_and_leaving_do_not_yield(side: Side) -> None:
    barrier = CheckpointBarrier()
    section = section_of(barrier, side)
    with pytest.raises(StopIteration):
        section.__aenter__().send(None)
    assert barrier.statistics().holders[0].side == side
    with pytest.raises(StopIteration):
        section.__aexit__(None, None, None).send(None)
    assert barrier.statistics() == FREE
    assert not barrier.holds_section()


async def test_a_section_says_how_long_it_waited() -> None:
    barrier = CheckpointBarrier(clock=anyio.current_time)
    free = barrier.mutation("free")
    behind, alone = barrier.mutation("behind"), barrier.checkpoint("alone")

    async def enter(section: Any) -> None:
        async with section:
            await anyio.sleep(3)

    async with anyio.create_task_group() as tg:
        for section in (free, alone, behind):
            tg.start_soon(enter, section)
            await anyio.sleep(1)
    assert (free.waited_s, alone.waited_s, behind.waited_s) == (0.0, 2.0, 4.0)


async def test_uncontended_entry_leaves_a_pending_cancel_to_the_body() -> None:
    barrier, reached = CheckpointBarrier(), []
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with barrier.mutation():
            reached.append("body")
            await checkpoint()
            reached.append("after its first await")
    assert reached == ["body"]
    assert barrier.statistics() == FREE


async def test_uncontended_entry_takes_the_short_way_again_after_contention() -> None:
    barrier = CheckpointBarrier()

    def calls_to_enter_and_leave() -> list[str]:
        section, calls = barrier.mutation(), []
        sys.setprofile(lambda frame, event, _: calls.append(f"{event} {frame.f_code.co_name}"))
        try:
            for step in (section.__aenter__(), section.__aexit__(None, None, None)):
                with contextlib.suppress(StopIteration):
                    step.send(None)
        finally:
            sys.setprofile(None)
        return calls

    before = calls_to_enter_and_leave()
    await play(barrier, Part("M1", at=0), Part("C1", at=0.5), Part("M2", at=0.7))
    await play(barrier, Part("M1", at=0, hold=2), Part("C1", at=0.5, cancel_at=1))
    assert calls_to_enter_and_leave() == before


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
async def test_leaving_does_not_wait_even_when_others_do(side: Side) -> None:
    barrier = CheckpointBarrier()
    async with anyio.create_task_group() as tg:
        section = section_of(barrier, side)
        tg.start_soon(play_through, barrier, "checkpoint")
        tg.start_soon(play_through, barrier, "mutation")
        await section.__aenter__()
        await wait_all_tasks_blocked()
        assert barrier.statistics().waiting
        with pytest.raises(StopIteration):
            section.__aexit__(None, None, None).send(None)
        assert barrier.statistics().holders[0].label == "passing"  # moved at grant
    assert barrier.statistics() == FREE


async def play_through(barrier: CheckpointBarrier, side: Side) -> None:
    async with section_of(barrier, side, "passing"):
        await checkpoint()


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
async def test_an_error_or_a_cancel_in_the_body_leaves_the_section(side: Side) -> None:
    barrier = CheckpointBarrier()
    with pytest.raises(LookupError):
        async with section_of(barrier, side):
            raise LookupError
    with anyio.move_on_after(1):
        async with section_of(barrier, side):
            await anyio.sleep_forever()
    assert barrier.statistics() == FREE


# the twins that don't wait -------------------------------------------------------------


async def test_nowait_enters_a_free_barrier_and_leave_gives_it_back() -> None:
    barrier = CheckpointBarrier()
    first, second = barrier.mutation_nowait("a"), CheckpointBarrier().mutation_nowait("b")
    assert barrier.statistics().mutations == 1
    first.leave()
    second.leave()
    save = barrier.checkpoint_nowait("save")
    assert barrier.statistics().checkpointing
    save.leave()
    assert barrier.statistics() == FREE


async def test_nowait_would_block_beside_the_other_side() -> None:
    def nowait_elsewhere(enter: Callable[[], Any]) -> None:
        contextvars.Context().run(enter)  # a task that holds nothing

    barrier = CheckpointBarrier()
    section = barrier.mutation_nowait()
    with pytest.raises(anyio.WouldBlock):
        nowait_elsewhere(barrier.checkpoint_nowait)
    nowait_elsewhere(lambda: barrier.mutation_nowait().leave())
    section.leave()
    section = barrier.checkpoint_nowait()
    for enter in (barrier.mutation_nowait, barrier.checkpoint_nowait):
        with pytest.raises(anyio.WouldBlock):
            nowait_elsewhere(enter)
    section.leave()
    assert barrier.statistics() == FREE


async def test_nowait_does_not_overtake_the_queue() -> None:
    barrier, left = CheckpointBarrier(), anyio.Event()

    async def hold() -> None:
        async with barrier.mutation():
            await left.wait()

    async with anyio.create_task_group() as tg:
        tg.start_soon(hold)
        await wait_all_tasks_blocked()
        tg.start_soon(play_through, barrier, "checkpoint")
        await wait_all_tasks_blocked()
        with pytest.raises(anyio.WouldBlock):
            barrier.mutation_nowait()
        left.set()


# nesting -------------------------------------------------------------------------------


async def with_a_checkpoint_waiting(
    barrier: CheckpointBarrier, body: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run `body` in a mutation while another task waits for a checkpoint."""
    async with anyio.create_task_group() as tg:
        holding = anyio.Event()

        async def save() -> None:
            await holding.wait()
            async with barrier.checkpoint("save"):
                pass

        tg.start_soon(save)
        async with barrier.mutation("outer"):
            holding.set()
            await wait_all_tasks_blocked()
            assert barrier.statistics().waiting == 1
            await body()


async def test_a_mutation_in_a_mutation_enters_at_once_though_a_checkpoint_waits() -> None:
    barrier = CheckpointBarrier()

    async def body() -> None:
        inner = barrier.mutation("inner")
        with pytest.raises(StopIteration):
            inner.__aenter__().send(None)
        innermost = barrier.mutation_nowait("innermost")
        labels = [held.label for held in barrier.statistics().holders]
        assert labels == ["outer", "inner", "innermost"]
        inner.leave()
        innermost.leave()

    with anyio.fail_after(60):
        await with_a_checkpoint_waiting(barrier, body)
    assert barrier.statistics() == FREE


async def test_a_child_task_inherits_the_section_and_may_outlive_it() -> None:
    barrier, log = CheckpointBarrier(), []
    entered, parent_left = anyio.Event(), anyio.Event()

    async def child() -> None:
        async with barrier.mutation("child"):
            entered.set()
            await parent_left.wait()
            await wait_all_tasks_blocked()
            log.append("child still inside")
            async with barrier.mutation("its own nested one"):
                log.append("nested")
        async with barrier.mutation("after"):
            log.append("after")

    async def save() -> None:
        await entered.wait()
        async with barrier.checkpoint():
            log.append("checkpoint")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(save)
            async with barrier.mutation("parent"):
                tg.start_soon(child)
                await entered.wait()
                await wait_all_tasks_blocked()
            parent_left.set()
    assert log == ["child still inside", "nested", "checkpoint", "after"]
    assert barrier.statistics() == FREE


async def test_an_inherited_section_that_was_left_counts_for_nothing() -> None:
    barrier, left, log = CheckpointBarrier(), anyio.Event(), []

    async def child() -> None:
        await left.wait()
        assert not barrier.holds_section()
        async with barrier.mutation():
            log.append("child")

    async def other() -> None:
        async with barrier.mutation():
            await left.wait()
            await wait_all_tasks_blocked()
            log.append("other")

    async def save() -> None:
        async with barrier.checkpoint():
            log.append("checkpoint")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(other)
            await wait_all_tasks_blocked()
            async with barrier.mutation("parent"):
                tg.start_soon(child)
                await wait_all_tasks_blocked()
            tg.start_soon(save)
            await wait_all_tasks_blocked()
            left.set()
    assert log == ["other", "checkpoint", "child"]


async def test_a_left_inner_section_does_not_hide_the_outer_one() -> None:
    barrier, log = CheckpointBarrier(), []
    inner_left, looked = anyio.Event(), anyio.Event()

    async def child_of_the_inner_one() -> None:
        await inner_left.wait()
        log.append(barrier.holds_section())
        async with barrier.mutation():
            log.append("child")
        looked.set()

    async def body() -> None:
        async with barrier.mutation("inner"):
            tg.start_soon(child_of_the_inner_one)
        with pytest.raises(BarrierMisuse):
            barrier.checkpoint_nowait()
        barrier.mutation_nowait().leave()
        inner_left.set()
        await looked.wait()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            await with_a_checkpoint_waiting(barrier, body)
    assert log == [True, "child"]
    assert barrier.statistics() == FREE


async def test_a_left_inner_section_does_not_hide_the_outer_one_from_the_next_inner_one() -> None:
    barrier = CheckpointBarrier()
    async with barrier.mutation("outer"):
        for _ in range(3):
            async with barrier.mutation("inner"):
                assert barrier.statistics().mutations == 2
            assert barrier.holds_section()
            with pytest.raises(BarrierMisuse):
                barrier.checkpoint_nowait()
    assert not barrier.holds_section()


async def test_sections_may_be_left_in_any_order_and_in_any_context() -> None:
    barrier = CheckpointBarrier()
    first, second = barrier.mutation_nowait("first"), barrier.mutation_nowait("second")
    third = barrier.mutation_nowait("third")
    first.leave()
    assert barrier.holds_section()
    third.leave()
    assert barrier.holds_section()
    contextvars.Context().run(second.leave)
    assert not barrier.holds_section()
    assert barrier.statistics() == FREE
    barrier.checkpoint_nowait().leave()


@pytest.mark.parametrize("by_child", [False, True], ids=["by the holder", "by a child"])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("mutation", "checkpoint"), ("checkpoint", "mutation"), ("checkpoint", "checkpoint")],
)
async def test_illegal_nesting_is_refused_at_once_and_changes_nothing(
    outer: Side, inner: Side, by_child: bool
) -> None:
    barrier = CheckpointBarrier(clock=lambda: 0.0)

    async def misuse() -> None:
        before = barrier.statistics()
        with pytest.raises(
            BarrierMisuse, match=f"{inner} 'bad' can't be entered inside {outer} 'around'"
        ):
            section_of(barrier, inner, "bad").__aenter__().send(None)
        with pytest.raises(BarrierMisuse):
            section_of(barrier, inner, "bad").enter_nowait()
        assert barrier.statistics() == before

    entered = anyio.Event()

    async def other() -> None:
        await entered.wait()
        await play_through(barrier, "checkpoint")

    async with anyio.create_task_group() as outside:
        outside.start_soon(other)  # and a checkpoint waits
        async with section_of(barrier, outer, "around"), anyio.create_task_group() as tg:
            entered.set()
            await wait_all_tasks_blocked()
            if by_child:
                tg.start_soon(misuse)
            else:
                await misuse()
    async with section_of(barrier, inner):
        pass
    assert barrier.statistics() == FREE


async def test_a_child_of_a_checkpoint_may_mutate_once_that_is_left() -> None:
    barrier, left, log = CheckpointBarrier(), anyio.Event(), []

    async def finalise() -> None:
        await left.wait()
        async with barrier.mutation(), barrier.mutation():
            log.append("mutation")
        async with barrier.checkpoint():
            log.append("checkpoint")

    async with anyio.create_task_group() as tg:
        async with barrier.checkpoint():
            tg.start_soon(finalise)
        left.set()
    assert log == ["mutation", "checkpoint"]


async def test_barriers_do_not_count_for_each_other() -> None:
    one, two = CheckpointBarrier(), CheckpointBarrier()
    async with one.mutation(), two.checkpoint():
        assert one.holds_section()
        assert two.holds_section()
        async with one.mutation():
            with pytest.raises(BarrierMisuse):
                two.mutation_nowait()
        with pytest.raises(BarrierMisuse):
            one.checkpoint_nowait()
    async with one.checkpoint():
        assert not two.holds_section()
        async with two.mutation():
            pass
        with pytest.raises(BarrierMisuse):
            one.mutation_nowait()
    assert one.statistics() == two.statistics() == FREE


async def test_a_section_waited_for_inside_another_barriers_section_is_found_again() -> None:
    one, two = CheckpointBarrier(), CheckpointBarrier()
    busy = contextvars.Context().run(two.checkpoint_nowait)

    async def wait() -> None:
        async with one.mutation(), two.mutation():
            assert one.holds_section()
            assert two.holds_section()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(wait)
            await wait_all_tasks_blocked()
            assert (one.statistics().mutations, two.statistics().waiting) == (1, 1)
            busy.leave()


async def test_a_relay_of_nested_sections_keeps_no_dead_ones() -> None:
    """Each task starts the next one inside its section and leaves once that one is inside."""
    barrier = CheckpointBarrier()

    def alive() -> int:
        gc.collect()
        return sum(type(each) is MutationSection for each in gc.get_objects())

    before, kept = alive(), []

    async def run(remaining: int, inside: anyio.Event) -> None:
        async with barrier.mutation():
            inside.set()
            if remaining:
                next_inside = anyio.Event()
                tg.start_soon(run, remaining - 1, next_inside)
                await next_inside.wait()
            else:
                await wait_all_tasks_blocked()
                kept.append(alive() - before)

    async with anyio.create_task_group() as tg:
        tg.start_soon(run, 20, anyio.Event())
    assert kept[0] <= 3  # its own, and at most the two that its context leads to


# sections are used once ----------------------------------------------------------------


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
async def test_a_section_is_entered_once(side: Side) -> None:
    barrier = CheckpointBarrier()
    section = section_of(barrier, side, "again")
    async with section:
        with pytest.raises(BarrierMisuse, match=f"{side} 'again' was entered before"):
            await section.__aenter__()
    for enter_again in (section.enter_nowait, lambda: section.__aenter__().send(None)):
        with pytest.raises(BarrierMisuse, match="make a new one for each use"):
            enter_again()
    assert barrier.statistics() == FREE


async def test_a_section_that_waits_can_not_be_entered_by_a_second_task() -> None:
    barrier = CheckpointBarrier()
    section, refused = barrier.mutation("shared"), []

    async def enter() -> None:
        try:
            async with section:
                pass
        except BarrierMisuse as misuse:
            refused.append(str(misuse))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(enter)
            tg.start_soon(enter)
            async with barrier.checkpoint():
                await wait_all_tasks_blocked()
                assert barrier.statistics().waiting == 1
    assert refused == ["mutation 'shared' was entered before: make a new one for each use"]
    assert barrier.statistics() == FREE


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
async def test_a_section_is_left_once_and_only_if_held(side: Side) -> None:
    barrier = CheckpointBarrier()
    section = section_of(barrier, side, "mine")
    with pytest.raises(BarrierMisuse, match=f"{side} 'mine' is not held"):
        section.leave()
    section.enter_nowait()
    section.leave()
    for leave_again in (section.leave, lambda: section.__aexit__(None, None, None).send(None)):
        with pytest.raises(BarrierMisuse, match="it was left twice, or never entered"):
            leave_again()
    assert barrier.statistics() == FREE


# what it says about itself -------------------------------------------------------------


async def test_holds_section_is_true_under_a_live_section_only() -> None:
    barrier, seen = CheckpointBarrier(), {}
    stop = anyio.Event()

    async def look(name: str) -> None:
        seen[name] = barrier.holds_section()
        await stop.wait()
        seen[f"{name}, later"] = barrier.holds_section()

    async with anyio.create_task_group() as tg:
        tg.start_soon(look, "unrelated")
        await wait_all_tasks_blocked()
        async with barrier.mutation():
            assert barrier.holds_section()
            tg.start_soon(look, "child")
            seen["thread"] = await anyio.to_thread.run_sync(barrier.holds_section)
            await wait_all_tasks_blocked()
        assert not barrier.holds_section()
        stop.set()
    async with barrier.checkpoint():
        assert barrier.holds_section()
    assert seen == {
        "unrelated": False,
        "child": True,
        "thread": True,
        "unrelated, later": False,
        "child, later": False,
    }


async def test_statistics_and_repr_name_holders_and_waiters_with_labels_and_ages() -> None:
    barrier = CheckpointBarrier(clock=anyio.current_time)
    assert repr(barrier) == "<CheckpointBarrier free>"
    watch: list[tuple[BarrierStatistics, str]] = []

    async def look(at: float) -> None:
        await anyio.sleep(at)
        watch.append((barrier.statistics(), repr(barrier)))

    async with anyio.create_task_group() as tg:
        for at in (5, 12):
            tg.start_soon(look, at)
        await play(
            barrier,
            Part("M1", at=0, hold=10),
            Part("C1", at=2, hold=10),
            Part("M2", at=4),
        )
    assert watch == [
        (
            BarrierStatistics(
                mutations=1,
                checkpointing=False,
                waiting=2,
                holders=(SectionStatistics("mutation", "M1", 5),),
                waiters=(
                    SectionStatistics("checkpoint", "C1", 3),
                    SectionStatistics("mutation", "M2", 1),
                ),
            ),
            "<CheckpointBarrier held by mutation 'M1' for 5 s;"
            " waiting: checkpoint 'C1' for 3 s, mutation 'M2' for 1 s>",
        ),
        (
            BarrierStatistics(
                mutations=0,
                checkpointing=True,
                waiting=1,
                holders=(SectionStatistics("checkpoint", "C1", 2),),
                waiters=(SectionStatistics("mutation", "M2", 8),),
            ),
            "<CheckpointBarrier held by checkpoint 'C1' for 2 s; waiting: mutation 'M2' for 8 s>",
        ),
    ]


async def test_a_long_list_of_holders_is_cut_short_in_the_repr_only() -> None:
    barrier = CheckpointBarrier(clock=lambda: 0.0)
    held = [barrier.mutation_nowait(f"m{number}") for number in range(8)]
    assert repr(barrier).endswith("mutation 'm4' for 0 s, 3 more>")
    assert len(barrier.statistics().holders) == 8
    for section in held:
        section.leave()


async def test_ages_come_from_the_real_clock_unless_another_is_given() -> None:
    barrier = CheckpointBarrier()
    section = barrier.mutation_nowait()
    first = barrier.statistics().holders[0].age_s
    assert 0 <= first <= barrier.statistics().holders[0].age_s < 3600
    section.leave()


# deadlines -----------------------------------------------------------------------------


async def test_a_checkpoint_past_its_deadline_names_who_holds_the_barrier() -> None:
    barrier = CheckpointBarrier(clock=anyio.current_time)
    timetable = [Part("M1", at=0, hold=100), Part("M2", at=3, hold=3)]
    began = anyio.current_time()
    async with anyio.create_task_group() as tg:
        tg.start_soon(play, barrier, *timetable)
        await anyio.sleep(2)
        with pytest.raises(BarrierTimeout) as caught:
            async with barrier.checkpoint("save", deadline_s=30):
                raise AssertionError("not reached")
        assert anyio.current_time() - began == 32
    assert str(caught.value) == (
        "checkpoint 'save' was not granted within 30 s: <CheckpointBarrier held by"
        " mutation 'M1' for 32 s, mutation 'M2' for 0 s>"
    )
    assert barrier.statistics() == FREE


async def test_a_deadline_bounds_the_wait_and_not_the_body() -> None:
    barrier = CheckpointBarrier()
    entered = await play(
        barrier,
        Part("C1", at=0, hold=50, deadline_s=1),
        Part("C2", at=1, hold=50, deadline_s=49.5),
        Part("M1", at=2),
    )
    assert entered == {"C1": 0, "C2": 50, "M1": 100}


async def test_a_deadline_of_zero_is_for_those_who_need_not_wait() -> None:
    barrier = CheckpointBarrier()
    async with barrier.checkpoint(deadline_s=0):
        pass
    busy = contextvars.Context().run(barrier.mutation_nowait)
    with pytest.raises(BarrierTimeout), anyio.fail_after(60):
        async with barrier.checkpoint(deadline_s=0):
            pass
    busy.leave()
    assert barrier.statistics() == FREE


async def test_a_cancel_from_outside_is_not_reported_as_a_deadline() -> None:
    barrier = CheckpointBarrier()
    entered = await play(
        barrier,
        Part("M1", at=0, hold=100),
        Part("C1", at=1, cancel_at=5, deadline_s=50),
        Part("C2", at=2, cancel_at=10),
    )
    assert entered == {"M1": 0}


@pytest.mark.parametrize("hold", [1, 2, 3])
async def test_a_deadline_in_the_instant_of_the_grant_leaves_nothing_behind(hold: float) -> None:
    barrier, outcome = CheckpointBarrier(), []

    async def save() -> None:
        await anyio.sleep(1)
        try:
            async with barrier.checkpoint(deadline_s=1):
                outcome.append("entered")
        except BarrierTimeout:
            outcome.append("timed out")

    async with anyio.create_task_group() as tg:
        tg.start_soon(save)
        await play(barrier, Part("M1", at=0, hold=hold), Part("M2", at=1.5))
    assert outcome == {1: ["entered"], 3: ["timed out"]}.get(hold, outcome)
    assert barrier.statistics() == FREE
    barrier.checkpoint_nowait().leave()


# cancelled waiters ---------------------------------------------------------------------


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("C1", at=0, hold=10),
        Part("M1", at=1, cancel_at=5),
        Part("M2", at=2),
        Part("C2", at=3, cancel_at=5),
        Part("M3", at=4, cancel_at=6),
        Part("C3", at=5),
    )
    assert entered == {"C1": 0, "M2": 10, "C3": 11}


async def test_those_behind_a_cancelled_checkpoint_enter_at_once_up_to_the_next_one() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("M1", at=0, hold=100),
        Part("C1", at=1, cancel_at=10),
        Part("M2", at=2),
        Part("C2", at=3, hold=5),
        Part("M3", at=4),
    )
    assert entered == {"M1": 0, "M2": 10, "C2": 100, "M3": 105}


async def test_mutations_parted_by_a_checkpoint_that_gave_up_enter_together() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("C1", at=0, hold=10),
        Part("M1", at=1, hold=5),
        Part("C2", at=2, cancel_at=4),
        Part("M2", at=3, hold=5),
        Part("M3", at=6, hold=5),
    )
    assert entered == {"C1": 0, "M1": 10, "M2": 10, "M3": 10}


async def test_the_barrier_is_open_again_after_the_last_waiter_gave_up() -> None:
    entered = await play(
        CheckpointBarrier(),
        Part("M1", at=0, hold=100),
        Part("C1", at=1, cancel_at=5),
        Part("M2", at=6),
    )
    assert entered == {"M1": 0, "M2": 6}


@pytest.mark.parametrize("cancel_first", [True, False], ids=["cancel, leave", "leave, cancel"])
@pytest.mark.parametrize("waiter", ["mutation", "checkpoint"])
async def test_a_section_granted_and_cancelled_in_one_tick_is_handed_back(
    waiter: Side, cancel_first: bool
) -> None:
    barrier, scope, log = CheckpointBarrier(), anyio.CancelScope(), []

    async def give_up() -> None:
        with scope:
            async with section_of(barrier, waiter):
                log.append("entered")
                await anyio.sleep_forever()

    async def next_in_line() -> None:
        async with barrier.checkpoint():
            log.append("next")

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            tg.start_soon(give_up)
            holder = contextvars.Context().run(barrier.checkpoint_nowait)
            await wait_all_tasks_blocked()
            tg.start_soon(next_in_line)
            await wait_all_tasks_blocked()
            for step in (scope.cancel, holder.leave)[:: 1 if cancel_first else -1]:
                step()
    assert log[-1] == "next"
    assert barrier.statistics() == FREE


# native cancels ------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False], ids=["waits", "free"])
@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
def test_a_native_cancel_at_any_tick_leaves_nothing_behind(side: Side, held: bool) -> None:
    """`ray.cancel` reaches a coroutine as a bare `Task.cancel`, not as a cancel scope."""

    async def main(cancel_at: int, leave_at: int) -> list[int]:
        barrier, finished = CheckpointBarrier(), []
        holder = contextvars.Context().run(barrier.checkpoint_nowait) if held else None

        async def use(number: int) -> None:
            async with section_of(barrier, side):
                await asyncio.sleep(0)
            finished.append(number)

        tasks = [asyncio.create_task(use(number)) for number in range(3)]
        for tick in range(8):
            if tick == cancel_at:
                tasks[0].cancel()
            if holder and tick == leave_at:
                holder.leave()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert barrier.statistics() == FREE
        return finished

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        for cancel_at in range(8):
            for leave_at in range(5):
                assert {1, 2} <= set(runner.run(main(cancel_at, leave_at)))


@pytest.mark.parametrize("cancel_first", [True, False], ids=["cancel, leave", "leave, cancel"])
def test_a_section_granted_and_natively_cancelled_in_one_tick_is_handed_back(
    cancel_first: bool,
) -> None:
    async def main() -> None:
        barrier = CheckpointBarrier()
        holder = contextvars.Context().run(barrier.checkpoint_nowait)
        task = asyncio.create_task(play_through(barrier, "checkpoint"))
        behind = asyncio.create_task(play_through(barrier, "mutation"))
        await asyncio.sleep(0)
        assert barrier.statistics().waiting == 2
        for step in (task.cancel, holder.leave)[:: 1 if cancel_first else -1]:
            step()
        await asyncio.wait_for(behind, 60)
        assert task.cancelled()
        assert barrier.statistics() == FREE

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("side", ["mutation", "checkpoint"])
def test_a_child_tasks_section_outlasts_its_thread_call_when_the_parent_is_natively_cancelled(
    side: Side,
) -> None:
    async def main() -> None:
        barrier = CheckpointBarrier()
        working, may_end = threading.Event(), threading.Event()

        def write() -> None:
            working.set()
            may_end.wait(10)

        async def use() -> None:
            async with section_of(barrier, side):
                await settle("write", 60, lambda: in_thread(write))

        async def parent() -> None:
            async with anyio.create_task_group() as tg:
                tg.start_soon(use)

        task = asyncio.create_task(parent())
        await asyncio.to_thread(working.wait, 10)
        for _ in range(3):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(barrier.statistics().holders) == 1
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert barrier.statistics() == FREE

    asyncio.run(main())


# any schedule --------------------------------------------------------------------------


class Visit(msgspec.Struct, frozen=True):
    """One task of a random schedule. Times are virtual seconds, so many things coincide."""

    side: Side
    arrive_at: int
    hold: int
    nested: bool  #: mutations: also start a child inside, which enters and may outlive us
    give_up_at: int | None
    natively: bool  #: gives up by `Task.cancel` where there is one
    deadline_s: int | None  #: checkpoints only


def visit_from(number: int) -> Visit:
    """One integer a visit: Hypothesis draws it many times faster than seven fields."""

    def choose(*options: Any) -> Any:
        nonlocal number
        number, at = divmod(number, len(options))
        return options[at]

    return Visit(
        side=choose("mutation", "mutation", "checkpoint"),
        arrive_at=choose(0, 1, 2, 3),
        hold=choose(0, 1, 2, 3),
        nested=choose(False, True),
        give_up_at=choose(None, None, None, 0, 1, 2, 3, 4, 5),
        natively=choose(False, True),
        deadline_s=choose(None, None, 0, 1, 2, 3),
    )


visits = st.integers(0, 3 * 4 * 4 * 2 * 9 * 2 * 6 - 1).map(visit_from)
schedules = st.lists(visits, min_size=2, max_size=6)


async def run_schedule(schedule: list[Visit]) -> None:
    barrier = CheckpointBarrier()
    inside: list[Side] = []
    arrivals, unfinished = 0, set(range(len(schedule)))

    def arrival() -> str:
        nonlocal arrivals
        arrivals += 1
        return str(arrivals)

    def look(side: Side) -> None:
        inside.append(side)
        assert "checkpoint" not in inside or len(inside) == 1
        assert barrier.holds_section()

    async def child(hold: int) -> None:
        try:
            async with barrier.mutation(arrival()):
                look("mutation")
                try:
                    await anyio.sleep(hold)
                finally:
                    inside.remove("mutation")
        except BarrierMisuse:
            raise AssertionError("a child of a mutation may always mutate") from None

    async def visit(number: int, what: Visit) -> None:
        await anyio.sleep(what.arrive_at)
        label = arrival()
        section = (
            barrier.mutation(label)
            if what.side == "mutation"
            else barrier.checkpoint(label, deadline_s=what.deadline_s)
        )
        async with section:
            overtaken = [
                waiter
                for waiter in barrier.statistics().waiters
                if int(waiter.label) < int(label) and "checkpoint" in (waiter.side, what.side)
            ]
            assert not overtaken
            look(what.side)
            try:
                if what.nested and what.side == "mutation":
                    tg.start_soon(child, what.hold + 1)
                    async with barrier.mutation(arrival()):
                        look("mutation")
                        inside.remove("mutation")
                await anyio.sleep(what.hold)
            finally:
                inside.remove(what.side)
        unfinished.remove(number)

    async def run_visit(number: int, what: Visit) -> None:
        task = current_asyncio_task()
        try:
            with anyio.CancelScope() as scope, contextlib.suppress(BarrierTimeout):
                if what.give_up_at is not None:
                    give_up = task.cancel if task and what.natively else scope.cancel
                    timers.start_soon(call_at, what.give_up_at, give_up)
                await visit(number, what)
        except asyncio.CancelledError:
            if not what.natively:
                raise

    async def call_at(at: int, call: Callable[[], object]) -> None:
        await anyio.sleep(at)
        call()

    with anyio.fail_after(1_000):
        async with anyio.create_task_group() as timers, anyio.create_task_group() as tg:
            for number, what in enumerate(schedule):
                tg.start_soon(run_visit, number, what)
    assert all(
        schedule[number].give_up_at is not None or schedule[number].deadline_s is not None
        for number in unfinished
    )
    assert inside == []
    assert barrier.statistics() == FREE
    barrier.checkpoint_nowait().leave()
    barrier.mutation_nowait().leave()


def current_asyncio_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(batch=st.lists(schedules, min_size=25, max_size=25))
@settings(max_examples=200, deadline=None)
def test_any_schedule_ends_with_an_empty_barrier(backend: str, batch: list[list[Visit]]) -> None:
    """Enter, hold, nest, time out, cancel by scope and natively, leave: in any order.

    25 schedules an example, 200 examples, two backends: 10,000 schedules.
    """

    async def main() -> None:
        for schedule in batch:
            await run_schedule(schedule)

    options: dict[str, Any] = (
        {"loop_factory": VirtualClockLoop}
        if backend == "asyncio"
        else {"clock": MockClock(autojump_threshold=0)}
    )
    anyio.run(main, backend=backend, backend_options=options)
