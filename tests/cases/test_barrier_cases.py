"""Handed cases about the barrier and about capacity: H10 lost wake-ups, H11 races, H12 nesting."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.metadata
import random
import re
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from sc_core.barrier import CheckpointBarrier, Side
from sc_core.errors import BarrierMisuse
from sc_core.places import Places
from sc_core.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


class Cancellable:
    """A task that can be cancelled by its scope or, where the backend has that, natively."""

    def __init__(self) -> None:
        self.gone = False
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[Any] | None = None
        self._natively = False

    async def run(self) -> None:
        self._task = current_asyncio_task()
        try:
            with self._scope:
                await self.work()
        except asyncio.CancelledError:
            if not self._natively:
                raise
        finally:
            self.gone = True

    async def work(self) -> None:
        raise NotImplementedError

    def cancel(self, natively: bool = False) -> None:
        if natively and self._task is not None:
            self._natively = True
            self._task.cancel()
        else:
            self._scope.cancel()


class Visitor(Cancellable):
    """Enters a barrier and stays until told to leave."""

    def __init__(self, barrier: CheckpointBarrier, side: Side, label: str) -> None:
        super().__init__()
        self.inside = False
        self._section = section_of(barrier, side, label)
        self._told_to_leave = anyio.Event()

    async def work(self) -> None:
        async with self._section:
            self.inside = True
            try:
                await self._told_to_leave.wait()
            finally:
                self.inside = False

    def leave(self) -> None:
        self._told_to_leave.set()


def current_asyncio_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def section_of(barrier: CheckpointBarrier, side: Side, label: str) -> Any:
    return barrier.mutation(label) if side == "mutation" else barrier.checkpoint(label)


async def settle_down() -> None:
    """Let every task that can run do so until it waits again."""
    for _ in range(6):
        await checkpoint()


async def arrive(
    tg: anyio.abc.TaskGroup, barrier: CheckpointBarrier, side: Side, label: str
) -> Visitor:
    visitor = Visitor(barrier, side, label)
    tg.start_soon(visitor.run)
    await settle_down()
    return visitor


def both_sides_get_in(barrier: CheckpointBarrier) -> bool:
    barrier.mutation_nowait().leave()
    barrier.checkpoint_nowait().leave()
    return True


# H10: a waiting checkpoint that gives up wakes those behind it --------------------------


async def test_H10_mutations_behind_a_cancelled_checkpoint_enter_at_once() -> None:
    barrier, entered = CheckpointBarrier(), {}

    async def mutate(label: str, at: float, hold: float) -> None:
        await anyio.sleep(at)
        async with barrier.mutation(label):
            entered[label] = anyio.current_time() - began
            await anyio.sleep(hold)

    async def save() -> None:
        await anyio.sleep(1)
        with anyio.move_on_after(9):
            async with barrier.checkpoint():
                entered["C"] = anyio.current_time() - began

    began = anyio.current_time()
    async with anyio.create_task_group() as tg:
        tg.start_soon(mutate, "M1", 0, 100)
        tg.start_soon(save)
        tg.start_soon(mutate, "M2", 2, 1)
    assert entered == {"M1": 0, "M2": 10}
    assert both_sides_get_in(barrier)


@pytest.mark.parametrize("natively", [False, True], ids=["by scope", "natively"])
async def test_H10a_a_mutation_still_waits_for_the_second_checkpoint(natively: bool) -> None:
    barrier = CheckpointBarrier()
    async with anyio.create_task_group() as tg:
        m1 = await arrive(tg, barrier, "mutation", "M1")
        c1 = await arrive(tg, barrier, "checkpoint", "C1")
        c2 = await arrive(tg, barrier, "checkpoint", "C2")
        m2 = await arrive(tg, barrier, "mutation", "M2")
        c1.cancel(natively)
        await settle_down()
        assert c1.gone
        assert not (c2.inside or m2.inside)
        m1.leave()
        await settle_down()
        assert c2.inside
        assert not m2.inside
        c2.leave()
        await settle_down()
        assert m2.inside
        m2.leave()
    assert both_sides_get_in(barrier)


@pytest.mark.parametrize("natively", [False, True], ids=["by scope", "natively"])
@pytest.mark.parametrize("cancel_first", [True, False], ids=["cancel, leave", "leave, cancel"])
async def test_H10b_a_checkpoint_cancelled_in_the_tick_the_mutation_leaves(
    cancel_first: bool, natively: bool
) -> None:
    barrier = CheckpointBarrier()
    async with anyio.create_task_group() as tg:
        holder = contextvars.Context().run(barrier.mutation_nowait)
        c = await arrive(tg, barrier, "checkpoint", "C")
        m2 = await arrive(tg, barrier, "mutation", "M2")
        steps: list[Callable[[], None]] = [lambda: c.cancel(natively), holder.leave]
        for step in steps if cancel_first else reversed(steps):
            step()
        await settle_down()
        assert c.gone
        assert m2.inside
        m2.leave()
    assert both_sides_get_in(barrier)


async def test_H10c_a_checkpoint_whose_body_raises_opens_the_barrier() -> None:
    barrier = CheckpointBarrier()
    async with anyio.create_task_group() as tg:
        m1 = await arrive(tg, barrier, "mutation", "M1")

        async def save() -> None:
            with pytest.raises(OSError, match="disk full"):
                async with barrier.checkpoint():
                    raise OSError("disk full")

        tg.start_soon(save)
        await settle_down()
        m2 = await arrive(tg, barrier, "mutation", "M2")
        m1.leave()
        await settle_down()
        assert m2.inside
        m2.leave()
    assert both_sides_get_in(barrier)


async def test_H10d_two_hundred_queued_mutations_enter_when_the_checkpoint_gives_up() -> None:
    barrier = CheckpointBarrier()
    async with anyio.create_task_group() as tg:
        m1 = await arrive(tg, barrier, "mutation", "M1")
        c = await arrive(tg, barrier, "checkpoint", "C")
        behind = [await arrive(tg, barrier, "mutation", f"M{i}") for i in range(2, 202)]
        assert barrier.statistics().waiting == 201
        c.cancel()
        await settle_down()
        assert all(visitor.inside for visitor in behind)
        assert m1.inside
        for visitor in (m1, *behind):
            visitor.leave()
    assert both_sides_get_in(barrier)


async def test_H10_a_checkpoint_gets_in_through_an_endless_stream_of_mutations() -> None:
    barrier, saved_at = CheckpointBarrier(), []

    async def mutate() -> None:
        async with barrier.mutation():
            assert not barrier.statistics().checkpointing
            await anyio.sleep(10)

    async def stream() -> None:
        while not saved_at:
            tg.start_soon(mutate)
            await anyio.sleep(1)

    with anyio.fail_after(1_000):
        async with anyio.create_task_group() as tg:
            tg.start_soon(stream)
            await anyio.sleep(20.5)
            began = anyio.current_time()
            async with barrier.checkpoint():
                assert barrier.statistics().mutations == 0
                saved_at.append(anyio.current_time() - began)
    assert saved_at == [9.5]  # when the last one that came before it leaves


# H11: cancel meets hand-over ------------------------------------------------------------


class Gate:
    """Admission as the pumps do it: wait for a free place, then look again and take it."""

    def __init__(self, capacity: int) -> None:
        self.places = Places(capacity)
        self.changed = Watched(self.places)

    async def take(self, name: str) -> None:
        while True:
            await self.changed.wait_until(lambda places: places.free > 0)
            try:
                self.places.take(name)
            except anyio.WouldBlock:  # somebody was quicker
                continue
            return

    def release(self, name: str) -> None:
        self.places.release(name)
        self.changed.touch()

    def check_conservation(self) -> None:
        assert self.places.free + self.places.held == self.places.capacity


class Applicant(Cancellable):
    """Wants a place, and keeps it until somebody releases it."""

    def __init__(self, gate: Gate, name: str) -> None:
        super().__init__()
        self.admitted = False
        self._gate, self._name = gate, name

    async def work(self) -> None:
        await self._gate.take(self._name)
        self.admitted = True


async def apply(tg: anyio.abc.TaskGroup, gate: Gate, name: str) -> Applicant:
    applicant = Applicant(gate, name)
    tg.start_soon(applicant.run)
    await settle_down()
    return applicant


def test_H11_the_anyio_floor_is_where_the_races_are_fixed() -> None:
    """Below 4.13 (notify) and 4.14 (lock) anyio loses a wake-up when cancel and hand-over meet."""
    floors = [
        match["floor"]
        for line in importlib.metadata.requires("single-controller") or []
        if (match := re.fullmatch(r"anyio>=(?P<floor>[\d.]+)", line))
    ]
    assert floors
    for version in (floors[0], importlib.metadata.version("anyio")):
        assert tuple(int(part) for part in version.split(".")[:2]) >= (4, 14)


@pytest.mark.parametrize("natively", [False, True], ids=["H11a by scope", "H11c natively"])
async def test_H11ac_cancel_one_then_notify_admits_the_other(natively: bool) -> None:
    gate = Gate(1)
    gate.places.take("holder")
    async with anyio.create_task_group() as tg:
        a, b = await apply(tg, gate, "A"), await apply(tg, gate, "B")
        a.cancel(natively)
        gate.release("holder")
        await settle_down()
        assert (a.admitted, b.admitted) == (False, True)
    gate.check_conservation()


@pytest.mark.parametrize("natively", [False, True], ids=["by scope", "natively"])
async def test_H11b_notify_then_cancel_one_admits_exactly_one(natively: bool) -> None:
    gate = Gate(1)
    gate.places.take("holder")
    async with anyio.create_task_group() as tg:
        a, b = await apply(tg, gate, "A"), await apply(tg, gate, "B")
        gate.release("holder")
        a.cancel(natively)
        await settle_down()
        assert a.admitted != b.admitted
        b.cancel()
    gate.check_conservation()


@pytest.mark.parametrize("natively", [False, True], ids=["by scope", "natively"])
async def test_H11d_a_newcomer_gets_what_a_cancelled_waiter_was_queued_for(
    natively: bool,
) -> None:
    gate, barrier = Gate(1), CheckpointBarrier()
    gate.places.take("holder")
    async with anyio.create_task_group() as tg:
        a = await apply(tg, gate, "A")
        a.cancel(natively)
        gate.release("holder")
        newcomer = await apply(tg, gate, "newcomer")
        assert newcomer.admitted

        holder = contextvars.Context().run(barrier.checkpoint_nowait)
        queued = await arrive(tg, barrier, "checkpoint", "A")
        queued.cancel(natively)
        holder.leave()
        late = await arrive(tg, barrier, "checkpoint", "newcomer")
        assert late.inside
        late.leave()
    assert both_sides_get_in(barrier)


async def test_H11_places_are_conserved_in_any_interleaving() -> None:
    """2,500 interleavings of wait, notify, cancel and release for each backend and seed."""
    for seed in range(2_500):
        rng = random.Random(seed)
        gate = Gate(rng.choice([1, 1, 2]))
        applicants: list[Applicant] = []
        async with anyio.create_task_group() as tg:
            for number in range(rng.randint(3, 8)):
                for _ in range(rng.randint(1, 3)):  # so many in one tick
                    holders = gate.places.holders()
                    step = rng.choice(["wait", "wait", "notify", "cancel", "release"])
                    if step == "wait":
                        applicants.append(Applicant(gate, f"{number}.{len(applicants)}"))
                        tg.start_soon(applicants[-1].run)
                    elif step == "notify":
                        gate.changed.touch()
                    elif step == "cancel" and applicants:
                        rng.choice(applicants).cancel(natively=rng.random() < 0.5)
                    elif step == "release" and holders:
                        gate.release(str(rng.choice(holders)))
                    gate.check_conservation()
                for _ in range(rng.randint(0, 2)):
                    await checkpoint()
            while not all(applicant.gone for applicant in applicants):
                await settle_down()
                for name in gate.places.holders():
                    gate.release(str(name))
        for name in gate.places.holders():
            gate.release(str(name))
        assert gate.changed.statistics().waiting == 0, f"seed {seed}"
        assert gate.places.free == gate.places.capacity, f"seed {seed}"


class Model:
    """The barrier's rules, without tasks: who is inside, and who queues, in order."""

    def __init__(self) -> None:
        self.inside: list[tuple[Side, str]] = []
        self.queue: list[tuple[Side, str]] = []

    def arrive(self, side: Side, label: str) -> None:
        self.queue.append((side, label))
        self.admit()

    def leave(self, label: str) -> None:
        self.inside = [each for each in self.inside if each[1] != label]
        self.queue = [each for each in self.queue if each[1] != label]
        self.admit()

    def admit(self) -> None:
        while self.queue and (
            not self.inside or self.queue[0][0] == self.inside[0][0] == "mutation"
        ):
            self.inside.append(self.queue.pop(0))


async def test_H11_the_barrier_follows_its_model_in_any_interleaving() -> None:
    """300 interleavings of arrive, leave and cancel for each backend and seed."""
    for seed in range(300):
        rng = random.Random(seed)
        barrier, model = CheckpointBarrier(), Model()
        visitors: dict[str, Visitor] = {}
        async with anyio.create_task_group() as tg:
            for number in range(rng.randint(4, 14)):
                side: Side = rng.choice(["mutation", "mutation", "checkpoint"])
                label = str(number)
                visitors[label] = await arrive(tg, barrier, side, label)
                model.arrive(side, label)
                for _ in range(rng.randint(0, 3)):  # so many in one tick
                    label, visitor = rng.choice(list(visitors.items()))
                    if visitor.gone:
                        continue
                    if visitor.inside and rng.random() < 0.5:
                        visitor.leave()
                    else:
                        visitor.cancel(natively=rng.random() < 0.5)
                    model.leave(label)
                await settle_down()
                now = barrier.statistics()
                where = f"seed {seed}, arrival {number}"
                inside = {(each.side, each.label) for each in now.holders}
                assert inside == set(model.inside), where
                assert [(each.side, each.label) for each in now.waiters] == model.queue, where
                assert all(visitors[each.label].inside for each in now.holders), where
            tg.cancel_scope.cancel()
        assert both_sides_get_in(barrier)


# H12: sections inside sections ----------------------------------------------------------


class GuardedRows:
    """A data plane that counts what is written to it outside any section."""

    def __init__(self, barrier: CheckpointBarrier, rows: set[str]) -> None:
        self.barrier, self.rows, self.unguarded_writes = barrier, rows, 0

    async def clear(self, rows: set[str]) -> None:
        self.unguarded_writes += not self.barrier.holds_section()
        await checkpoint()
        self.rows -= rows

    async def evict(self, stale: set[str]) -> None:
        """Opens its own section, whoever calls it."""
        async with self.barrier.mutation("evict"), anyio.create_task_group() as tg:
            for row in stale:
                tg.start_soon(self.clear, {row})


@pytest.mark.parametrize("pending", [False, True], ids=["H12a alone", "H12b checkpoint pending"])
async def test_H12ab_an_eviction_inside_the_callers_section_succeeds(pending: bool) -> None:
    barrier = CheckpointBarrier()
    plane = GuardedRows(barrier, {"stale 1", "stale 2", "fresh"})
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tg:
            holding, seen = anyio.Event(), []

            async def save() -> None:
                await holding.wait()
                async with barrier.checkpoint():
                    seen.append(set(plane.rows))

            if pending:
                tg.start_soon(save)
            async with barrier.mutation("train pump"):
                holding.set()
                await settle_down()
                assert barrier.statistics().waiting == pending
                await plane.evict({"stale 1", "stale 2"})
                assert plane.rows == {"fresh"}
    assert seen == ([{"fresh"}] if pending else [])
    assert plane.unguarded_writes == 0
    assert both_sides_get_in(barrier)


async def test_H12_a_write_outside_any_section_is_counted() -> None:
    barrier = CheckpointBarrier()
    plane = GuardedRows(barrier, {"a", "b", "c"})
    go, counted = anyio.Event(), []

    async def late(row: str) -> None:
        await go.wait()
        await plane.clear({row})
        counted.append(plane.unguarded_writes)

    async with anyio.create_task_group() as tg:
        async with barrier.mutation():
            await plane.clear({"a"})
            tg.start_soon(late, "b")  # will write when the section is over
        assert plane.unguarded_writes == 0
        go.set()
    await plane.clear({"c"})
    assert (counted, plane.unguarded_writes) == ([1], 2)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("mutation", "checkpoint"), ("checkpoint", "mutation"), ("checkpoint", "checkpoint")],
)
async def test_H12_illegal_nesting_is_refused_and_leaves_the_barrier_usable(
    outer: Side, inner: Side
) -> None:
    barrier = CheckpointBarrier(clock=lambda: 0.0)
    async with section_of(barrier, outer, "outer"):
        before = barrier.statistics()
        with pytest.raises(BarrierMisuse, match=f"{inner} 'inner' can't be entered inside"):
            async with section_of(barrier, inner, "inner"):
                pass
        assert barrier.statistics() == before
    assert both_sides_get_in(barrier)
