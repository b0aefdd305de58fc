"""Public failures of restarts, each under its name in the collection of cases, on whole runs."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from lives import (
    ALL,
    GATED,
    BatchLoader,
    Lives,
    effective,
    last_life,
    of_kind,
    settings,
    states,
    trained,
)

from sc_core.records import Prompt

pytestmark = pytest.mark.anyio


# H01: a restored batch that is complete -------------------------------------------------------


@pytest.mark.parametrize(
    ("lookahead", "ready_30", "ready_31"),
    [(1, 2, 0), (1, 2, 1), (1, 0, 0), (1, 2, 2), (0, 2, 0)],
    ids=["30-full", "a-31-half-full", "b-empty", "c-both-full", "d-lookahead-0"],
)
async def test_h01_a_restored_buffer_that_holds_a_full_step_goes_on(
    lookahead: int, ready_30: int, ready_31: int
) -> None:
    config = settings("in_order", p=2, k=lookahead, steps=35, checkpointing={"save_period": 30})
    run = Lives(config, range(500), pulls=60 + ready_30 + ready_31)
    cut = await run.until_saved()
    targets = [group.target_step for group in cut.groups]
    assert targets == [30] * ready_30 + [31] * ready_31
    assert len(cut.records) == len(cut.groups)

    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 35)
    steps = trained(run)
    assert [len(steps[step]) for step in range(1, 36)] == [2] * 35
    target_of = {e.ordinal: e.step for e in of_kind(effective(run), "dispatched")}
    for step in range(31, 36):
        assert [target_of[ordinal] for ordinal in steps[step]] == [step - 1] * 2
    admitted_now = [e.step for e in of_kind(last_life(run), "dispatched")]
    assert admitted_now.count(30) == 2 - ready_30
    assert admitted_now.count(31) == 2 - ready_31


# H02: what was in flight, and the unused tail of a loader batch ---------------------------------


@pytest.mark.parametrize("load_replay_buffer", [True, False])
@pytest.mark.parametrize("sampler", ALL)
async def test_h02_prompts_in_flight_at_the_bundle_are_trained_after_the_restart(
    sampler: str, load_replay_buffer: bool
) -> None:
    async def slow_ones(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(prompt.ordinal / 10)
        if run.lives == 1 and prompt.ordinal in (9, 14):
            await anyio.sleep(1e4)

    config = settings(
        sampler,
        p=4,
        k=2,
        async_rl={"deadlines": {"rollout_s": 1e6}},
        checkpointing={"save_period": 2},
    )
    run = Lives(config, range(24), script=slow_ones)
    cut = await run.until_saved()
    assert cut.step == 2 and cut.counters["trained"] == 8
    assert [record.ordinal for record in cut.records] == list(range(8, cut.next_ordinal))
    assert set(states(cut)["in_flight"]) >= {9, 14}
    assert set(states(cut)["committed"]) >= {8, 10, 11}

    run.config = settings(
        sampler, p=4, k=2, checkpointing={"load_replay_buffer": load_replay_buffer}
    )
    result = await run.run()
    assert result is not None and result.reason == "exhausted"
    once = [ordinal for step in trained(run).values() for ordinal in step]
    dropped = [e.ordinal for e in of_kind(effective(run), "dropped")]
    assert sorted([*once, *dropped]) == list(range(24))  # type: ignore[type-var]
    assert {*range(8), 9, 14} <= set(once)
    assert dropped == []  # none was too old here, whatever the sampler
    again = {ordinal for ordinal, _, _ in run.engines.rollouts}
    assert again.isdisjoint(states(cut)["committed"]) is load_replay_buffer


@pytest.mark.parametrize("sampler", ALL)
async def test_h02_the_tail_of_a_loader_batch_is_used_next_and_survives(sampler: str) -> None:
    """Steps of two, loader batches of four: the cut falls between the halves of a batch."""
    config = settings(sampler, p=2, k=0, checkpointing={"save_period": 1})
    run = Lives(config, range(8))
    loaders: list[BatchLoader] = []
    start_life = run.start_life

    def with_loader() -> None:
        start_life()
        loaders.append(BatchLoader(range(8), 4))
        run.source = loaders[-1]  # type: ignore[assignment]

    run.start_life = with_loader  # type: ignore[method-assign]
    run.start_life()
    loader = loaders[-1]
    next_prompt = loader.next_prompt

    async def only_half() -> Any:
        if loader._given == 2:
            await anyio.sleep_forever()
        return await next_prompt()

    loader.next_prompt = only_half  # type: ignore[method-assign]
    cut = await run.until_saved()
    assert (loader.read, cut.position, cut.next_ordinal) == (4, {"given": 2}, 2)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 4)
    assert trained(run) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7]}


# H03: finished and not yet trained; a loader that ended on an edge ------------------------------


@pytest.mark.parametrize("pulls", [4, 8], ids=["loader-at-4", "edge-before-a-ninth"])
@pytest.mark.parametrize("sampler", ALL)
async def test_h03_what_was_generated_ahead_is_trained_and_no_epoch_begins_again(
    sampler: str, pulls: int
) -> None:
    config = settings(sampler, p=2, k=3, checkpointing={"save_period": 1})
    run = Lives(config, range(8), pulls=pulls)
    cut = await run.until_saved()
    assert cut.step == 1
    assert states(cut) == {"committed": list(range(2, pulls))}
    assert (cut.position, cut.exhausted) == (pulls, False)

    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 4)
    assert trained(run) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7]}
    assert run.source.pulled == list(range(pulls, 8))


async def test_h03_the_next_epoch_begins_where_the_last_one_ended() -> None:
    config = settings("weight_fifo", p=2, k=3, checkpointing={"save_period": 1})
    run = Lives(config, range(8), pulls=8, epochs=2)
    await run.until_saved()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 8)
    assert run.source.pulled == list(range(8))
    assert sum(trained(run).values(), []) == list(range(16))


# H04: a drop must not pin the resume position ---------------------------------------------------


async def test_h04_a_stale_drop_pins_nothing_and_the_books_stay_small() -> None:
    async def late(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 2:
            await anyio.sleep(20)

    config = settings("windowed", p=1, k=4, checkpointing={"save_period": 119})
    run = Lives(config, range(150), script=late, step_s=1)
    cut = await run.until_saved()
    assert cut.counters["dropped"] == 1 and cut.counters["trained"] == 119
    assert min(record.ordinal for record in cut.records) >= 119
    assert len(cut.records) <= 5  # in flight and buffered: the places
    before = set(sum(trained(run).values(), []))

    result = await run.run()
    assert result is not None and result.reason == "exhausted"
    steps = trained(run)
    after = set(sum((steps[step] for step in steps if step > 119), []))
    assert before.isdisjoint(after)
    assert before | after == set(range(150)) - {2}
    (dropped,) = of_kind(effective(run), "dropped")
    assert dropped.ordinal == 2 and (dropped.reason or "").startswith("stale")
    assert (result.counters["trained"], result.counters["dropped"]) == (149, 1)


# H14: the last step -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ALL)
async def test_h14_a_resume_near_or_past_the_last_step_ends_there(sampler: str) -> None:
    def twelve(steps: int = 12) -> Any:
        return settings(sampler, p=4, k=1, steps=steps, checkpointing={"save_period": 8})

    run = Lives(twelve(), range(48))
    cut = await run.until_saved()
    assert cut.step == 8

    lowered = Lives(twelve(6), range(48))
    lowered.disk, lowered.log = run.disk, run.log
    lowered._lived = True
    await nothing_to_do(lowered, step=8, bundles=[8])

    run.log = lowered.log
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 12)
    assert run.bundles() == [8, 12]
    assert of_kind(run.log.events, "stopped")[-1].reason == "max_steps"
    assert list(trained(run)) == list(range(1, 13))
    assert result.counters["trained"] == 48 and result.counters["samples"] == 96
    assert result.counters["tokens"] > cut.counters["tokens"] > 0

    await nothing_to_do(run, step=12, bundles=[8, 12])


async def nothing_to_do(run: Lives, *, step: int, bundles: list[int]) -> None:
    effects, began = run.disk.effects, anyio.current_time()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", step)
    assert (run.trainer.trained, run.engines.rollouts) == ([], [])
    assert (run.disk.effects, run.bundles()) == (effects, bundles)
    assert anyio.current_time() == began


# H21: admission after a restore -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "groups", "admitted"), [(50, 5, 3), (0, 0, 8), (50, 0, 8), (50, 8, 0)]
)
@pytest.mark.parametrize("sampler", GATED)
async def test_h21_a_resumed_run_admits_what_the_bound_leaves_room_for(
    sampler: str, version: int, groups: int, admitted: int
) -> None:
    """P=4, K=1, and far more places than the sampler may use. The trainer is held meanwhile."""
    config = settings(
        sampler,
        p=4,
        k=1,
        steps=version + 20,
        async_rl={"max_buffered_rollouts": 1000},
        checkpointing={"save_period": version or 1000},
    )
    run = Lives(config, range(500), pulls=4 * version + groups if version else None)
    if version:
        cut = await run.until_saved()
        assert (cut.weight_version, states(cut)) == (
            version,
            {"committed": list(range(200, 200 + groups))} if groups else {},
        )
    counted: list[int] = []
    start_life = run.start_life

    def with_held_trainer() -> None:
        start_life()
        prepare, held = run.trainer.prepare, [True]

        async def hold_once(batch: Any) -> None:
            if held.pop() if held else False:
                await anyio.sleep(500)
                counted.append(len(of_kind(last_life(run), "dispatched")))
            await prepare(batch)

        run.trainer.prepare = hold_once  # type: ignore[method-assign]

    run.start_life = with_held_trainer  # type: ignore[method-assign]
    if not version:
        run.start_life()
    result = await run.run()
    assert result is not None and result.step == version + 20
    assert counted == [admitted]
    lags = [step["train/staleness_versions_max"] for step in run.metrics.steps]
    assert len(lags) == 20
    if sampler != "ready_first":
        assert max(lags) <= 1
    trained(run)
