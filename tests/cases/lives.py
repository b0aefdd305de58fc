"""Runs in memory whose source, trainer and first life can be held at an exact point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import EndOfPrompts
from sc_core.events import Event
from sc_core.records import Cut, Prompt, PulledPrompt
from sc_core.testing import MemoryRun
from sc_core.verify import verify
from sc_core.watched import Watched

GATED = ("in_order", "weight_fifo", "ready_first")
ALL = (*GATED, "windowed")


def settings(
    sampler: str = "in_order", *, p: int, k: int, g: int = 2, steps: int = 1000, **sections: Any
) -> ControllerConfig:
    """P groups per step, G siblings, and a bound K of whichever kind the sampler has."""
    data: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": p,
            "num_generations_per_prompt": g,
            "max_num_steps": steps,
        },
        "async_rl": {
            "sampler": {
                "name": sampler,
                "max_staleness_versions": k,
                "max_lookahead_versions": k,
            }
        },
        "rollout_recovery": {},
        "checkpointing": {"save_period": 1000},
    }
    for section, values in sections.items():
        data[section] |= values
    return decode(data, ControllerConfig)


def about_one_second(prompt: Prompt, sibling: int) -> float:
    """Later prompts finish later, so that ready_first has one order."""
    return 1 + prompt.ordinal / 10_000


class Lives(MemoryRun):
    """A `MemoryRun` that crashes in its first life as soon as a bundle is published.

    In that life the source gives `pulls` prompts and then hangs, and a save waits 5 virtual
    seconds before its cut: what was pulled is committed by then, and nothing else. In each
    life a step takes `step_s` seconds.
    """

    def __init__(
        self,
        config: ControllerConfig,
        prompts: Sequence[Any],
        *,
        pulls: int | None = None,
        step_s: float = 0.0,
        **options: Any,
    ) -> None:
        self.pulls = Watched(pulls)  #: how many prompts the first life may have; None: all
        self.step_s = step_s
        options.setdefault("latency", about_one_second)
        super().__init__(config, prompts, **options)

    def start_life(self) -> None:
        super().start_life()
        begin_step, save = self.trainer.begin_step, self.trainer.save
        next_prompt, first = self.source.next_prompt, self.lives == 1

        async def begin_slowly(step: int) -> None:
            await begin_step(step)
            await anyio.sleep(self.step_s)

        async def save_slowly(directory: Any) -> None:
            await save(directory)
            await anyio.sleep(5)

        async def next_of_so_many() -> PulledPrompt:
            pulled = self.source.pulled
            if first:
                await self.pulls.wait_until(lambda most: most is None or len(pulled) < most)
            return await next_prompt()

        self.trainer.begin_step = begin_slowly  # type: ignore[method-assign]
        self.source.next_prompt = next_of_so_many  # type: ignore[method-assign]
        if first:
            self.trainer.save = save_slowly  # type: ignore[method-assign]

    async def until_saved(self) -> Cut:
        """The first life, killed when its first bundle is there; the cut of that bundle."""
        assert await self.run(crash_when=lambda event: event.event == "checkpoint") is None
        (step,) = self.bundles()
        return verify(self.directory / f"step_{step}", self.disk).cut


def effective(run: MemoryRun) -> list[Event]:
    """The events that count, once the law was found to hold in them."""
    report = audit(run.log.events)
    assert report.ok, report.violations
    last = {life.incarnation: life.last_seq for life in report.history}
    return [event for event in run.log.events if event.seq <= last.get(event.incarnation, -1)]


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event.event == kind]


def trained(run: MemoryRun) -> dict[int, list[int]]:
    """Ordinals by step, over the effective history; C1 to C3 hold."""
    assert run.controller is not None
    run.controller.audit()
    stats = run.controller.statistics()
    assert stats.places_held <= stats.places_capacity
    assert (stats.barrier.mutations, stats.barrier.checkpointing) == (0, False)
    steps: dict[int, list[int]] = {}
    for event in of_kind(effective(run), "trained"):
        assert event.step is not None and event.ordinal is not None
        steps.setdefault(event.step, []).append(event.ordinal)
    everything = [ordinal for step in steps.values() for ordinal in step]
    assert len(set(everything)) == len(everything)
    return steps


def last_life(run: MemoryRun) -> list[Event]:
    return [event for event in run.log.events if event.incarnation == run.log.incarnation]


def states(cut: Cut) -> Mapping[str, list[int]]:
    """Ordinals by state."""
    found: dict[str, list[int]] = {}
    for record in cut.records:
        found.setdefault(record.state, []).append(record.ordinal)
    return found


class BatchLoader:
    """A loader that reads batches and hands out their prompts one by one.

    A position says how many prompts were handed out, so a resume reads a batch again and goes
    on inside it.
    """

    def __init__(self, prompts: Sequence[Any], batch: int) -> None:
        self._prompts, self._batch = prompts, batch
        self._given = 0
        self.read = 0  #: prompts in the batches read so far

    async def next_prompt(self) -> PulledPrompt:
        await anyio.lowlevel.checkpoint()
        if self._given == len(self._prompts):
            raise EndOfPrompts("the loader is at its end")
        self.read = (self._given // self._batch + 1) * self._batch
        self._given += 1
        return PulledPrompt(self._prompts[self._given - 1], {"given": self._given})

    async def seek(self, position: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self._given = 0 if position is None else position["given"]

    def fingerprint(self) -> str:
        return f"{len(self._prompts)} in batches of {self._batch}"
