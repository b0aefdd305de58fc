"""The weight gate: what ends when the version moves, what is waited for, who takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import (
    CallTimeout,
    DataPlaneError,
    EnginesFailed,
    RolloutError,
    WeightSyncError,
    WorkerDied,
)
from sc_core.events import Event
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.records import LedgerRecord, Prompt, PulledPrompt, Stamp
from sc_core.samplers import InOrder, Windowed
from sc_core.stale import StaleAttempts
from sc_core.state import RunState
from sc_core.testing import MemoryEngines, MemoryEventLog, MemoryRun, MemoryTrainer
from sc_core.testing.data_plane import MemoryDataPlane, MemoryStore

pytestmark = pytest.mark.anyio


def settings(
    mode: str = "abort_stale", *, steps: int = 6, siblings: int = 2, k: int = 1, **sections: Any
) -> ControllerConfig:
    data: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": siblings,
            "max_num_steps": steps,
        },
        "async_rl": {
            "weight_sync_mode": mode,
            "sampler": {"name": "windowed", "max_staleness_versions": k},
        },
        "rollout_recovery": {},
        "checkpointing": {},
    }
    for section, values in sections.items():
        data[section] |= values
    return decode(data, ControllerConfig)


def told(run: MemoryRun, ordinal: int) -> list[Event]:
    return [event for event in run.log.events if event.ordinal == ordinal]


def kinds(run: MemoryRun, ordinal: int) -> list[str]:
    return [event.event for event in told(run, ordinal)]


def check(run: MemoryRun) -> None:
    """The law holds, no request is counted that is not there, and no row is left over."""
    report = audit(run.log.events)
    assert report.ok, report.violations
    assert run.controller is not None
    run.controller.audit()
    assert run.controller._state.requests.value == 0
    assert run.store.rows.keys() == run.controller.rows()
    assert not any(run.engines.under_way.values())


def hangs(*ordinals: int) -> Callable[[Prompt, int, int], Any]:
    """These prompts never come back; the others take a second."""

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal in ordinals:
            await anyio.sleep_forever()
        await anyio.sleep(1)

    return script


# abort_stale -----------------------------------------------------------------------------


async def test_groups_too_old_end_as_soon_as_the_version_moves() -> None:
    ended: list[tuple[int, int, int]] = []  #: ordinal; version then, of engines and the run

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        try:
            await hangs(1, 2)(prompt, sibling, version)
        finally:
            assert run.controller is not None
            if prompt.ordinal in (1, 2):
                now = run.controller.statistics().weight_version
                ended.append((prompt.ordinal, run.engines.serves["engine0"], now))

    run = MemoryRun(settings(), range(100), script=script)
    result = await run.run()
    assert result is not None and result.step == 6
    check(run)
    assert (result.counters["aborted"], result.counters["dropped"]) == (2, 2)
    for ordinal in (1, 2):
        assert kinds(run, ordinal) == ["admitted", "dispatched", "aborted", "dropped"]
        assert told(run, ordinal)[-1].reason == "stale: 2 versions old"
        assert told(run, ordinal)[2].group_id == told(run, ordinal)[3].group_id == f"{ordinal}.0"
    assert sorted(ended) == [(1, 1, 2)] * 2 + [(2, 1, 2)] * 2, "before any engine has version 2"
    aborted = [step["train/aborted_stale_inflight_groups"] for step in run.metrics.steps]
    assert aborted[0] == 0 and sum(aborted) == 2


@pytest.mark.parametrize("mode", ["in_flight", "drain"])
async def test_other_modes_let_groups_too_old_finish_and_evict_them(mode: str) -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(10 if prompt.ordinal == 1 and mode == "in_flight" else 1)

    run = MemoryRun(settings(mode, steps=20, k=1), range(100), script=script)
    result = await run.run()
    assert result is not None and result.step == 20
    check(run)
    assert result.counters["aborted"] == 0
    assert all(step["train/aborted_stale_inflight_groups"] == 0 for step in run.metrics.steps)
    story = ["committed", "evicted", "dropped"] if mode == "in_flight" else ["committed"]
    assert kinds(run, 1)[2 : 2 + len(story)] == story


async def test_an_aborted_prompt_goes_out_again_up_to_its_cap() -> None:
    config = settings(async_rl={"on_stale_prompt": "requeue", "max_stale_requeues": 2}, steps=12)
    run = MemoryRun(config, range(100), script=hangs(1))
    result = await run.run()
    assert result is not None and result.step == 12
    check(run)
    again = ["aborted", "redispatched", "dispatched"]
    assert kinds(run, 1) == ["admitted", "dispatched", *again, *again, "aborted", "dropped"]
    versions = [event.weight_version for event in told(run, 1) if event.event == "dispatched"]
    assert versions == sorted(set(versions)), "each attempt has a stamp of its own"
    assert (result.counters["aborted"], result.counters["dropped"]) == (3, 1)
    assert result.counters["infra_failures"] == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_a_commit_under_way_is_finished_or_undone(fails: bool) -> None:
    """Group 1 is on its way into the data plane when it becomes too old."""
    finished: list[int] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(0.75 if prompt.ordinal == 1 else 1)
        if prompt.ordinal == 1:
            finished.append(sibling)

    async def hooks(call: str, point: str) -> None:
        if (call, point, len(finished)) == ("put_samples", "midway", 2):
            finished.clear()
            await anyio.sleep(20)
            if fails:
                raise DataPlaneError("the put failed")

    run = MemoryRun(settings(steps=30), range(100), script=script, hooks=hooks)
    result = await run.run()
    assert result is not None and result.step == 30
    check(run)
    if fails:
        assert kinds(run, 1)[2:] == ["aborted", "dropped"]
        assert result.counters["infra_failures"] == 0
    else:
        assert kinds(run, 1)[2:] == ["committed", "evicted", "dropped"]
        assert result.counters["aborted"] == 0


async def test_siblings_that_had_finished_go_with_their_aborted_group() -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 1 and sibling == 2:
            await anyio.sleep_forever()
        await anyio.sleep(1)

    config = settings(
        siblings=3,
        rollout_recovery={"default_granularity": "sibling"},
        async_rl={"on_stale_prompt": "requeue", "max_stale_requeues": 1},
    )
    run = MemoryRun(config, range(100), script=script)
    result = await run.run()
    assert result is not None and result.counters["aborted"] == 2
    check(run)
    again = ["aborted", "redispatched", "dispatched", "aborted", "dropped"]
    assert kinds(run, 1)[2:] == again
    assert sum(ordinal == 1 for ordinal, _, _ in run.engines.rollouts) == 6, "all were made anew"
    assert run.controller is not None and run.controller.suspects() == frozenset()


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
@pytest.mark.parametrize("policy", ["drop", "requeue"])
async def test_a_crash_between_aborts_loses_and_repeats_nothing(
    granularity: str, policy: str
) -> None:
    seen: list[Event] = []

    def second_abort(event: Event) -> bool:
        seen.append(event)
        return [each.event for each in seen].count("aborted") == 2 and event.event == "aborted"

    config = settings(
        async_rl={"on_stale_prompt": policy},
        rollout_recovery={"default_granularity": granularity},
        checkpointing={"save_period": 1},
    )
    run = MemoryRun(config, range(100), script=hangs(1, 2))
    assert await run.run(crash_when=second_abort) is None
    assert run.bundles() != []
    result = await run.run()
    assert result is not None and result.step == 6
    check(run)


async def test_an_attempt_that_is_too_old_before_it_begins_sends_nothing() -> None:
    ledger = Ledger(prompts_per_step=1)
    state = RunState(ledger, Places(2), Windowed(0), MemoryEventLog())
    state.pulled(PulledPrompt("payload", 1))
    record = state.dispatched(0, Stamp())
    state.requests.set(3)
    ledger.step = ledger.weight_version = 1

    class Builder:
        async def build(self, record: LedgerRecord, version: int) -> bool:
            raise AssertionError("it was begun")

        def forgo(self, record: LedgerRecord) -> None:
            state.requests.set(0)

    config = settings().async_rl
    stale = StaleAttempts(state, config, Builder(), None, None)  # type: ignore[arg-type]
    assert await stale.build(record, 0) is False
    assert (len(ledger), state.requests.value, state.places.held) == (0, 0, 0)


def test_an_aborted_group_whose_step_has_passed_is_meant_for_the_next() -> None:
    ledger = Ledger(prompts_per_step=1)
    state = RunState(ledger, Places(2), InOrder(1), MemoryEventLog())
    state.pulled(PulledPrompt("payload", 1))
    record = state.dispatched(0, Stamp(target_step=0))
    ledger.step = ledger.weight_version = 2
    state.aborted(record, requeue=True, reason="stale")
    again = ledger.get(0)
    assert again is not None and (again.state, again.target_step) == ("waiting", 2)


async def test_an_abort_looks_at_nothing_but_the_versions_under_way() -> None:
    """Of 1000 attempts under way, the 3 that are too old are touched."""
    ledger = Ledger(prompts_per_step=1)
    asked: list[int] = []

    class Sampler(Windowed):
        def may_abort(self, start_weight_version: int, weight_version: int) -> bool:
            asked.append(start_weight_version)
            return super().may_abort(start_weight_version, weight_version)

    state = RunState(ledger, Places(1000), Sampler(0), MemoryEventLog())

    class Builder:
        async def build(self, record: LedgerRecord, version: int) -> bool:
            await anyio.sleep_forever()
            raise AssertionError

    config = settings().async_rl
    stale = StaleAttempts(state, config, Builder(), None, None)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tg:
        for ordinal in range(1000):
            if ordinal == 3:
                ledger.step = ledger.weight_version = 1
            state.pulled(PulledPrompt("payload", ordinal))
            tg.start_soon(stale.build, state.dispatched(ordinal, Stamp()), ledger.weight_version)
            if ordinal == 2:
                await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        asked.clear()
        stale.abort()
        assert asked == [0, 1]
        await anyio.wait_all_tasks_blocked()
        assert ledger.in_flight_count == 997
        tg.cancel_scope.cancel()
    assert (ledger.counters["aborted"], ledger.in_flight_count) == (3, 997)
    assert stale._under_way == {}


# drain -----------------------------------------------------------------------------------


async def test_a_drain_lets_requests_end_by_the_weights_they_began_with() -> None:
    samples: list[tuple[int, int | None]] = []

    def uneven(prompt: Prompt, sibling: int) -> float:
        return 0.5 + (prompt.ordinal * 7 + sibling * 3) % 11

    run = MemoryRun(settings("drain", steps=10), range(1000), latency=uneven)
    rollout = run.engines.rollout

    async def noted(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        samples.append((version, sample.end_weight_version))
        return sample

    run.engines.rollout = noted  # type: ignore[method-assign]
    assert await run.run() is not None
    check(run)
    assert len({version for version, _ in samples}) >= 9
    assert all(start == end for start, end in samples)


async def test_requests_that_cant_be_ended_are_named_when_a_drain_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        with anyio.CancelScope(shield=prompt.ordinal == 3):
            await anyio.sleep(5000 if prompt.ordinal == 3 else 1)

    run = MemoryRun(settings("drain", siblings=1), range(100), script=script)
    with pytest.raises(
        CallTimeout, match=r"drain of 1 requests \(groups 3.0\) did not return within 900 s"
    ):
        await run.run()
    assert any("hold up the end of the run" in message for message in caplog.messages)


async def test_a_drain_waits_for_turns_and_later_turns_wait_for_the_weights() -> None:
    turns: list[tuple[int, int, int]] = []  #: ordinal, version at its beginning and at its end

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.turns is not None
        for _ in range(3 if prompt.ordinal == 1 else 1):
            async with run.turns.turn() as served:
                await anyio.sleep(2)
                turns.append((prompt.ordinal, served, run.engines.serves["engine0"]))
            await anyio.sleep(3)

    run = MemoryRun(settings("drain", k=3, siblings=1), range(100), script=script, turns=True)
    assert await run.run() is not None
    check(run)
    assert all(began == ended for _, began, ended in turns)
    versions = [began for ordinal, began, _ in turns if ordinal == 1]
    assert len(versions) == 3 and versions[0] < versions[-1], "weights moved between two turns"
    assert run.turns is not None and run.turns.under_way.value == 0


# engines that come and go ------------------------------------------------------------------


def engines(count: int) -> MemoryEngines:
    trainer = MemoryTrainer(MemoryDataPlane(MemoryStore()))
    return MemoryEngines(trainer, engines=count, latency=lambda prompt, sibling: 1.0)


async def test_an_engine_that_joins_has_the_weights_before_its_first_request() -> None:
    fleet = engines(1)
    await fleet.transfer(4)
    await fleet.join("late")
    assert fleet.serves == {"engine0": 4, "late": 4}
    await fleet.pause()
    async with anyio.create_task_group() as tg:
        tg.start_soon(fleet.join, "later")
        await anyio.wait_all_tasks_blocked()
        assert "later" not in fleet.serves, "a sync is under way"
        await fleet.transfer(5)
        await fleet.resume()
    assert fleet.serves == {"engine0": 5, "late": 5, "later": 5}
    with pytest.raises(ValueError, match="an engine late already"):
        await fleet.join("late")
    fleet.leave("late")
    assert await fleet.transfer(6) == {"engine0": 6, "later": 6}


async def test_engines_join_and_leave_while_a_run_goes_on() -> None:
    moves = {3: "late", 6: ""}

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        assert min(run.engines.serves.values()) >= version
        move = moves.pop(version, None)
        if move:
            await run.engines.join(move)
        elif move == "":
            run.engines.leave("engine0")

    def uneven(prompt: Prompt, sibling: int) -> float:
        return 1 + prompt.ordinal % 3

    run = MemoryRun(settings("in_flight", steps=10), range(1000), script=script, latency=uneven)
    assert await run.run() is not None
    check(run)
    syncs = [event.engines for event in run.log.events if event.event == "weight_sync"]
    changes = [each for each in syncs if each is not None]
    assert changes == [("engine0",), ("engine0", "late"), ("late",)]
    assert run.controller is not None
    assert run.controller.statistics().engines == ("late",)


async def test_an_engine_that_was_put_out_may_come_back() -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if version == 3 and "engine1" not in run.engines.serves:
            run.engines.fail("pause", "engine1", 0)
            await run.engines.join("engine1")

    config = settings("in_flight", steps=6)
    run = MemoryRun(
        config, range(100), script=script, latency=lambda p, s: 1, engines=2, replaceable=True
    )
    run.engines.fail("pause", "engine1", 99)
    assert await run.run() is not None
    assert run.controller is not None
    stats = run.controller.statistics()
    assert (stats.engines, dict(stats.engines_out)) == (("engine0", "engine1"), {})
    syncs = [event for event in run.log.events if event.event == "weight_sync"]
    assert syncs[0].engines == ("engine0",) and syncs[0].reason is not None
    assert [event.reason for event in syncs[1:]] == [None] * 6


@pytest.mark.parametrize("during", ["transfer", "resume"])
async def test_an_engine_lost_in_a_sync_that_it_confirmed_does_not_serve_after_it(
    during: str,
) -> None:
    """Nor does the log say so; but what it made by then, after a resume, is in order."""
    run = MemoryRun(settings("in_flight"), range(100), latency=lambda p, s: 1, engines=2)
    call = getattr(run.engines, during)
    told: list[Any] = []

    async def then_one_dies(*version: int) -> Any:
        answer = await call(*version)
        controller = run.controller
        if run.engines.serves["engine1"] == 3 and not told and controller is not None:
            await anyio.sleep(1.5)  # requests end
            controller.engine_is("engine1", "restarting", "it died")
            told.append(controller)
        return answer

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if told and version == 3 and len(told) == 1:
            told.append(run.controller and run.controller.statistics())

    setattr(run.engines, during, then_one_dies)
    run.engines._script = script
    assert await run.run() is not None
    check(run)
    stats = told[1]
    assert stats.engines == ("engine0",)
    assert stats.engines_away == {"engine1": "restarting: it died"}
    (lost,) = [event for event in run.log.events if event.event == "engine"]
    assert lost.weight_version == (3 if during == "resume" else None)
    syncs = [event for event in run.log.events if event.event == "weight_sync"]
    assert [event.engines for event in syncs if event.engines] == [
        ("engine0", "engine1"),
        ("engine0",),
        ("engine0", "engine1"),
    ]


@pytest.mark.parametrize("stopped", ["before", "during"])
async def test_a_stop_while_there_is_no_engine_saves_the_step_and_ends(stopped: str) -> None:
    run = MemoryRun(settings("in_flight", checkpointing={"save_period": 100}), range(100))
    transfer = run.engines.transfer

    async def none_is_left(version: int) -> Any:
        if version != 2:
            return await transfer(version)
        assert run.controller is not None
        if stopped == "before":
            run.controller.stop("by hand")
        assert await run.controller.stop_requested() == "by hand"
        raise WorkerDied("every engine", "none is left to take the weights")

    async def stop() -> None:
        await anyio.sleep(100)
        assert run.controller is not None
        assert run.controller.statistics().step == 2
        run.controller.stop("by hand")

    run.engines.transfer = none_is_left  # type: ignore[method-assign]
    async with anyio.create_task_group() as tg:
        if stopped == "during":
            tg.start_soon(stop)
        result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 2)
    assert run.bundles() == [2] and not run.engines.paused
    check(run)
    assert run.controller is not None
    assert run.controller.statistics().gate_closed_for == "weight sync of version 2"


async def test_without_a_stop_the_last_engine_s_death_ends_the_run() -> None:
    run = MemoryRun(settings("in_flight"), range(100))

    async def none_is_left(version: int) -> Any:
        raise WorkerDied("every engine", "none is left to take the weights")

    run.engines.transfer = none_is_left  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match="none is left"):
        await run.run()


async def test_a_fleet_that_keeps_what_it_was_to_put_out_ends_the_run() -> None:
    run = MemoryRun(settings(), range(100), engines=2, replaceable=True)
    run.engines.put_out = lambda engine, reason: 1  # type: ignore[method-assign]
    run.engines.fail("pause", "engine1", 99)
    with pytest.raises(EnginesFailed, match="pause failed on engine1"):
        await run.run()


async def test_what_failed_first_is_said_although_engines_stay_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = MemoryRun(settings(), range(100))

    async def nobody(version: int) -> dict[str, int]:
        return {}

    async def broken() -> None:
        raise OSError("the link is down")

    run.engines.transfer, run.engines.resume = nobody, broken  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="version 0 was confirmed by no engine"):
        await run.run()
    (paused,) = [message for message in caplog.messages if "may still be paused" in message]
    assert paused.endswith("weight_sync.resume failed: OSError: the link is down")


async def test_requests_of_an_engine_put_out_go_to_others() -> None:
    fleet = engines(2)
    await fleet.transfer(1)
    prompt = Prompt(ordinal=0, group_id="0.0", payload=None)  # type: ignore[arg-type]
    ended: list[str] = []

    async def ask() -> None:
        try:
            ended.append(str((await fleet.rollout(prompt, 0, 1)).end_weight_version))
        except RolloutError as exc:
            ended.append(str(exc))

    async with anyio.create_task_group() as tg:
        tg.start_soon(ask)
        tg.start_soon(ask)
        await anyio.sleep(0.5)
        assert fleet.under_way == {"engine0": 1, "engine1": 1}
        assert fleet.put_out("engine0", "it is slow") == 1
        await anyio.wait_all_tasks_blocked()
        assert ended == ["engine0 was put out of service: it is slow"]
        tg.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert fleet.under_way == {"engine1": 2}
    assert ended[1:] == ["1", "1"]
