"""H25 and H26 on running controllers; `test_sampler_cases` has them without task or clock."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from lives import ALL, GATED, Lives, effective, of_kind, settings, trained

from sc_core.config import ControllerConfig
from sc_core.errors import ConfigError
from sc_core.records import Prompt

pytestmark = pytest.mark.anyio

# H25: slow prompts under each policy

P, K, EPOCH, SLOW = 4, 2, 8, 3
STEP_S = 1.0


def takes(prompt: Prompt, sibling: int) -> float:
    """Prompt 3 of the 8 of each epoch takes K + 2 steps, the others less than one."""
    return (K + 2.5) * STEP_S if prompt.ordinal % EPOCH == SLOW else 0.9 * STEP_S


async def forty_steps(sampler: str, **rl: Any) -> Lives:
    config = settings(sampler, p=P, k=K, steps=40, async_rl=rl)
    run = Lives(config, range(EPOCH), epochs=100, latency=takes, step_s=STEP_S)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 40)
    return run


def slow(ordinals: Any) -> list[int]:
    return sorted(ordinal for ordinal in ordinals if ordinal % EPOCH == SLOW)


def all_trained(run: Lives) -> list[int]:
    return [ordinal for step in trained(run).values() for ordinal in step]


def lags(run: Lives) -> dict[int, int]:
    """Versions between the start of each trained group and the step that trained it."""
    started: dict[int, int] = {}
    found: dict[int, int] = {}
    for event in effective(run):
        assert event.weight_version is not None or event.event not in ("dispatched", "trained")
        if event.event == "dispatched":
            started[event.ordinal] = event.weight_version  # type: ignore[index, assignment]
        elif event.event == "trained":
            found[event.ordinal] = event.weight_version - 1 - started[event.ordinal]  # type: ignore
    return found


def generations(run: Lives) -> dict[int, int]:
    count: dict[int, int] = {}
    for event in of_kind(effective(run), "dispatched"):
        count[event.ordinal] = count.get(event.ordinal, 0) + 1  # type: ignore[index, arg-type]
    return count


@pytest.mark.parametrize("sampler", ["in_order", "weight_fifo"])
async def test_h25_a_run_waits_for_its_slow_prompts_and_trains_each_once(sampler: str) -> None:
    run = await forty_steps(sampler)
    assert of_kind(effective(run), "dropped") == []
    ordinals = all_trained(run)
    assert sorted(ordinals) == list(range(40 * P))
    assert len(slow(ordinals)) == 20
    assert max(lags(run).values()) <= K
    assert max(step["train/staleness_versions_max"] for step in run.metrics.steps) <= K
    assert set(generations(run).values()) == {1}


async def test_h25_ready_first_trains_slow_prompts_late_and_reports_the_real_lag() -> None:
    run = await forty_steps("ready_first")
    assert of_kind(effective(run), "dropped") == []
    ordinals = all_trained(run)
    assert len(slow(ordinals)) / len(ordinals) == pytest.approx(1 / EPOCH, abs=0.02)
    lag = lags(run)
    assert min(lag[ordinal] for ordinal in slow(ordinals)) > K
    reported = max(step["train/staleness_versions_max"] for step in run.metrics.steps)
    assert reported == max(lag.values())
    assert set(generations(run).values()) == {1}


async def test_h25_windowed_records_each_slow_prompt_that_it_drops() -> None:
    run = await forty_steps("windowed", on_stale_prompt="drop")
    assert slow(all_trained(run)) == []
    drops = of_kind(effective(run), "dropped")
    dropped = [event.ordinal for event in drops]
    assert dropped == slow(range(dropped[-1] + 1))  # type: ignore[operator]
    assert all((event.reason or "").startswith("stale: ") for event in drops)
    assert sum(s["train/evicted_stale_prompt_groups"] for s in run.metrics.steps) == len(dropped)
    assert max(lags(run).values()) <= K


async def test_h25_windowed_requeues_slow_prompts_up_to_the_cap() -> None:
    run = await forty_steps("windowed", on_stale_prompt="requeue", max_stale_requeues=2)
    count = generations(run)
    dropped = [event.ordinal for event in of_kind(effective(run), "dropped")]
    assert len(dropped) >= 2
    assert all(count[ordinal] == 3 for ordinal in dropped)  # type: ignore[index]
    assert max(count.values()) == 3
    assert max(lags(run).values()) <= K


# H26: select, evict and capacity agree


async def test_h26_a_running_in_order_goes_by_target_whatever_staleness_says() -> None:
    """Groups start three versions before the step they are meant for; none is too old."""
    rl = {"sampler": {"name": "in_order", "max_lookahead_versions": 3, "max_staleness_versions": 1}}
    run = Lives(settings(p=1, k=3, steps=15, async_rl=rl), range(100), step_s=5)
    result = await run.run()
    assert result is not None and result.step == 15
    assert of_kind(effective(run), "evicted") == []
    lag = lags(run)
    assert [lag[ordinal] for ordinal in range(3, 15)] == [3] * 12
    assert all_trained(run) == list(range(15))


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("sampler", ALL)
async def test_h26_a_run_fills_its_steps_or_is_refused_with_the_numbers(
    sampler: str, k: int
) -> None:
    verdicts = set()
    for p, places, chunk, slots in itertools.product((1, 3), (1, 2, 3, 7), (None, 1), (None, 1)):
        config: ControllerConfig = settings(
            sampler,
            p=p,
            k=k,
            g=1,
            steps=3,
            async_rl={
                "max_buffered_rollouts": places,
                "min_groups_for_streaming_train": chunk,
                "max_inflight_prompts": slots,
                "stall_watchdog": {"stall_timeout_s": 100},
            },
        )
        run = Lives(config, range(100))
        try:
            result = await run.run()
        except ConfigError as exc:
            assert f"max_buffered_rollouts is {places}, but a step of {p} groups" in str(exc)
            accepted = False
        else:
            assert result is not None and result.step == 3
            assert [len(step) for step in trained(run).values()] == [p] * 3
            accepted = True
        assert accepted is (places >= p)
        verdicts.add(accepted)
    assert verdicts == {True, False}


@pytest.mark.parametrize("sampler", ALL)
async def test_h26_what_evict_leaves_is_trained_and_what_it_takes_was_too_old(
    sampler: str,
) -> None:
    def uneven(prompt: Prompt, sibling: int) -> float:
        return 0.2 + prompt.ordinal * 7 % 11

    run = Lives(settings(sampler, p=3, k=1, steps=30), range(95), latency=uneven, step_s=2)
    result = await run.run()
    assert result is not None and result.reason in ("max_steps", "exhausted")
    fates = {e.ordinal: e.event for e in effective(run) if e.event in ("trained", "dropped")}
    started = {e.ordinal: e.weight_version for e in of_kind(effective(run), "dispatched")}
    for event in of_kind(effective(run), "evicted"):
        assert fates[event.ordinal] == "dropped"
    if sampler in GATED:
        assert set(fates.values()) == {"trained"}
    else:
        assert set(fates.values()) == {"trained", "dropped"}
        version = 0
        for event in effective(run):
            if event.event == "trained":
                version = event.weight_version or version
            if event.event == "evicted":
                assert started[event.ordinal] < version - 1  # type: ignore[operator]
