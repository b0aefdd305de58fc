"""What does the controller itself cost, when everything around it is instant?

- per group: CPU from admission to trained, events on, against the bare task structure that a
  group needs: a task group, sibling tasks with a deadline each, and two shielded port calls.
- wake: from a commit to the train pump having selected the group, against a pump that looks
  every 5 ms through parallel lists.
- growth: CPU per group, and memory kept, of a long run against a short one (asyncio, G = 1).

Targets are for a quiet machine.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import anyio
import anyio.lowlevel

from benchmarks.measure import Ratio, Target, arguments, backends, interleaved, report, run
from sc_core import (
    Batch,
    Columns,
    ControllerConfig,
    DataPlane,
    EstimatorScope,
    JsonlEventLog,
    Ports,
    Prompt,
    PulledPrompt,
    ReadyStore,
    Sample,
    SingleController,
    decode,
    inline,
    restore,
)
from sc_core.bundle import BundleStore
from sc_core.testing import MemoryBootstrap, MemoryMetrics, MemoryStore

GROUPS_PER_STEP = 64
POLL_S = 0.005


class InstantPlane:
    """A data plane that remembers ids and nothing else."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    async def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.ids.update(sample_ids)

    async def get_samples(
        self, sample_ids: Sequence[str], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        return {name: [0.0] * len(sample_ids) for name in select_fields}

    async def clear_samples(self, sample_ids: Sequence[str]) -> None:
        self.ids.difference_update(sample_ids)

    async def list_sample_ids(self) -> frozenset[str]:
        return frozenset(self.ids)

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None: ...

    async def aclose(self) -> None: ...


class InstantWorld:
    """Source, worker, trainer, weight sync and estimator, all of them instant."""

    select_fields = ("reward",)
    scope: EstimatorScope = "group"
    heavy = False

    def __init__(self) -> None:
        self._pulled = 0
        self._sample = Sample(fields={"reward": 1.0}, reward=1.0, tokens=1)

    async def next_prompt(self) -> PulledPrompt:
        self._pulled += 1
        return PulledPrompt(self._pulled, self._pulled)

    async def seek(self, position: Any) -> None: ...

    def fingerprint(self) -> str:
        return ""

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        return self._sample

    async def prepare(self, batch: Batch) -> None: ...

    async def begin_step(self, step: int) -> None: ...

    async def train_microbatches(self, batch: Batch) -> None: ...

    async def finish_step(self) -> Mapping[str, float]:
        return {}

    async def abandon_step(self) -> None: ...

    async def save(self, directory: Path) -> None:
        (directory / "weights").touch()

    async def finalize_save(self) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def pause(self) -> None: ...

    async def transfer(self, version: int) -> Mapping[str, int]:
        return {"engine": version}

    async def resume(self) -> None: ...

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        return {"advantage": list(columns["reward"])}


async def run_controller(
    groups: int,
    siblings: int,
    events: Any,
    *,
    per_step: int = GROUPS_PER_STEP,
    sampler: Mapping[str, Any] = {"name": "windowed", "max_staleness_versions": 1},
    world: InstantWorld | None = None,
) -> None:
    config = decode(
        {
            "grpo": {
                "num_prompts_per_step": per_step,
                "num_generations_per_prompt": siblings,
                "max_num_steps": groups // per_step,
            },
            "async_rl": {"sampler": sampler},
        },
        ControllerConfig,
    )
    with tempfile.TemporaryDirectory() as scratch:
        bootstrap = MemoryBootstrap(MemoryStore())
        ready = await restore(BundleStore(Path(scratch)), bootstrap, config, runner=inline)

    async def connect(token: ReadyStore) -> DataPlane:
        return InstantPlane()

    world = world or InstantWorld()
    ports = Ports(
        connect=connect,
        source=world,
        worker=world,
        trainer=world,
        weight_sync=world,
        estimator=world,
        events=events,
        metrics=MemoryMetrics(),
    )
    result = await SingleController(config, ready, ports, runner=inline).run()
    assert result.counters["trained"] == groups


# per group -------------------------------------------------------------------------------


async def controlled(groups: int, siblings: int) -> float:
    """CPU seconds per group of a whole run, events written to a file."""
    with tempfile.TemporaryDirectory() as scratch:
        events = JsonlEventLog(Path(scratch) / "events.jsonl")
        started = process_time()
        await run_controller(groups, siblings, events)
        taken = process_time() - started
        events.close()
    return taken / groups


async def bare(groups: int, siblings: int) -> float:
    """CPU seconds per group of the tasks alone."""
    world, plane = InstantWorld(), InstantPlane()
    prompt = Prompt(ordinal=0, group_id="0.0", payload=None)  # type: ignore[arg-type]

    async def sibling(number: int) -> None:
        with anyio.fail_after(600):
            await world.rollout(prompt, number, 0)

    async def group(ids: list[str]) -> None:
        async with anyio.create_task_group() as tg:
            for number in range(siblings):
                tg.start_soon(sibling, number)
        with anyio.fail_after(60, shield=True):
            await plane.put_samples(ids, {})
        with anyio.fail_after(60, shield=True):
            await plane.clear_samples(ids)

    started = process_time()
    for first in range(0, groups, GROUPS_PER_STEP):
        async with anyio.create_task_group() as tg:
            for number in range(first, first + GROUPS_PER_STEP):
                tg.start_soon(group, [f"{number}_g{i}" for i in range(siblings)])
    return (process_time() - started) / groups


# wake ------------------------------------------------------------------------------------


class _Instants:
    """An event sink that notes how long each commit waited to be selected."""

    incarnation = "bench"

    def __init__(self) -> None:
        self.seq = 0
        self.waits_s: list[float] = []
        self._committed: dict[int, float] = {}

    def append(self, kind: str, **fields: Any) -> int:
        return self.append_many(kind, (fields,))

    def append_many(self, kind: str, each: Sequence[Mapping[str, Any]]) -> int:
        now = perf_counter()
        for fields in each:
            if kind == "committed":
                self._committed[fields["ordinal"]] = now
            elif kind == "selected":
                self.waits_s.append(now - self._committed.pop(fields["ordinal"]))
        self.seq += len(each)
        return self.seq

    def sync(self) -> None: ...


async def woken(groups: int) -> float:
    """Median seconds from commit to selected, with a train pump that waits for each group."""
    events = _Instants()
    await run_controller(groups, 1, events, per_step=1, sampler={"name": "in_order"})
    return statistics.median(events.waits_s)


async def polled(groups: int) -> float:
    """The same with a pump that sleeps, then scans parallel lists for something ready."""
    ready: list[bool] = []
    versions: list[int] = []
    committed: list[float] = []
    waits_s: list[float] = []
    selected = anyio.Event()

    async def produce() -> None:
        nonlocal selected
        for _ in range(groups):
            selected = anyio.Event()
            ready.append(True)
            versions.append(len(versions))
            committed.append(perf_counter())
            await selected.wait()

    async with anyio.create_task_group() as tg:
        tg.start_soon(produce)
        while len(waits_s) < groups:
            chosen = [i for i, is_ready in enumerate(ready) if is_ready and versions[i] >= 0]
            if not chosen:
                await anyio.sleep(POLL_S)
                continue
            waits_s.append(perf_counter() - committed[chosen[0]])
            ready[chosen[0]] = False
            selected.set()
    return statistics.median(waits_s)


# growth ----------------------------------------------------------------------------------


class _Weighed(InstantWorld):
    """Weighs everything that is alive when the last step ends."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps_left = steps
        self.traced_bytes = 0

    async def finish_step(self) -> Mapping[str, float]:
        self._steps_left -= 1
        if not self._steps_left:
            gc.collect()
            self.traced_bytes = tracemalloc.get_traced_memory()[0]
        return {}


async def kept(groups: int) -> float:
    """Bytes that a run holds at the end of its last step, per group that it has trained."""
    world = _Weighed(groups // GROUPS_PER_STEP)
    with tempfile.TemporaryDirectory() as scratch:
        events = JsonlEventLog(Path(scratch) / "events.jsonl")
        gc.collect()
        tracemalloc.start()
        await run_controller(groups, 1, events, world=world)
        tracemalloc.stop()
        events.close()
    return world.traced_bytes / groups


KEPT = ("memory kept, short run, per group", "memory kept, long run, per group")
ON_ALL = ("asyncio", "uvloop", "trio")
RATIOS = {
    "group_over_bare_tasks": Ratio(
        "controller, G = 1, per group", "bare tasks, G = 1, per group",
        dict.fromkeys(ON_ALL, Target(at_most=2.0)),
    ),
    "group_over_bare_tasks_g8": Ratio(
        "controller, G = 8, per group", "bare tasks, G = 8, per group",
        dict.fromkeys(ON_ALL, Target(at_most=2.0)),
    ),
    "poll_over_wake": Ratio(
        "commit to selected, 5 ms polling", "commit to selected",
        dict.fromkeys(ON_ALL, Target(at_least=20)),
    ),
    "us_per_group_growth": Ratio(
        "controller, long run, per group", "controller, short run, per group",
        {"asyncio": Target(at_most=1.2)},
    ),
    "bytes_per_prompt_growth": Ratio(
        KEPT[1], KEPT[0],
        {"asyncio": Target(at_most=1.1)},
    ),
}  # fmt: skip


async def measure(backend: str, quick: bool) -> dict[str, list[float]]:
    groups, rounds = (GROUPS_PER_STEP * 4, 3) if quick else (GROUPS_PER_STEP * 16, 21)
    samples = await interleaved(
        {
            "controller, G = 1, per group": partial(controlled, groups, 1),
            "bare tasks, G = 1, per group": partial(bare, groups, 1),
            "controller, G = 8, per group": partial(controlled, groups, 8),
            "bare tasks, G = 8, per group": partial(bare, groups, 8),
            "commit to selected": partial(woken, 100),
            "commit to selected, 5 ms polling": partial(polled, 20),
        },
        rounds,
    )
    if backend == "asyncio":
        short, long = (640, 6_400) if quick else (10_048, 1_000_000)
        samples |= await interleaved(
            {
                "controller, short run, per group": partial(controlled, short, 1),
                "controller, long run, per group": partial(controlled, long, 1),
            },
            1,
        )
    return samples


async def memory(quick: bool) -> dict[str, list[float]]:
    short, long = (
        (640, 6_400) if quick else (10_048, 100_032)
    )  # weighing takes several times as long
    return {
        KEPT[0]: [await kept(short)],
        KEPT[1]: [await kept(long)],
    }


def main() -> None:
    asked = arguments(__doc__)
    taken = {name: run(name, partial(measure, name, asked.quick)) for name in backends()}
    taken["asyncio"] |= run("asyncio", partial(memory, asked.quick))
    report(taken, RATIOS, asked.json, units=dict.fromkeys(KEPT, "B"))


if __name__ == "__main__":
    main()
