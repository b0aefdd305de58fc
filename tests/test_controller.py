"""Whole runs on in-memory ports: to the end, stopped, crashed and resumed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from sc_core.audit import audit
from sc_core.bundle import BundleStore
from sc_core.config import ControllerConfig, decode
from sc_core.errors import (
    CallFailed,
    CallTimeout,
    ConfigChanged,
    PromptDropped,
    RestoreOrderError,
    RowsNotCleared,
    SaveError,
    StallError,
    WeightSyncError,
    WorkerDied,
    WrongAnswer,
)
from sc_core.events import Event
from sc_core.filters import ZeroVarianceFilter
from sc_core.records import Prompt
from sc_core.restore import check_resume
from sc_core.testing import MemoryRun
from sc_core.testing.ports import MeanBaseline

pytestmark = pytest.mark.anyio

SAMPLERS: dict[str, dict[str, Any]] = {
    "in_order-0": {"name": "in_order", "max_lookahead_versions": 0},
    "in_order-2": {"name": "in_order", "max_lookahead_versions": 2},
    "windowed": {"name": "windowed", "max_staleness_versions": 1},
    "weight_fifo": {"name": "weight_fifo", "max_staleness_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 1},
}


def settings(sampler: str = "in_order-0", *, steps: int = 12, **sections: Any) -> ControllerConfig:
    data: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 3,
            "max_num_steps": steps,
        },
        "async_rl": {"sampler": SAMPLERS[sampler]},
        "checkpointing": {"save_period": 3},
    }
    for section, values in sections.items():
        data[section] |= values
    return decode(data, ControllerConfig)


def uneven(prompt: Prompt, sibling: int) -> float:
    """Virtual seconds: some prompts take several times as long as others."""
    return 0.5 + (prompt.ordinal * 7 + sibling * 3) % 11


def at(kind: str, count: int) -> Callable[[Event], bool]:
    """Yes to the `count`-th event of that kind."""
    seen = Counter[str]()

    def crash_when(event: Event) -> bool:
        seen[event.event] += 1
        return event.event == kind and seen[kind] == count

    return crash_when


def fates(run: MemoryRun) -> Counter[str]:
    report = audit(run.log.events)
    assert report.ok, report.violations
    return Counter(e.event for e in run.log.events if e.event in ("trained", "dropped"))


def owned_rows(run: MemoryRun) -> set[str]:
    """The rows that the ledger says exist."""
    assert run.controller is not None
    groups = [r.group_id for r in run.controller.ledger_records() if r.state == "committed"]
    return {f"{group}_g{sibling}" for group in groups for sibling in range(3)}


@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_a_run_trains_every_step_and_keeps_the_law(sampler: str) -> None:
    run = MemoryRun(settings(sampler), range(500), latency=uneven)
    result = await run.run()
    assert result is not None
    assert (result.reason, result.step, result.weight_version) == ("max_steps", 12, 12)
    assert [len(step) for step in run.trainer.trained] == [4] * 12
    assert all(step == tuple(sorted(step)) for step in run.trainer.trained)
    assert run.controller is not None
    run.controller.audit()
    assert fates(run)["trained"] == 48
    assert run.store.rows.keys() == owned_rows(run)
    assert run.bundles() == [3, 6, 9, 12]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind, count", [("trained", 17), ("committed", 30), ("weight_sync", 7)])
async def test_a_killed_run_loses_and_repeats_nothing(sampler: str, kind: str, count: int) -> None:
    run = MemoryRun(settings(sampler), range(500), latency=uneven)
    assert await run.run(crash_when=at(kind, count)) is None
    result = await run.run()
    assert result is not None and result.step == 12
    assert audit(run.log.events).ok
    assert run.controller is not None
    run.controller.audit()


async def test_slots_are_used_again_rather_than_started_anew() -> None:
    slots = set[int]()

    async def script(prompt: Prompt, sibling: int, attempt: int) -> None:
        if sibling == 0:  # the group's own task makes the first one
            slots.add(anyio.get_current_task().id)

    run = MemoryRun(settings(), range(500), latency=uneven, script=script)
    assert await run.run() is not None
    assert run.controller is not None
    assert len(slots) <= run.controller.statistics().places_capacity == 4


@pytest.mark.parametrize("crash_at", [3, 5, 8, 11])
async def test_in_order_without_lookahead_resumes_bit_for_bit(crash_at: int) -> None:
    whole = MemoryRun(settings(), range(500), latency=uneven)
    await whole.run()
    killed = MemoryRun(settings(), range(500), latency=uneven)
    assert await killed.run(crash_when=at("weight_sync", crash_at + 1)) is None
    result = await killed.run()
    assert result is not None and result.step == 12
    assert killed.trainer.weights == whole.trainer.weights


async def test_two_crashes_in_a_row_before_and_after_a_bundle() -> None:
    run = MemoryRun(settings("windowed"), range(500), latency=uneven)
    assert await run.run(crash_when=at("dispatched", 2)) is None
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    assert await run.run(crash_when=at("selected", 2)) is None
    result = await run.run()
    assert result is not None and result.step == 12
    assert fates(run)["trained"] >= 48
    assert Counter(e.event for e in run.log.events)["resumed"] == 2


@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_the_end_of_prompts_makes_one_short_step(sampler: str) -> None:
    run = MemoryRun(settings(sampler, steps=100), range(10), latency=uneven)
    result = await run.run()
    assert result is not None
    assert (result.reason, result.step) == ("exhausted", 3)
    assert sorted(len(step) for step in run.trainer.trained) == [2, 4, 4]
    assert fates(run)["trained"] == 10


async def test_a_resume_at_the_last_step_does_nothing() -> None:
    run = MemoryRun(settings(), range(500))
    await run.run()
    effects = run.disk.effects
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 12)
    assert run.trainer.trained == [] and run.engines.rollouts == []
    assert run.disk.effects == effects and run.bundles() == [3, 6, 9, 12]


async def test_stop_abandons_the_open_step_and_saves() -> None:
    async def slow_later(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 9:  # one of step 3, which can't fill without it
            run.controller.stop()  # type: ignore[union-attr]
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(500), script=slow_later)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 2)
    assert run.bundles() == [2]
    run.script = None
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 12)
    assert fates(run)["trained"] == 48


async def test_a_requested_checkpoint_is_taken_in_mid_step() -> None:
    async def ask(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 6 and sibling == 0:
            run.controller.request_checkpoint()  # type: ignore[union-attr]
            await anyio.sleep(100)

    config = settings(async_rl={"min_groups_for_streaming_train": 1})
    run = MemoryRun(config, range(500), script=ask)
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    assert [e.step for e in run.log.events if e.event == "checkpoint"] == [1]
    assert run.bundles() == [1]
    run.script = None
    result = await run.run()
    assert result is not None and result.step == 12
    assert fates(run)["trained"] == 48


async def test_a_failed_sibling_is_tried_again_and_the_others_count_for_nothing() -> None:
    failures = Counter[int]()

    async def flaky(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal % 5 == 0 and sibling == 1 and failures[prompt.ordinal] < 2:
            failures[prompt.ordinal] += 1
            raise ConnectionError("engine went away")

    run = MemoryRun(settings(), range(500), script=flaky)
    result = await run.run()
    assert result is not None and result.step == 12
    assert fates(run) == {"trained": 48}
    assert result.counters["infra_failures"] == sum(failures.values()) >= 20
    assert {e.group_id for e in run.log.events if e.event == "trained" and e.ordinal == 10} == {
        "10.2"
    }


async def test_a_prompt_without_attempts_left_is_dropped_or_ends_the_run() -> None:
    async def broken(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 5:
            raise ConnectionError("engine went away")

    run = MemoryRun(settings(), range(500), script=broken)
    result = await run.run()
    assert result is not None and result.step == 12
    assert fates(run) == {"trained": 48, "dropped": 1}
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.ordinal == 5
    assert dropped.reason == "infra failure: ConnectionError: engine went away"

    strict = settings(async_rl={"rollout_failure": {"on_dropped_prompt": "fail"}})
    with pytest.raises(PromptDropped, match=r"group 5\.2 used up its attempts.*went away"):
        await MemoryRun(strict, range(500), script=broken).run()


async def test_prompts_that_all_fail_end_the_run_with_the_reason() -> None:
    async def broken(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal >= 8:
            raise ZeroDivisionError("in the reward function")

    limit = {"rollout_failure": {"max_consecutive_dropped_prompts": 5}}
    run = MemoryRun(settings(async_rl=limit), range(500), script=broken)
    with pytest.raises(PromptDropped, match=r"ZeroDivisionError: in the reward function"):
        await run.run()
    assert fates(run) == {"trained": 8, "dropped": 5}


async def test_zero_variance_groups_are_dropped_and_replaced() -> None:
    run = MemoryRun(settings(), range(500), group_filter=ZeroVarianceFilter())
    run.engines.rollout = constant_for_even_ordinals(run)  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and result.step == 12
    trained = [e.ordinal for e in run.log.events if e.event == "trained"]
    assert trained == sorted(trained) and all(o is not None and o % 2 for o in trained)
    assert {e.reason for e in run.log.events if e.event == "dropped"} == {"filtered"}


def constant_for_even_ordinals(run: MemoryRun) -> Any:
    from msgspec.structs import replace

    rollout = run.engines.rollout

    async def constant(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        return replace(sample, reward=float(sibling if prompt.ordinal % 2 else 1))

    return constant


async def test_a_hanging_data_plane_ends_the_run_with_the_name_of_the_call() -> None:
    async def hang(call: str, point: str) -> None:
        if (call, point) == ("save_checkpoint", "midway"):
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(500), hooks=hang)
    with pytest.raises(CallTimeout, match=r"data_plane\.save_checkpoint did not return within 600"):
        await run.run()
    assert run.bundles() == []


async def test_an_engine_that_does_not_confirm_ends_the_run() -> None:
    run = MemoryRun(settings(), range(500))
    transfer = run.engines.transfer

    async def one_lags(version: int) -> dict[str, int]:
        return {**await transfer(version), "engine7": max(0, version - 1)}

    run.engines.transfer = one_lags  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="version 1 failed on engine7: it has version 0"):
        await run.run()
    assert not run.engines.paused


async def test_somebody_beside_the_run_can_end_it_by_an_error() -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 9:
            assert run.controller is not None
            run.controller.fail(WorkerDied("too many engines", "3 of 4"))
            run.controller.fail(WorkerDied("another", "later"))
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(100), script=script)
    with pytest.raises(WorkerDied, match="too many engines died: 3 of 4"):
        await run.run()
    assert run.log.events[-1].event == "stopped"
    assert run.log.events[-1].reason == "failed: WorkerDied: too many engines died: 3 of 4"
    assert audit(run.log.events).ok


async def test_a_stall_names_what_it_waits_for() -> None:
    async def never(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 6:
            await anyio.sleep_forever()

    config = settings(
        async_rl={
            "stall_watchdog": {"stall_timeout_s": 50},
            "deadlines": {"rollout_s": 1e6},
        }
    )
    run = MemoryRun(config, range(500), script=never)
    match = "no progress for 50 s: groups ready for target 1: 3, under way: 1; rollout of sibling"
    with pytest.raises(StallError, match=match):
        await run.run()


async def test_settings_that_can_t_go_on_from_a_bundle_are_refused() -> None:
    run = MemoryRun(settings(), range(500))
    await run.run()
    run.config = settings(grpo={"num_generations_per_prompt": 5})
    with pytest.raises(ConfigChanged, match=r"3 siblings and .* is 5"):
        await run.run()
    run.config, run.prompts = settings(), range(499)
    with pytest.raises(ConfigChanged, match="fingerprint"):
        await run.run()


async def test_a_store_that_was_touched_can_t_be_restored_into() -> None:
    run = MemoryRun(settings(), range(500))
    run.store.row("leftover")
    with pytest.raises(RestoreOrderError, match="touched before the restore"):
        await run.run()


async def test_without_the_replay_buffer_the_same_prompts_are_generated_again() -> None:
    run = MemoryRun(settings("in_order-2"), range(500), latency=uneven)
    assert await run.run(crash_when=at("trained", 30)) is None
    run.config = settings("in_order-2", checkpointing={"load_replay_buffer": False})
    result = await run.run()
    assert result is not None and result.step == 12
    (resumed,) = (e for e in run.log.events if e.event == "resumed")
    assert resumed.weight_version == 6
    assert {version for _, _, version in run.engines.rollouts} >= {6}
    assert fates(run)["trained"] >= 48


@pytest.mark.parametrize("odd", [{"odd": object()}, {"odd": [1j]}, {"\ud800": 1.0}, {3: 1.0}])
async def test_a_metric_that_no_file_can_hold_is_named(odd: dict[Any, Any]) -> None:
    run = MemoryRun(settings(), range(500))
    finish_step = run.trainer.finish_step

    async def finish() -> dict[Any, Any]:
        return {**await finish_step(), **odd}

    run.trainer.finish_step = finish  # type: ignore[method-assign]
    (name,) = odd
    with pytest.raises(WrongAnswer) as caught:
        await run.run()
    told = f"trainer.finish_step returned the metric {name!r}, which no file can hold: "
    assert str(caught.value).startswith(told)
    assert run.bundles() == []


async def test_a_failed_finish_step_is_neither_abandoned_nor_saved() -> None:
    run = MemoryRun(settings(), range(500))
    calls: list[str] = []

    async def hang() -> dict[str, float]:
        calls.append("finish_step")
        await anyio.sleep_forever()
        return {}

    async def abandon() -> None:
        calls.append("abandon_step")

    run.trainer.finish_step, run.trainer.abandon_step = hang, abandon  # type: ignore[method-assign]
    with pytest.raises(CallTimeout, match=r"trainer\.finish_step did not return within 1800 s"):
        await run.run()
    assert calls == ["finish_step"]
    assert run.bundles() == []
    assert (
        run.log.events[-1].reason == "failed: CallTimeout: trainer.finish_step did not return"
        " within 1800 s"
    )


@pytest.mark.parametrize("call", ["prepare", "train_microbatches"])
async def test_an_error_in_an_open_step_gives_its_groups_back_whole(call: str) -> None:
    run = MemoryRun(settings("windowed"), range(500))

    async def broken(*_: Any) -> None:
        raise MemoryError("out of memory")

    async def abandon() -> None:
        raise ConnectionError("the worker is gone as well")

    setattr(run.trainer, call, broken)
    run.trainer.abandon_step = abandon  # type: ignore[method-assign]
    with pytest.raises(CallFailed, match=rf"^trainer\.{call} failed: MemoryError: out of memory"):
        await run.run()
    assert run.controller is not None
    assert run.controller.statistics().selected == 0
    run.controller.audit()
    assert audit(run.log.events).ok


async def test_rows_that_can_t_be_cleared_stay_suspect_until_they_are() -> None:
    refusals = 0

    async def refuse(name: str, point: str) -> None:
        nonlocal refusals
        if (name, point) == ("clear_samples", "midway") and refusals < 5:
            refusals += 1
            raise ConnectionError("storage unit is restarting")

    run = MemoryRun(settings(steps=4, checkpointing={"save_period": 2}), range(500), hooks=refuse)
    result = await run.run()
    assert result is not None and result.step == 4
    assert refusals == 5 and run.store.rows.keys() == owned_rows(run)
    assert fates(run)["trained"] == 16


async def test_a_failed_put_leaves_no_rows_and_the_group_goes_out_again() -> None:
    failed: list[str] = []

    async def fail(name: str, point: str) -> None:
        if (name, point) == ("put_samples", "midway") and len(failed) < 2:
            failed.append(name)
            raise ConnectionError("torn in the middle")

    run = MemoryRun(settings(), range(500), hooks=fail)
    result = await run.run()
    assert result is not None and result.counters["infra_failures"] == 2
    assert run.store.rows.keys() == owned_rows(run)
    assert fates(run)["trained"] == 48


async def test_rows_that_survive_their_failed_commit_end_the_run() -> None:
    async def fail(name: str, point: str) -> None:
        if name in ("put_samples", "clear_samples") and point == "midway":
            raise ConnectionError("torn in the middle")

    run = MemoryRun(settings(), range(500), hooks=fail)
    with pytest.raises(RowsNotCleared, match=r"3 suspect rows could not be cleared \(0\.0_g0"):
        await run.run()


async def test_a_cancelled_run_leaves_nothing_behind() -> None:
    for cancel_after_s in (0.0, 1.0, 5.5, 9.0, 14.0, 30.0):
        run = MemoryRun(settings("windowed"), range(500), latency=uneven)
        with anyio.move_on_after(cancel_after_s):
            await run.run()
        if run.controller is not None:
            stats = run.controller.statistics()
            assert (stats.barrier.mutations, stats.barrier.checkpointing) == (0, False)
            assert (stats.selected, run.engines.paused) == (0, False)
        assert audit(run.log.events).ok or not run.log.events


def test_a_native_cancel_of_run_waits_for_the_snapshot_under_way() -> None:
    """`ray.cancel` and `asyncio.Task.cancel` ignore shields; the window must not open early."""

    async def main() -> None:
        saving, may_end = asyncio.Event(), asyncio.Event()

        async def slow_save(name: str, point: str) -> None:
            if (name, point) == ("save_checkpoint", "midway"):
                saving.set()
                await may_end.wait()

        run = MemoryRun(settings("windowed"), range(500), hooks=slow_save)
        task = asyncio.create_task(run.run())
        await saving.wait()
        for _ in range(3):
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done()
            assert run.controller is not None
            assert run.controller.statistics().barrier.checkpointing
        may_end.set()
        await asyncio.wait([task])
        assert task.cancelled()
        barrier = run.controller.statistics().barrier
        assert (barrier.mutations, barrier.checkpointing) == (0, False)
        assert run.store.rows.keys() == owned_rows(run)

    asyncio.run(main())


async def test_a_full_disk_is_noticed_before_anything_is_written() -> None:
    run = MemoryRun(settings(steps=6), range(500))

    def fill_up(event: Event) -> bool:
        if event.event == "checkpoint":
            run.disk.free = 1000
        return False

    with pytest.raises(SaveError, match=r"/checkpoints has 1,000 bytes free and a bundle needs"):
        await run.run(crash_when=fill_up)
    assert run.bundles() == [3]
    assert "tmp_step_6" not in run.disk.entries(run.directory)


async def test_a_named_bundle_is_resumed_only_if_nothing_newer_stays_behind() -> None:
    run = MemoryRun(settings(), range(500))
    assert await run.run(crash_when=at("checkpoint", 2)) is None
    run.resume = run.directory / "step_3"
    with pytest.raises(ConfigChanged, match=r"also holds step_6: move them away to go back to"):
        await run.run()
    run.disk.remove_tree(run.directory / "step_6")
    result = await run.run()
    assert result is not None and result.step == 12
    (resumed,) = (e for e in run.log.events if e.event == "resumed")
    assert resumed.step == 3
    assert fates(run)["trained"] > 48


@pytest.mark.parametrize(
    ("resume", "problem"),
    [("never", "holds 4 checkpoints"), (Path("/checkpoints"), "/checkpoints is no checkpoint")],
)
async def test_what_can_t_be_resumed_is_refused_before_a_store_is_needed(
    resume: Any, problem: str
) -> None:
    run = MemoryRun(settings(), range(500))
    await run.run()
    store = BundleStore(run.directory, disk=run.disk)
    with pytest.raises(ConfigChanged, match=problem):
        check_resume(store, resume)
    run.resume = resume
    with pytest.raises(ConfigChanged, match=problem):
        await run.run()
    check_resume(store, "auto")
    check_resume(store, run.directory / "step_12")


async def test_another_runs_bundle_is_refused_as_its_log_is_elsewhere() -> None:
    run = MemoryRun(settings(steps=3), range(500))
    await run.run()
    run.resume = run.directory / "step_3"
    run.directory = run.directory.with_name("elsewhere")
    with pytest.raises(ConfigChanged, match="copy its whole run directory"):
        await run.run()


@pytest.mark.parametrize("seed", [1, 3, 5])
async def test_a_power_cut_after_a_bundle_leaves_a_log_that_reaches_its_cut(seed: int) -> None:
    """Odd seeds lose every event that was not synced: a bundle must not be younger than the log."""
    run = MemoryRun(settings("windowed"), range(500), latency=uneven)
    assert await run.run(crash_when=at("checkpoint", 2), seed=seed) is None
    result = await run.run()
    assert result is not None and result.step == 12
    assert fates(run)["trained"] >= 48


async def test_a_step_says_how_long_the_controllers_thread_computed() -> None:
    class Busy(MeanBaseline):
        def estimate(self, columns: Any, group_sizes: Any) -> dict[str, list[Any]]:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            return super().estimate(columns, group_sizes)

    run = MemoryRun(settings(steps=2), prompts=range(100))
    run.estimator = Busy()
    await run.run()
    assert all(0.02 <= line["timing/train/controller_cpu_time"] < 10 for line in run.metrics.steps)
