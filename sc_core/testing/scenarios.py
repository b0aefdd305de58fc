"""Runs worth killing: every sampler and recovery granularity, with all that can go on at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec

from sc_core.config import ControllerConfig, decode
from sc_core.records import Prompt
from sc_core.testing.crash import Exploration, count_points, explore
from sc_core.testing.disk import MemoryDisk
from sc_core.testing.run import MemoryRun
from sc_core.testing.world import MemoryWorld

SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "in_order": {"name": "in_order", "max_lookahead_versions": 0},
    "in_order_ahead": {"name": "in_order", "max_lookahead_versions": 2},
    "weight_fifo": {"name": "weight_fifo", "max_staleness_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 1},
    "windowed": {"name": "windowed", "max_staleness_versions": 1},
}
SHORT_STEPS = ("in_order_ahead", "ready_first")  #: of which a step goes without what failed
GRANULARITIES = ("prompt_group", "sibling")


def settings(sampler: str, granularity: str) -> ControllerConfig:
    """Twelve small steps, a bundle after each of them, of which two or three are kept."""
    data = {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "max_num_steps": 12,
        },
        "async_rl": {
            "sampler": SAMPLERS[sampler],
            # bit-equal results need whole steps: what streams in order of arrival, depends on time
            "min_groups_for_streaming_train": None if sampler == "in_order" else 1,
            "on_stale_prompt": "requeue",
            "max_stale_requeues": 1,
            "rollout_failure": {
                "max_infra_attempts_per_prompt": 2,
                "on_dropped_prompt": "shortfall" if sampler in SHORT_STEPS else "replace",
                "replacement_reserve_prompts": 1 if sampler in SHORT_STEPS else 0,
            },
        },
        "rollout_recovery": {"default_granularity": granularity},
        "checkpointing": {
            "save_period": 1,
            "ft_keep_latest_k": 2,
            "keep_top_k": 1,
            "metric_name": "train/reward",
        },
    }
    return decode(data, ControllerConfig)


def uneven(prompt: Prompt, sibling: int) -> float:
    """Virtual seconds: some prompts take several times as long as others."""
    return 0.5 + (prompt.ordinal * 7 + sibling * 3) % 11


def evaluating() -> ControllerConfig:
    """The same with evaluations, which are what bundles are ranked by."""
    config = settings("in_order", "prompt_group")
    replace = msgspec.structs.replace
    grpo = replace(
        config.grpo,
        max_num_steps=6,
        val_period=2,
        val_at_start=True,
        num_val_generations_per_prompt=2,
    )
    checkpointing = replace(config.checkpointing, metric_name="val:reward")
    return replace(config, grpo=grpo, checkpointing=checkpointing)


def memory_run(config: ControllerConfig, *, exchanges: bool = True) -> MemoryRun:
    """A run in which some prompts fail once, one fails for good, and a bundle is asked for.

    It is asked for late, when a step waits for a straggler with its first group selected, or in
    the middle of an evaluation.
    """

    async def script(prompt: Prompt, sibling: int, weight_version: int) -> None:
        first = prompt.group_id == f"{prompt.ordinal}.0"
        if prompt.ordinal in (9, 16, -2) and sibling == 1 and run.controller is not None:
            await anyio.sleep(12)
            run.controller.request_checkpoint()
        if sibling == 1 and (prompt.ordinal == 5 or (first and prompt.ordinal % 7 == 3)):
            await anyio.sleep(12)  # meanwhile the other sibling has finished
            raise ConnectionError("engine went away")

    held_out = [f"held out {number}" for number in range(3)] if config.grpo.evaluates else None
    run = MemoryRun(config, range(100), latency=uneven, script=script, held_out=held_out)
    run.disk = MemoryDisk(exchanges=exchanges)
    run.start_life()
    return run


def world(sampler: str, granularity: str) -> MemoryWorld:
    """The world of such a run before its first start; `windowed` is on a disk without exchange."""
    config, exchanges = settings(sampler, granularity), sampler != "windowed"
    return MemoryWorld(
        lambda: memory_run(config, exchanges=exchanges),
        bit_equal=sampler == "in_order",
        effect_s=0.2,
    )


def evaluating_world() -> MemoryWorld:
    return MemoryWorld(lambda: memory_run(evaluating()), bit_equal=True, effect_s=0.2)


SCENARIOS: Mapping[str, Callable[[], MemoryWorld]] = {
    f"{sampler}-{granularity}": lambda s=sampler, g=granularity: world(s, g)
    for sampler in SAMPLERS
    for granularity in GRANULARITIES
} | {"evaluation": evaluating_world}

Part = tuple[str, range]
"""A scenario's name, and those of its crash points that one process explores."""
PARTS = 8  #: of each scenario, so that processes share the work evenly
NEST_EVERY = 100


def parts_of(name: str, sample: int | None, scenarios: int) -> list[Part]:
    """All points of a scenario in `PARTS` ranges, or its share of a sample."""
    points = count_points(SCENARIOS[name]())
    step = 1 if sample is None else max(1, points * scenarios // sample) | 1  # odd: see explore
    each = -(-points // PARTS)
    each += -each % step
    return [(name, range(at, min(points, at + each), step)) for at in range(0, points, each)]


def explore_part(part: Part) -> Exploration:
    """Also in another process, for which it silences what the scenarios log."""
    logging.disable(logging.CRITICAL)
    name, points = part
    return explore(SCENARIOS[name], points=points, nest_every=NEST_EVERY)
