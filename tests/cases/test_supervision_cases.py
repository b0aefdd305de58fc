"""Handed cases of supervision: a failure in one pump reaches the other, and the caller.

H06 = NVIDIA-NeMo/RL#3488 (also #3783, #3674).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import StallError, TooManyDropped, WorkerDied
from sc_core.ports import SamplerView
from sc_core.records import Group, Prompt
from sc_core.samplers import ReadyFirst
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio


def settings(**rl: Any) -> ControllerConfig:
    return decode(
        {
            "grpo": {
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
                "max_num_steps": 100,
            },
            "async_rl": {"sampler": {"name": "ready_first"}, **rl},
            "checkpointing": {"save_period": 50},
        },
        ControllerConfig,
    )


async def ends_with(run: MemoryRun, error: type[Exception], match: str, within_s: float) -> None:
    """The run raises `error` itself, in time, and leaves no task, section or place behind."""
    before = {task.id for task in anyio.get_running_tasks()}
    began = anyio.current_time()
    with pytest.raises(error, match=match):
        await run.run()
    assert anyio.current_time() - began <= within_s
    assert {task.id for task in anyio.get_running_tasks()} == before
    assert run.controller is not None
    now = run.controller.statistics()
    assert (now.barrier.holders, now.barrier.waiters, now.selected) == ((), (), 0)
    run.controller.audit()
    assert audit(run.log.events).ok
    stopped = run.log.events[-1]
    assert stopped.event == "stopped"
    assert str(stopped.reason).startswith(f"failed: {error.__name__}: ")


@pytest.mark.parametrize("hangs", [False, True])
async def test_h06a_all_generation_calls_fail(hangs: bool) -> None:
    async def dead(prompt: Prompt, sibling: int, version: int) -> None:
        if hangs:
            await anyio.sleep_forever()
        raise ConnectionError("every producer is dead")

    run = MemoryRun(settings(deadlines={"rollout_s": 5}), range(10**4), script=dead)
    match = "took longer than 5 s" if hangs else "ConnectionError: every producer is dead"
    # 33 drops in a row, of 3 attempts each, 4 at a time, with back-offs below 2 s in between
    await ends_with(run, TooManyDropped, match, within_s=9 * 3 * 7)
    assert run.trainer.trained == []


@pytest.mark.parametrize("fault", ["worker", "watchdog"])
async def test_h06b_a_fault_after_the_last_prompt_while_the_train_pump_drains(fault: str) -> None:
    """The source has ended, and two prompts are in flight; no producer is left to speak up."""
    training = anyio.Event()

    async def last_two(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal >= 4:
            await training.wait()
            if fault == "worker":
                await anyio.sleep(3)
                raise WorkerDied("engine 0", "out of memory")
            await anyio.sleep_forever()

    config = settings(stall_watchdog={"stall_timeout_s": 50}, deadlines={"rollout_s": 1e5})
    run = MemoryRun(config, range(6), script=last_two)
    train = run.trainer.train_microbatches

    async def slowly(batch: Any) -> None:
        if batch.step == 2:
            training.set()
            await anyio.sleep(10)
        await train(batch)

    run.trainer.train_microbatches = slowly  # type: ignore[method-assign]
    if fault == "worker":
        await ends_with(run, WorkerDied, "engine 0 died: out of memory", within_s=11)
    else:
        match = "no progress for 50 s: the source has ended; groups ready: 0, under way: 2; rollout"
        await ends_with(run, StallError, match, within_s=61)
    assert len(run.source.pulled) == 6
    assert run.trainer.trained[0] == (0, 1)


class NeverMine(ReadyFirst):
    """Every group is too late for the present step, and goes: those who make them never rest."""

    name = "never_mine"

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        return ()

    def evict(self, view: SamplerView) -> Sequence[Group]:
        return tuple(view.index.ready_in_commit_order())


@pytest.mark.parametrize("evicts", [True, False])
async def test_h06c_commits_go_on_and_none_is_selectable(evicts: bool) -> None:
    sampler = NeverMine(max_staleness_versions=1)
    if not evicts:  # one commit every 3 s, into places without an end in sight
        sampler.evict = lambda view: ()  # type: ignore[method-assign]
        sampler.admit = lambda view: ReadyFirst(10**6).admit(view)  # type: ignore[method-assign]
    config = settings(
        stall_watchdog={"stall_timeout_s": 60}, max_buffered_rollouts=10**4, max_inflight_prompts=1
    )
    run = MemoryRun(config, range(10**4), sampler=sampler, latency=lambda prompt, sibling: 3.0)
    await ends_with(run, StallError, "^no progress for 60 s: .*commit", within_s=60)
    commits = [e for e in run.log.events if e.event == "committed"]
    assert len(commits) >= 18  # one every 3 s, up to the end
    assert run.trainer.trained == []


async def test_h06d_the_rollout_pump_fails_while_the_train_pump_is_in_a_thread() -> None:
    """A thread can't be cancelled: the run ends when it has returned, by what came first."""
    in_thread, returned_at = anyio.Event(), 0.0

    async def dies(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 2:
            await in_thread.wait()
            await anyio.sleep(5)
            raise WorkerDied("engine 0", "out of memory")

    run = MemoryRun(settings(), range(50), script=dies)

    async def thread(batch: Any) -> None:
        nonlocal returned_at
        in_thread.set()
        await anyio.sleep(20)
        returned_at = anyio.current_time()

    run.trainer.train_microbatches = thread  # type: ignore[method-assign]
    await ends_with(run, WorkerDied, "engine 0 died: out of memory", within_s=20)
    assert returned_at > 0
    assert run.trainer.trained == []
