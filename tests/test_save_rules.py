"""When a run saves, what each bundle is kept for, and how a run ends before its time is up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest
from test_controller import at, fates, settings, uneven

from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError
from sc_core.records import Prompt
from sc_core.testing import MemoryRun
from sc_core.verify import verify

pytestmark = pytest.mark.anyio


def saves(run: MemoryRun) -> list[int | None]:
    """The step of every bundle that was published, in order."""
    return [event.step for event in run.log.events if event.event == "checkpoint"]


def one_second(prompt: Prompt, sibling: int) -> float:
    return 1.0


# checkpoint_must_save_by ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [("00:03:45:00", 13500.0), ("01:00:00:01", 86401.0), ("100:00:00:30", 8_640_030.0)],
)
def test_a_budget_is_days_hours_minutes_seconds(budget: str, seconds: float) -> None:
    config = settings(checkpointing={"checkpoint_must_save_by": budget})
    assert config.checkpointing.must_save_by_s == seconds
    assert settings().checkpointing.must_save_by_s is None


@pytest.mark.parametrize("budget", ["03:45:00", "00:24:00:00", "00:00:60:00", "0:3:45:0", "4h", ""])
def test_a_budget_in_another_form_is_refused(budget: str) -> None:
    with pytest.raises(ConfigError, match=r"must_save_by is '.*'; it must be dd:hh:mm:ss, such as"):
        settings(checkpointing={"checkpoint_must_save_by": budget})


def test_a_budget_without_checkpoints_is_refused() -> None:
    budget = {"checkpoint_must_save_by": "00:00:01:00", "enabled": False}
    with pytest.raises(ConfigError, match="enabled is false: nothing is saved"):
        settings(checkpointing=budget)


async def test_a_run_saves_once_and_ends_while_a_step_waits_for_groups() -> None:
    async def never(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 10:  # of step 3, of which two groups are trained on already
            await anyio.sleep_forever()

    config = settings(
        async_rl={"min_groups_for_streaming_train": 1, "deadlines": {"rollout_s": 1e9}},
        checkpointing={"save_period": 100, "checkpoint_must_save_by": "00:00:01:00"},
    )
    run = MemoryRun(config, range(500), latency=one_second, script=never)
    began = anyio.current_time()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("must_save_by", 2)
    assert anyio.current_time() - began == 60
    assert saves(run) == run.bundles() == [2]
    cut = verify(run.directory / "step_2", run.disk).cut
    assert Counter(record.state for record in cut.records) == {"committed": 3, "in_flight": 1}
    assert run.log.events[-1].reason == "must_save_by"

    run.script, run.config = None, settings(checkpointing={"save_period": 100})
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 12)
    assert {ordinal for ordinal, _, _ in run.engines.rollouts}.isdisjoint({8, 9, 11})
    assert fates(run)["trained"] == 48


async def test_the_longest_step_and_save_so_far_are_left_time_for() -> None:
    """Training takes 5 s and a save 7 s: the last one must begin 12 s before the end."""

    async def slow_save(call: str, point: str) -> None:
        if (call, point) == ("save_checkpoint", "midway"):
            await anyio.sleep(7)

    config = settings(
        steps=1000, checkpointing={"save_period": 2, "checkpoint_must_save_by": "00:00:01:40"}
    )
    run = MemoryRun(config, range(5000), latency=one_second, hooks=slow_save)
    train = run.trainer.train_microbatches

    async def slow_training(batch: Any) -> None:
        await anyio.sleep(5)
        await train(batch)

    run.trainer.train_microbatches = slow_training  # type: ignore[method-assign]
    began = anyio.current_time()
    result = await run.run()
    took = anyio.current_time() - began
    assert result is not None and result.reason == "must_save_by"
    assert 88 <= took <= 100
    assert saves(run)[-1] == result.step


async def test_a_budget_that_is_not_used_up_changes_nothing() -> None:
    config = settings(checkpointing={"checkpoint_must_save_by": "00:01:00:00"})
    run = MemoryRun(config, range(500), latency=one_second)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 12)
    assert saves(run) == [3, 6, 9, 12]


async def test_a_run_that_is_always_short_of_time_still_gets_on() -> None:
    """Each life counts anew, and groups that no step had used when it ended are kept."""
    config = settings(
        steps=6, checkpointing={"save_period": 100, "checkpoint_must_save_by": "00:00:00:12"}
    )
    run = MemoryRun(config, range(500), latency=uneven)
    reasons = []
    while not reasons or reasons[-1] != "max_steps":
        result = await run.run()
        assert result is not None
        reasons.append(result.reason)
        assert len(reasons) < 60
    assert reasons[:-1] == ["must_save_by"] * (len(reasons) - 1)
    assert fates(run)["trained"] == 24


# a save on request, in mid-step --------------------------------------------------------


@pytest.mark.parametrize("sampler", ["in_order-0", "windowed", "weight_fifo", "ready_first"])
async def test_a_save_in_mid_step_keeps_the_selected_groups_and_abandons_nothing(
    sampler: str,
) -> None:
    """Step 2 has trained on two groups and waits for the rest when the save is asked for."""
    open_when_asked: list[int] = []

    async def hold(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        if prompt.ordinal < 6 or run.lives > 1:
            return
        await anyio.sleep(10)
        if (prompt.ordinal, sibling) == (6, 0):
            open_when_asked.append(run.controller.statistics().selected)
            run.controller.request_checkpoint()
        await anyio.sleep(10)

    config = settings(
        sampler,
        steps=4,
        async_rl={"min_groups_for_streaming_train": 1},
        checkpointing={"save_period": 100},
    )
    run = MemoryRun(config, range(500), script=hold)
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    assert open_when_asked == [2]
    events = Counter(event.event for event in run.log.events)
    assert events["abandoned"] == 0
    assert run.bundles() == [1]
    cut = verify(run.directory / "step_1", run.disk).cut
    selected = sorted(r.ordinal for r in cut.records if r.state == "selected")
    assert selected == [4, 5]
    assert {group.ordinal for group in cut.groups} >= {4, 5}

    result = await run.run()
    assert result is not None and result.step == 4
    again = [e.ordinal for e in run.log.events if e.event == "selected" and e.step == 2]
    assert [ordinal for ordinal in again if ordinal in (4, 5)] == [4, 5, 4, 5]
    assert {ordinal for ordinal, _, _ in run.engines.rollouts}.isdisjoint({4, 5})
    assert fates(run)["trained"] >= 16


# ft_save_period ------------------------------------------------------------------------


async def test_frequent_saves_are_kept_by_the_newest_alone() -> None:
    config = settings(checkpointing={"save_period": 5, "ft_save_period": 1, "ft_keep_latest_k": 2})
    run = MemoryRun(config, range(500), latency=one_second)
    await run.run()
    assert saves(run) == list(range(1, 13))
    assert run.bundles() == [5, 10, 11, 12]
    infos = {step: verify(run.directory / f"step_{step}", run.disk).info for step in run.bundles()}
    assert {step for step, info in infos.items() if info.ft_only} == {11}  # 12 is the last


async def test_frequent_saves_are_not_ranked_by_the_metric() -> None:
    """The metric is the step itself, and less is better: step 1 would win if it were ranked."""
    config = settings(
        checkpointing={
            "save_period": 4,
            "ft_save_period": 1,
            "ft_keep_latest_k": 1,
            "keep_top_k": 1,
            "metric_name": "step",
            "higher_is_better": False,
        }
    )
    run = MemoryRun(config, range(500), latency=one_second)
    await run.run()
    assert run.bundles() == [4, 12]


async def test_a_stop_is_for_going_on_and_a_request_is_for_good() -> None:
    async def steer(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        if prompt.ordinal == 9 and version == 2:
            run.controller.request_checkpoint()
        if prompt.ordinal == 17 and version == 4:
            run.controller.stop()
            await anyio.sleep_forever()

    config = settings(checkpointing={"save_period": 100, "ft_save_period": 50})
    run = MemoryRun(config, range(500), latency=one_second, script=steer)
    await run.run()
    ft_only = {s: verify(run.directory / f"step_{s}", run.disk).info.ft_only for s in run.bundles()}
    assert ft_only == {2: False, 4: True}


async def test_a_bundle_saved_again_after_a_resume_keeps_metrics_and_purpose() -> None:
    """A stop in the first step after a resume replaces the bundle that it was resumed from."""

    async def ask(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        if prompt.ordinal == 12 and run.lives == 2:
            await anyio.sleep(5)
            run.controller.stop()
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(500), latency=one_second, script=ask)
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    before = verify(run.directory / "step_3", run.disk)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 3)
    after = verify(run.directory / "step_3", run.disk)
    assert after.digest != before.digest  # groups were committed since
    assert after.info.metrics["train/reward"] == before.info.metrics["train/reward"]
    assert not after.info.ft_only


async def test_a_stop_with_nothing_new_saves_nothing() -> None:
    async def stop(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        if version == 3:
            run.controller.stop()
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(500), latency=one_second, script=stop)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 3)
    assert saves(run) == [3]


def test_periods_below_one_are_refused() -> None:
    for key in ("save_period", "ft_save_period"):
        with pytest.raises(ConfigError, match=f"checkpointing.{key} is 0; it must be at least 1"):
            decode({"checkpointing": {key: 0}}, ControllerConfig)
