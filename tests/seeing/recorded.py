"""Runs in memory, with sleeps, whose files are real: what a report and a trace are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
from virtual_clock import VirtualClockLoop

from sc_core.config import ControllerConfig, decode
from sc_core.controller import ControllerStatistics, RunResult
from sc_core.errors import DataFailure
from sc_core.events import Event, JsonlMetrics
from sc_core.records import Prompt
from sc_core.spans import JsonlSpans
from sc_core.testing import MemoryDataPlane, MemoryEngines, MemoryEventLog, MemoryRun, MemoryTrainer

HOSTILE = "</script><script>document.title = 'hacked'</script><img src=x onerror=alert(1)>"
EPOCH = 1_700_000_000.0
NIGHT_S = 30_000.0


def now() -> float:
    """Unix seconds of the loop's clock, which is virtual."""
    return EPOCH + anyio.current_time()


def settings(steps: int, *, p: int = 4, g: int = 2, **sections: Any) -> ControllerConfig:
    data: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": p,
            "num_generations_per_prompt": g,
            "max_num_steps": steps,
        },
        "async_rl": {"sampler": {"name": "windowed", "max_staleness_versions": 2}},
        "checkpointing": {"save_period": 10, "keep_top_k": None},
    }
    for section, values in sections.items():
        data.setdefault(section, {}).update(values)
    return decode(data, ControllerConfig)


class SlowTrainer(MemoryTrainer):
    """Its calls take time, as they do."""

    async def prepare(self, batch: Any) -> None:
        await anyio.sleep(0.2)
        await super().prepare(batch)

    async def train_microbatches(self, batch: Any) -> None:
        await anyio.sleep(0.5)
        await super().train_microbatches(batch)

    async def finish_step(self) -> Mapping[str, float]:
        await anyio.sleep(0.1)
        return await super().finish_step()

    async def save(self, directory: Path) -> None:
        await anyio.sleep(0.3)
        await super().save(directory)


class SlowEngines(MemoryEngines):
    async def transfer(self, version: int) -> Mapping[str, int]:
        await anyio.sleep(0.25)
        return await super().transfer(version)

    async def resume(self) -> None:
        await anyio.sleep(0.05)
        await super().resume()


class KilledSpans(JsonlSpans):
    """Writes no more once its process is dead, though it still runs on here."""

    killed = False

    def flush(self) -> None:
        if not self.killed:
            super().flush()


async def slow_store(call: str, point: str) -> None:
    """A data plane's calls take time, a snapshot most of it."""
    if point == "before":
        await anyio.sleep({"save_checkpoint": 0.8, "clear_samples": 0.05}.get(call, 0.02))


class RecordedRun(MemoryRun):
    """`live` as often as wished; then `directory` has the files of the run."""

    def __init__(self, out: Path, config: ControllerConfig, **more: Any) -> None:
        self.out = out
        more = {"latency": latency, "hooks": slow_store, **more}
        super().__init__(config, [f"prompt {i}" for i in range(10_000)], **more)
        self.log = MemoryEventLog(now=now)
        self.end: ControllerStatistics | None = None  #: of the last life
        self.rows: list[dict[str, Any]] = []
        self.sinks: list[KilledSpans] = []

    def start_life(self) -> None:
        super().start_life()
        self.trainer = SlowTrainer(MemoryDataPlane(self.store), disk=self.disk)
        self.engines = SlowEngines(
            self.trainer, engines=self.engine_count, latency=self.latency, script=self.script
        )

    def record_spans(self, incarnation: str) -> JsonlSpans:
        sink = KilledSpans(self.out / "spans.jsonl", incarnation=incarnation, now=now)
        self.sinks.append(sink)
        return sink

    async def live(
        self, crash_when: Callable[[Event], bool] | None = None, *, seed: int = 0
    ) -> RunResult | None:
        """One life; killed, it loses the spans that it had not written."""
        self.spans = self.record_spans
        killed_after: int | None = None

        def kills(event: Event) -> bool:
            nonlocal killed_after
            if killed_after is None and crash_when is not None and crash_when(event):
                self.sinks[-1].killed = True
                killed_after = len(self.metrics.steps)
            return killed_after is not None

        result = await self.run(crash_when=kills if crash_when else None, seed=seed)
        if self.controller is not None:
            self.end = self.controller.statistics()
        self.rows += self.metrics.steps[:killed_after]
        if result is not None:
            self.sinks[-1].close()
        self.write()
        return result

    def write(self) -> None:
        write_run(self.out, self.log.events, self.rows)


def write_run(out: Path, events: Sequence[Event], rows: Sequence[dict[str, Any]]) -> None:
    """The log and the metrics of a run, as the real sinks write them."""
    (out / "events.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    (out / "metrics.jsonl").unlink(missing_ok=True)
    metrics = JsonlMetrics(out / "metrics.jsonl")
    for row in rows:
        metrics.write(row)
    metrics.close()


def latency(prompt: Prompt, sibling: int) -> float:
    """Some take three times as long as others."""
    return 0.4 + 0.1 * ((prompt.ordinal * 7 + sibling * 3) % 9)


def recorded(
    out: Path, live: Callable[[RecordedRun], Awaitable[object]], **more: Any
) -> RecordedRun:
    """A run that has lived, on a virtual clock."""

    async def main() -> RecordedRun:
        run = RecordedRun(out, **more)
        await live(run)
        return run

    return anyio.run(main, backend_options={"loop_factory": VirtualClockLoop})


async def killed_twice(run: RecordedRun) -> None:
    """Some steps after a checkpoint, and in the middle of a step."""
    assert await run.live(at("trained", 77)) is None
    assert await run.live(at("selected", 134), seed=2) is None
    assert await run.live() is not None


async def gone_back(run: RecordedRun) -> None:
    """Killed twice; then, a night later, somebody wants to go back to an older bundle."""
    assert await run.live(at("trained", 25)) is None
    assert await run.live(at("trained", 28)) is None
    run.disk.remove_tree(run.directory / "step_20")
    await anyio.sleep(NIGHT_S)
    assert await run.live() is not None


async def troubled(prompt: Prompt, sibling: int, version: int) -> None:
    """Some prompts fail for good: one in 53 for its data, one in 37 for its engine."""
    if prompt.ordinal % 53 == 7:
        raise DataFailure(f"prompt {prompt.ordinal} is longer than 4096 tokens")
    if prompt.ordinal % 37 == 5:
        raise ConnectionError(HOSTILE)


def long_run(out: Path) -> RecordedRun:
    """200 steps over three lives, with windows, evaluations and drops."""
    return recorded(
        out,
        killed_twice,
        config=settings(200, p=8, g=4, grpo={"val_period": 20}),
        engines=3,
        script=troubled,
        held_out=["a", "b", "c"],
    )


def at(kind: str, step: int) -> Callable[[Event], bool]:
    """Whether an event is the first of that kind at or after a step."""
    return lambda event: event.event == kind and (event.step or 0) >= step
