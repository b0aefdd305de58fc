"""What does the checkpoint barrier cost, and what would something else cost instead?

- enter + exit: an uncontended section, against an empty async context manager built anew for each
  use and against other readers-writer locks.
- hand-off: the last mutation leaves, and the checkpoint that waited runs; against a bare Event.
- reopen: a checkpoint leaves, and 1,000 parked mutations have run; against a bare Event that wakes
  1,000.

Targets are for a quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from benchmarks.measure import (
    Ratio,
    Target,
    arguments,
    backends,
    installed,
    interleaved,
    report,
    run,
)
from sc_core.barrier import CheckpointBarrier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Loop = Callable[[int], Awaitable[None]]

NOOP = "empty async context manager"
MUTATION = "mutation, enter + exit"
NESTED = "mutation in a mutation, enter + exit"
CHECKPOINT = "checkpoint, enter + exit"
CONDITION = "Condition barrier, enter + exit"
AIORWLOCK = "aiorwlock fast reader, enter + exit"
TRICYCLE = "tricycle RWLock reader, enter + exit"
EVENT = "bare Event, set to waiter runs"
HANDOFF = "mutation leaves to checkpoint runs"
BROADCAST = "bare Event wakes 1,000, each"
REOPEN = "checkpoint leaves, 1,000 mutations run, each"
CONDITION_REOPEN = "Condition barrier reopens for 1,000, each"

PARKED = 1_000

ON_ASYNCIO = ["asyncio", "uvloop"]
EVERYWHERE = [*ON_ASYNCIO, "trio"]

RATIOS = {
    "mutation_over_noop": Ratio(MUTATION, NOOP, dict.fromkeys(EVERYWHERE, Target(at_most=3.0))),
    "condition_over_mutation": Ratio(
        CONDITION, MUTATION, dict.fromkeys(ON_ASYNCIO, Target(at_least=4.0))
    ),
    "aiorwlock_fast_over_mutation": Ratio(
        AIORWLOCK, MUTATION, dict.fromkeys(ON_ASYNCIO, Target(at_least=2.0))
    ),
    "tricycle_over_mutation": Ratio(TRICYCLE, MUTATION, {"trio": Target(at_least=7.0)}),
    "handoff_over_event": Ratio(HANDOFF, EVENT, dict.fromkeys(EVERYWHERE, Target(at_most=1.8))),
    "reopen_over_broadcast": Ratio(
        REOPEN,
        BROADCAST,
        dict.fromkeys(EVERYWHERE, Target(at_most=1.6)) | {"uvloop": Target(at_most=2.2)},
    ),
}


# enter + exit --------------------------------------------------------------------------


class Noop:
    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exc: object) -> None:
        pass


class ConditionBarrier:
    """The barrier as one would write it with `asyncio.Condition`: no labels, no nesting."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._mutations = 0
        self._checkpointing = False
        self._checkpoints_waiting = 0

    @contextlib.asynccontextmanager
    async def mutation(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not (self._checkpointing or self._checkpoints_waiting)
            )
            self._mutations += 1
        try:
            yield
        finally:
            async with self._changed:
                self._mutations -= 1
                if not self._mutations:
                    self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def checkpoint(self) -> AsyncIterator[None]:
        async with self._changed:
            self._checkpoints_waiting += 1
            try:
                await self._changed.wait_for(lambda: not (self._checkpointing or self._mutations))
                self._checkpointing = True
            finally:
                self._checkpoints_waiting -= 1
        try:
            yield
        finally:
            async with self._changed:
                self._checkpointing = False
                self._changed.notify_all()


# Each loop is written out, so that no contestant pays for a call that another doesn't.


async def noop(times: int) -> None:
    for _ in range(times):
        async with Noop():
            pass


async def mutation(times: int) -> None:
    barrier = CheckpointBarrier()
    for _ in range(times):
        async with barrier.mutation("commit"):
            pass


async def nested(times: int) -> None:
    barrier = CheckpointBarrier()
    async with barrier.mutation("commit"):
        for _ in range(times):
            async with barrier.mutation("clear"):
                pass


async def checkpoint(times: int) -> None:
    barrier = CheckpointBarrier()
    for _ in range(times):
        async with barrier.checkpoint("save"):
            pass


async def condition(times: int) -> None:
    barrier = ConditionBarrier()
    for _ in range(times):
        async with barrier.mutation():
            pass


async def aiorwlock_fast(times: int) -> None:
    import aiorwlock

    lock = aiorwlock.RWLock(fast=True)
    for _ in range(times):
        async with lock.reader:
            pass


async def tricycle_reader(times: int) -> None:
    import tricycle

    lock = tricycle.RWLock()
    for _ in range(times):
        async with lock.read_locked():
            pass


async def seconds_each(loop: Loop, times: int) -> float:
    began = perf_counter()
    await loop(times)
    return (perf_counter() - began) / times


# waking up -----------------------------------------------------------------------------


async def handoff(times: int) -> float:
    """Seconds from the end of the mutation's body to the start of the checkpoint's."""
    barrier, took, left = CheckpointBarrier(), [], 0.0

    async def save() -> None:
        async with barrier.checkpoint("save"):
            took.append(perf_counter() - left)

    for _ in range(times):
        async with anyio.create_task_group() as tg:
            tg.start_soon(save)
            async with barrier.mutation("commit"):
                while not barrier.statistics().waiting:
                    await anyio.lowlevel.checkpoint()
                left = perf_counter()
    return median(took)


async def event_wake(times: int) -> float:
    """Seconds from `Event.set` to the waiter's next line."""
    took, told = [], 0.0

    async def wait(news: anyio.Event) -> None:
        await news.wait()
        took.append(perf_counter() - told)

    for _ in range(times):
        news = anyio.Event()
        async with anyio.create_task_group() as tg:
            tg.start_soon(wait, news)
            while not news.statistics().tasks_waiting:
                await anyio.lowlevel.checkpoint()
            told = perf_counter()
            news.set()
    return median(took)


async def reopen(barrier: CheckpointBarrier | ConditionBarrier) -> float:
    """Seconds per mutation from the end of the checkpoint's body to that of the last mutation."""
    arrived, last = 0, 0.0

    async def commit() -> None:
        nonlocal arrived, last
        arrived += 1
        async with barrier.mutation():
            last = perf_counter()

    async with anyio.create_task_group() as tg:
        for _ in range(PARKED):
            tg.start_soon(commit)
        async with barrier.checkpoint():
            while arrived < PARKED:
                await anyio.lowlevel.checkpoint()
            left = perf_counter()
    return (last - left) / PARKED


async def broadcast() -> float:
    """Seconds per waiter from `Event.set` to the last waiter's next line."""
    news, arrived, last = anyio.Event(), 0, 0.0

    async def wait() -> None:
        nonlocal arrived, last
        arrived += 1
        await news.wait()
        last = perf_counter()

    async with anyio.create_task_group() as tg:
        for _ in range(PARKED):
            tg.start_soon(wait)
        while arrived < PARKED:
            await anyio.lowlevel.checkpoint()
        told = perf_counter()
        news.set()
    return (last - told) / PARKED


# the whole table -----------------------------------------------------------------------


async def measure(backend: str, quick: bool) -> dict[str, list[float]]:
    # Rounds so short that a busy machine interrupts few of them: the median passes those over.
    times, rounds = (200, 21) if quick else (200, 301)
    loops: dict[str, Loop] = {
        NOOP: noop,
        MUTATION: mutation,
        NESTED: nested,
        CHECKPOINT: checkpoint,
    }
    wakes: dict[str, Callable[[], Awaitable[float]]] = {
        EVENT: partial(event_wake, 50),
        HANDOFF: partial(handoff, 50),
        BROADCAST: broadcast,
        REOPEN: lambda: reopen(CheckpointBarrier()),
    }
    if backend == "trio":
        if installed("tricycle"):
            loops[TRICYCLE] = tricycle_reader
    else:
        loops[CONDITION] = condition
        wakes[CONDITION_REOPEN] = lambda: reopen(ConditionBarrier())
        if installed("aiorwlock"):
            loops[AIORWLOCK] = aiorwlock_fast
    timed = {name: partial(seconds_each, loop, times) for name, loop in loops.items()}
    return await interleaved(timed, rounds) | await interleaved(wakes, max(9, rounds // 15))


def main() -> None:
    asked = arguments(__doc__)
    taken = {name: run(name, partial(measure, name, asked.quick)) for name in backends()}
    report(taken, RATIOS, asked.json)


if __name__ == "__main__":
    main()
