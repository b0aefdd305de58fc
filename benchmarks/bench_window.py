"""How long does a checkpoint keep commits out, and does a save ever block the event loop?

- hold: how long the window holds the barrier alone, against the data plane's own part of that,
  for rows of 10, 100 and 500 MB; and how long commits that came meanwhile waited for it. In
  memory on each backend; over TransferQueue, where Ray and TransferQueue are installed, on
  asyncio.
- block: the longest stretch in which a ticker that wakes every millisecond could not run, during
  a whole save of 10,000 groups of 8 rows: cut, comparison of ids, and the bundle's files.

All of it through the controller's own window and finaliser. Targets are for a quiet machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

from benchmarks.bench_controller import InstantPlane, InstantWorld
from benchmarks.measure import Ratio, Taken, Target, arguments, backends, installed, report, run
from sc_core import (
    LOCAL,
    CheckpointBarrier,
    ControllerConfig,
    DataPlane,
    PulledPrompt,
    Stamp,
    build_sampler,
    in_thread,
)
from sc_core.bundle import BundleStore
from sc_core.finaliser import BundleFinaliser
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.records import Cut, SampleId
from sc_core.rows import Rows
from sc_core.state import RunState
from sc_core.testing import MemoryDataPlane, MemoryEventLog, MemoryStore
from sc_core.window import CheckpointWindow

SIBLINGS = 8
ROW_BYTES = 12_500
TICK_S = 0.001
COMMIT_EVERY_S = 0.002


class IdsPlane(InstantPlane):
    """Rows without content, whose snapshot is a directory."""

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        LOCAL.make_dir(directory)


class Saving:
    """A run's window and what it needs, with `groups` committed groups."""

    def __init__(self, plane: DataPlane, directory: Path, groups: int) -> None:
        config = ControllerConfig()
        sampler = build_sampler(config.async_rl.sampler, config.grpo.num_prompts_per_step)
        events = MemoryEventLog()
        ledger = Ledger(prompts_per_step=8)
        self.state = RunState(ledger, Places(groups + 1), sampler, events)
        self.barrier = CheckpointBarrier()
        self.plane = plane
        for ordinal in range(groups):
            self.state.pulled(PulledPrompt({"prompt": f"{ordinal}+1=", "answer": "1"}, ordinal))
            self.state.dispatched(ordinal, Stamp())
            self.state.committed(ordinal, rewards=[1.0] * SIBLINGS, tokens=8, end_weight_version=0)
        self._ids = [row for group in ledger.index.groups() for row in group.sample_ids]
        store = BundleStore(directory)
        store.open()
        self.close = store.close
        world = InstantWorld()
        self.finaliser = BundleFinaliser(
            self.state, store, world, events, config, {}, in_thread, frozenset()
        )

        def take_cut() -> tuple[Cut, tuple[int, int]]:
            cut = ledger.cut(
                incarnation="bench",
                event_seq=events.seq,
                group_size=SIBLINGS,
                sampler=sampler.name,
                sampler_state=sampler.state(),
                source_fingerprint="",
                suspects=(),
            )
            return cut, (ledger.index.digest, ledger.digest)

        self.window = CheckpointWindow(
            self.barrier,
            plane,
            world,
            store,
            self.finaliser,
            config.async_rl.deadlines,
            in_thread,
            take_cut,
            self.state.spans,
        )
        self.rows = Rows(plane, self.barrier, config.async_rl.deadlines)

    def batches(self) -> list[list[SampleId]]:
        """The rows of all groups, so many at a time as one call should move."""
        return [self._ids[at : at + 800] for at in range(0, len(self._ids), 800)]

    async def save(self) -> Mapping[str, float]:
        """One save, to the published bundle; what the window says of its times, in seconds."""
        await self.window.save(0, {}, ft_only=False)
        await self.finaliser.settled()
        return self.window.timings


@asynccontextmanager
async def saving(plane: DataPlane, groups: int) -> AsyncIterator[Saving]:
    with tempfile.TemporaryDirectory() as scratch:
        one = Saving(plane, Path(scratch) / "checkpoints", groups)
        async with anyio.create_task_group() as tg:
            tg.start_soon(one.finaliser.run)
            yield one
            tg.cancel_scope.cancel()
        one.close()


# hold ------------------------------------------------------------------------------------


async def held(one: Saving) -> tuple[float, float, list[float]]:
    """Seconds of exclusive hold, of the data plane's own save, and of each commit's wait."""
    waits_s: list[float] = []

    async def commit() -> None:
        asked = perf_counter()
        async with one.barrier.mutation("commit"):
            waits_s.append(perf_counter() - asked)

    async with anyio.create_task_group() as commits:

        async def keep_coming() -> None:
            while True:
                commits.start_soon(commit)
                await anyio.sleep(COMMIT_EVERY_S)

        async with anyio.create_task_group() as tg:
            tg.start_soon(keep_coming)
            await one.window.save(0, {}, ft_only=False)
            tg.cancel_scope.cancel()
    timings = one.window.timings
    await one.finaliser.settled()
    return timings["exclusive_hold_seconds"], timings["tq_save_seconds"], waits_s


def names(where: str, megabytes: int) -> list[str]:
    what = f"{where}, {megabytes} MB"
    return [
        f"{what}: exclusive hold",
        f"{what}: the data plane's save",
        f"{what}: wait of a commit, p50",
        f"{what}: wait of a commit, p99",
    ]


async def holds(
    where: str,
    plane: DataPlane,
    value: Callable[[int], Any],
    megabytes: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Fill the plane, save so often, and empty it again."""
    groups = megabytes * 1_000_000 // (ROW_BYTES * SIBLINGS)
    samples: dict[str, list[float]] = {name: [] for name in names(where, megabytes)}
    async with saving(plane, groups) as one:
        for rows in one.batches():
            await plane.put_samples(rows, {"x": [value(ROW_BYTES) for _ in rows]})
        for _ in range(rounds):
            hold_s, save_s, waits_s = await held(one)
            cuts = statistics.quantiles(waits_s, n=100, method="inclusive")
            for name, taken in zip(samples, (hold_s, save_s, cuts[49], cuts[98]), strict=True):
                samples[name].append(taken)
        for rows in one.batches():
            await plane.clear_samples(rows)
    return samples


async def in_memory(megabytes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for size in megabytes:
        plane = MemoryDataPlane(MemoryStore())
        samples |= await holds("in memory", plane, bytes, size, rounds)
    return samples


async def over_transfer_queue(
    connect: Callable[[], Any], megabytes: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    import torch

    samples: dict[str, list[float]] = {}
    plane = await in_thread(connect)
    try:
        for size in megabytes:
            samples |= await holds(
                "TransferQueue",
                plane,
                lambda count: torch.ones(count, dtype=torch.uint8),
                size,
                rounds,
            )
    finally:
        await plane.aclose()
    return samples


def with_transfer_queue(megabytes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """The same over a Ray and a TransferQueue of our own."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    import ray

    from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec

    with ExitStack() as on_exit:
        on_exit.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 << 20,
        )
        spec = TransferQueueSpec()
        on_exit.enter_context(TransferQueueBootstrap(spec))
        return run("asyncio", partial(over_transfer_queue, spec.connect, megabytes, rounds))


# block -----------------------------------------------------------------------------------


async def blocked(one: Saving) -> float:
    """The longest stretch of a save, in seconds, in which nothing else could run."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            asked = perf_counter()
            await anyio.sleep(TICK_S)
            longest = max(longest, perf_counter() - asked - TICK_S)

    async with anyio.create_task_group() as tg:
        tg.start_soon(tick)
        await anyio.sleep(10 * TICK_S)
        longest = 0.0
        await one.save()
        tg.cancel_scope.cancel()
    return longest


async def blocks(groups: int, rounds: int) -> dict[str, list[float]]:
    plane = IdsPlane()
    async with saving(plane, groups) as one:
        for rows in one.batches():
            await plane.put_samples(rows, {})
        stretches = [await blocked(one) for _ in range(rounds)]
    return {BLOCK: stretches, MILLISECOND: [0.001] * rounds}


BLOCK = "longest stretch of a save in which the loop stood still"
MILLISECOND = "one millisecond"
MEMORY, QUEUE = (names(where, 100) for where in ("in memory", "TransferQueue"))
QUEUE_500 = names("TransferQueue", 500)
RATIOS = {
    "exclusive_hold_over_save": Ratio(QUEUE[0], QUEUE[1], {"asyncio": Target(at_most=1.15)}),
    "exclusive_hold_over_save_500mb": Ratio(
        QUEUE_500[0], QUEUE_500[1], {"asyncio": Target(at_most=1.15)}
    ),
    "exclusive_hold_over_save_in_memory": Ratio(MEMORY[0], MEMORY[1], {}),
    "save_blocks_loop_ms": Ratio(
        BLOCK, MILLISECOND, dict.fromkeys(("asyncio", "uvloop", "trio"), Target(at_most=20))
    ),
}


async def measure(quick: bool) -> dict[str, list[float]]:
    samples = await blocks(10_000, 3 if quick else 9)
    return samples | await in_memory((10,) if quick else (10, 100, 500), 3)


def main() -> None:
    asked = arguments(__doc__)
    taken: Taken = {name: run(name, partial(measure, asked.quick)) for name in backends()}
    if not asked.quick and installed("ray", "transfer_queue", "torch"):
        taken["asyncio"] |= with_transfer_queue((10, 100, 500), 5)
    report(taken, RATIOS, asked.json, unit="ms")


if __name__ == "__main__":
    main()
