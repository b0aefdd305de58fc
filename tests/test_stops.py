"""Stops: with a bundle or without, repeated, and those that do not get through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.controller import SingleController
from sc_core.errors import CallTimeout, StopTimeout
from sc_core.records import Prompt
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio


def settings(**sections: Any) -> ControllerConfig:
    grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 6}
    data: dict[str, Any] = {
        "grpo": grpo,
        "async_rl": {"sampler": {"name": "windowed"}, "stop_grace_s": 30},
        "checkpointing": {"save_period": 4},
    }
    for section, values in sections.items():
        data[section] |= values
    return decode(data, ControllerConfig)


def a_second(prompt: Prompt, sibling: int) -> float:
    return 1.0


def started(run: MemoryRun) -> SingleController:
    assert run.controller is not None
    return run.controller


def when(run: MemoryRun, kind: str, step: int, act: Callable[[], None]) -> Callable[[Any], bool]:
    """For `crash_when`: act at the first event of that kind and step; nothing crashes."""
    done = False

    def look(event: Any) -> bool:
        nonlocal done
        if not done and (event.event, event.step) == (kind, step):
            done = True
            act()
        return False

    return look


def nothing_is_left(run: MemoryRun) -> None:
    now = started(run).statistics()
    assert (now.selected, now.barrier.holders, now.barrier.waiters) == (0, (), ())
    assert not run.engines.paused
    started(run).audit()
    assert audit(run.log.events).ok


async def test_the_reason_of_a_stop_is_in_the_result_and_in_the_log() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    stop = when(run, "trained", 3, lambda: started(run).stop("SIGTERM"))
    result = await run.run(crash_when=stop)
    assert result is not None
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "SIGTERM", 3)
    assert run.log.events[-1].reason == "stopped: SIGTERM"
    assert run.bundles() == [3]
    result = await run.run()
    assert result is not None
    assert (result.reason, result.stop_reason, result.step) == ("max_steps", None, 6)
    assert run.log.events[-1].reason == "max_steps"


async def test_a_stop_without_a_checkpoint_leaves_the_open_step_and_saves_nothing() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    train = run.trainer.train_microbatches

    async def slowly(batch: Any) -> None:
        if batch.step == 3:
            started(run).stop("enough", checkpoint=False)
            await anyio.sleep(5)
        await train(batch)

    run.trainer.train_microbatches = slowly  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "enough", 2)
    assert [e.step for e in run.log.events if e.event == "abandoned"] == [3, 3]
    assert run.bundles() == []
    nothing_is_left(run)
    result = await run.run()
    assert result is not None and result.step == 6
    assert audit(run.log.events).ok


async def test_a_step_that_is_being_finished_counts_also_in_a_hasty_stop() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    finish = run.trainer.finish_step

    async def hastily() -> Any:
        started(run).stop(checkpoint=False)
        return await finish()

    run.trainer.finish_step = hastily  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 1)
    assert run.bundles() == []
    nothing_is_left(run)


@pytest.mark.parametrize("during", ["save", "snapshot", None])
async def test_a_second_stop_without_a_checkpoint_gives_up_the_save_of_the_first(
    during: str | None,
) -> None:
    async def now() -> None:
        started(run).stop("now", checkpoint=False)
        started(run).stop("or not")  # brings no save back
        await anyio.sleep(5)

    async def hooks(call: str, point: str) -> None:
        if (call, point, during) == ("save_checkpoint", "midway", "snapshot"):
            await now()

    run = MemoryRun(settings(), range(50), latency=a_second, hooks=hooks)
    save = run.trainer.save

    async def slowly(directory: Path) -> None:
        if during == "save":
            await now()
        await save(directory)

    run.trainer.save = slowly  # type: ignore[method-assign]
    stop = when(run, "trained", 3, lambda: started(run).stop("soon"))
    result = await run.run(crash_when=stop)
    assert result is not None
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "soon", 3)
    assert run.bundles() == ([] if during else [3])
    nothing_is_left(run)


async def test_a_bundle_that_is_being_published_is_published_also_in_a_hasty_stop() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)

    async def slowly() -> None:
        started(run).stop("now", checkpoint=False)
        await anyio.sleep(5)

    run.trainer.finalize_save = slowly  # type: ignore[method-assign]
    stop = when(run, "trained", 3, lambda: started(run).stop("soon"))
    result = await run.run(crash_when=stop)
    assert result is not None and (result.reason, result.step) == ("stopped", 3)
    assert run.bundles() == [3]
    nothing_is_left(run)


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_a_stop_before_the_first_prompt(checkpoint: bool) -> None:
    run = MemoryRun(settings(), range(50))

    def at_start(event: Any) -> bool:
        if event.event == "run_started":
            started(run).stop("early", checkpoint=checkpoint)
        return False

    result = await run.run(crash_when=at_start)
    assert result is not None
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "early", 0)
    assert run.engines.rollouts == []
    assert run.bundles() == ([0] if checkpoint else [])
    nothing_is_left(run)


async def test_a_stop_from_outside_any_task() -> None:
    """As an actor's other thread sends it: a callback of the loop, in no task."""
    run = MemoryRun(settings(), range(50), latency=a_second)
    told: list[str] = []

    def stop() -> None:
        told.append(str(started(run).report()))
        started(run).stop("by callback", checkpoint=False)

    async def third(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (6, 0):
            loop: Any = anyio.lowlevel.current_token().native_token
            is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
            (loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon)(stop)

    run.script = third
    run.engines._script = third
    result = await run.run()
    assert result is not None and result.stop_reason == "by callback"
    assert told[0].startswith("no progress for ") and "    train pump: " in told[0]
    assert "cause" not in told[0]
    nothing_is_left(run)


# stops that do not get through ---------------------------------------------------------


async def test_a_stop_that_does_not_get_through_says_what_it_waits_for() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)

    async def hang(directory: Path) -> None:
        await anyio.sleep_forever()

    run.trainer.save = hang  # type: ignore[method-assign]
    stop = when(run, "trained", 3, lambda: started(run).stop("SIGTERM"))
    with pytest.raises(StopTimeout) as caught:
        await run.run(crash_when=stop)
    cause, *rest = str(caught.value).splitlines()
    assert cause.startswith("the stop (SIGTERM) did not end the run within 3")  # one step more
    assert "trainer.save has not returned for " in cause
    assert "  stop       SIGTERM" in rest
    assert anyio.current_time() < 1900  # the call under way has until its own deadline
    assert run.log.events[-1].reason == f"failed: StopTimeout: {cause}"
    assert run.bundles() == []


async def test_a_stop_waits_for_a_publication_no_longer_than_that() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)

    async def slowly() -> None:
        await anyio.sleep(100)

    run.trainer.finalize_save = slowly  # type: ignore[method-assign]
    stop = when(run, "trained", 3, lambda: started(run).stop("SIGTERM"))
    with pytest.raises(StopTimeout, match=r"not published yet: trainer\.finalize_save has not"):
        await run.run(crash_when=stop)


async def test_long_steps_and_saves_have_their_time_beside_the_grace() -> None:
    """Steps of 100 s and saves of 50 s, where the grace alone is 30 s."""
    run = MemoryRun(settings(checkpointing={"save_period": 1}), range(50))
    train, save = run.trainer.train_microbatches, run.trainer.save

    async def train_slowly(batch: Any) -> None:
        await anyio.sleep(100)
        await train(batch)

    async def save_slowly(directory: Path) -> None:
        await anyio.sleep(50)
        await save(directory)

    run.trainer.train_microbatches = train_slowly  # type: ignore[method-assign]
    run.trainer.save = save_slowly  # type: ignore[method-assign]
    stop = when(run, "selected", 3, lambda: started(run).stop("SIGTERM"))
    result = await run.run(crash_when=stop)
    assert result is not None and (result.reason, result.step) == ("stopped", 3)
    assert run.bundles() == [1, 2, 3]


async def test_a_hung_call_ends_a_stop_by_its_own_deadline_if_that_comes_first() -> None:
    deadlines = {"trainer_s": 20, "snapshot_s": 20}
    run = MemoryRun(settings(async_rl={"deadlines": deadlines}), range(50), latency=a_second)

    async def hang(directory: Path) -> None:
        await anyio.sleep_forever()

    run.trainer.save = hang  # type: ignore[method-assign]
    stop = when(run, "trained", 3, lambda: started(run).stop("SIGTERM"))
    with pytest.raises(CallTimeout, match=r"trainer\.save did not return within 20 s"):
        await run.run(crash_when=stop)


async def test_a_task_that_ignores_its_cancel_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stubborn(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (6, 1):
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5000)

    run = MemoryRun(settings(), range(50), latency=a_second, script=stubborn)
    stop = when(run, "trained", 3, lambda: started(run).stop("SIGTERM"))
    result = await run.run(crash_when=stop)
    assert result is not None and result.reason == "stopped"
    (record,) = (r for r in caplog.records if r.levelname == "CRITICAL")
    first = record.getMessage().splitlines()[0]
    assert first.startswith("the run has not ended within 1800 s, although every task was told to")
    assert "rollout of sibling 1 of group 6.0 has not returned for 180" in first
    nothing_is_left(run)
