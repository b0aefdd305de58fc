"""What ports may do wrong to siblings that are kept, to the window, and to the time to save."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Set
from typing import Any

import anyio
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from test_siblings import G, checked, newest, settings, slow_last, two_seconds
from virtual_clock import VirtualClockLoop

from sc_core import controller
from sc_core.audit import audit
from sc_core.barrier import CheckpointBarrier
from sc_core.calls import inline
from sc_core.config import DeadlinesConfig
from sc_core.controller import RunResult
from sc_core.errors import CallCancelled, CallTimeout, WorkerDied
from sc_core.records import FinishedSibling, Prompt, PulledPrompt, Sample
from sc_core.rows import Rows
from sc_core.testing import MemoryRun
from sc_core.testing.data_plane import MemoryDataPlane, MemoryStore
from sc_core.testing.schedule import run_alone
from sc_core.verify import candidates, verify
from sc_core.watchdog import Watchdog

pytestmark = pytest.mark.anyio


def lives(run: MemoryRun) -> RunResult | None:
    """Live once on asyncio, which alone has cancels that no scope has sent."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(run.run())


IN_TREE = {"watchdog", "finaliser", "rollout pump", "prompts", "attempt", "sibling"}


def lives_until_cancelled(run: MemoryRun, names: Set[str], which: int) -> RunResult | str:
    """Live, and cancel the `which`-th task of these names before it has begun to run.

    Returns the result, or what the run said when it was cancelled.
    """
    seen: list[asyncio.Task[Any]] = []
    results: list[RunResult | str] = []

    def look() -> None:
        for task in sorted(asyncio.all_tasks() - set(seen), key=lambda task: task.get_name()):
            begun = inspect.getcoroutinestate(task.get_coro()) != inspect.CORO_CREATED  # type: ignore[arg-type]
            if task.get_name() in names and not begun:
                seen.append(task)
                if len(seen) == which + 1:
                    task.cancel()

    async def live() -> None:
        try:
            result = await run.run()
        except CallCancelled as exc:
            results.append(str(exc))
        else:
            assert result is not None
            results.append(result)
        assert asyncio.get_running_loop().time() < 100

    run_alone(live(), look)
    assert len(seen) > which
    seen.clear()
    gc.collect()  # the warning that a coroutine was never awaited belongs here
    return results[0]


# columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
@pytest.mark.parametrize("change", [{"more": 1}, {"tokens": None}], ids=str)
async def test_siblings_of_several_attempts_have_the_same_columns(
    granularity: str, change: dict[str, Any]
) -> None:
    failures = {"max_data_attempts_per_prompt": 2}
    run = MemoryRun(
        settings(granularity=granularity, async_rl={"rollout_failure": failures}),
        range(100),
        latency=two_seconds,
    )
    rollout = run.engines.rollout

    async def changed(prompt: Prompt, sibling: int, version: int) -> Sample:
        sample = await rollout(prompt, sibling, version)
        if (prompt.ordinal, sibling) != (5, 1):
            return sample
        fields = {**sample.fields, **change}
        return replace(sample, fields={k: v for k, v in fields.items() if v is not None})

    run.engines.rollout = changed  # type: ignore[method-assign]
    assert await run.run() is not None
    assert checked(run)["dropped"] == 1
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.reason is not None and "different columns" in dropped.reason


async def test_siblings_kept_over_a_restart_still_know_their_columns() -> None:
    run = MemoryRun(settings(), range(100), latency=slow_last)
    assert await run.run(crash_when=lambda e: e.event == "checkpoint" and e.step == 1) is None
    kept = [one for record in newest(run).records for one in record.finished]
    assert kept and {one.columns for one in kept} == {("reward", "tokens")}


def test_bundles_without_the_columns_of_their_siblings_keep_their_digest() -> None:
    """As written before siblings knew their columns: five fields, and no default among them."""
    one = FinishedSibling(sibling=0, sample_id="0.0_g0", reward=1.0, tokens=1, end_weight_version=0)
    assert set(to_builtins(one)) == {
        "sibling",
        "sample_id",
        "reward",
        "tokens",
        "end_weight_version",
    }


# cancelled by somebody else ----------------------------------------------------------------


@pytest.mark.parametrize("put", range(6))
@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
def test_no_group_is_committed_without_the_sibling_whose_put_was_cancelled(
    granularity: str, put: int
) -> None:
    puts = 0

    async def hooks(call: str, point: str) -> None:
        nonlocal puts
        if (call, point) == ("put_samples", "midway"):
            puts += 1
            if puts == put + 1:
                raise asyncio.CancelledError

    run = MemoryRun(settings(granularity=granularity), range(100), hooks=hooks)
    with pytest.raises(CallCancelled, match="outside this run"):
        lives(run)
    assert run.controller is not None
    run.controller.audit()
    groups = run.controller._state.ledger.index.groups()
    assert all(len(group.sample_ids) == G for group in groups)


def test_rows_of_a_put_cancelled_by_somebody_else_are_suspect() -> None:
    async def hooks(call: str, point: str) -> None:
        if point == "midway":
            raise asyncio.CancelledError

    async def put() -> None:
        barrier = CheckpointBarrier()
        rows = Rows(MemoryDataPlane(MemoryStore(), hooks), barrier, DeadlinesConfig())
        with pytest.raises(asyncio.CancelledError):
            async with barrier.mutation():
                await rows.put(["a", "b"], {"x": [1, 2]}, then=lambda _: None)
        assert rows.suspects == {"a", "b"}

    asyncio.run(put())


def test_no_bundle_is_published_whose_rows_nobody_has_checked() -> None:
    async def runner(work: Callable[..., Any], *args: Any) -> Any:
        if getattr(work, "__name__", "") == "check_inventory":
            raise asyncio.CancelledError
        return await inline(work, *args)

    run = MemoryRun(settings(), range(100))
    run.runner = runner
    with pytest.raises(CallCancelled, match="outside this run"):
        lives(run)
    assert run.bundles() == []


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("which", range(30))
@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
def test_a_task_cancelled_before_it_began_costs_an_attempt_or_ends_the_run(
    granularity: str, which: int
) -> None:
    """A slot, a sibling or a pump. With `drain`, one request too many would wait for ever."""
    drain = {"weight_sync_mode": "drain"}
    run = MemoryRun(
        settings(granularity=granularity, async_rl=drain), range(100), latency=two_seconds
    )
    result = lives_until_cancelled(run, IN_TREE, which)
    if isinstance(result, str):
        assert audit(run.log.events).ok
        return
    assert result.step == 6
    assert checked(run)["redispatched"] == 1
    assert run.controller is not None and run.controller._state.requests.value == 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_run_cancelled_before_it_began_says_so() -> None:
    said = lives_until_cancelled(MemoryRun(settings(), range(100)), {"train pump"}, 0)
    assert said == "the run was cancelled by something outside this run"


@pytest.mark.parametrize(
    "where, task", [(Watchdog, "watch"), (controller, "stop_in_time")], ids=["watch", "budget"]
)
def test_a_guard_cancelled_by_somebody_else_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, where: object, task: str
) -> None:
    async def cancelled(*_: Any) -> None:
        await anyio.sleep(3)
        raise asyncio.CancelledError

    monkeypatch.setattr(where, task, cancelled)
    config = settings(checkpointing={"checkpoint_must_save_by": "01:00:00:00"})
    with pytest.raises(CallCancelled, match="outside this run"):
        lives(MemoryRun(config, range(100), latency=two_seconds))


# time to save ----------------------------------------------------------------------------


async def test_time_is_left_for_a_publication_that_nothing_came_after() -> None:
    """It takes 20 s, and ends while a step waits for its last group, and nothing else happens."""
    budget = {"checkpoint_must_save_by": "00:00:01:00"}

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep({2: 10, 3: 400}.get(prompt.ordinal, 0))

    config = settings(
        async_rl={"sampler": {"name": "in_order"}}, checkpointing={"save_period": 1} | budget
    )
    run = MemoryRun(config, range(100), script=script)
    finalize = run.trainer.finalize_save

    async def slow() -> None:
        await anyio.sleep(20)
        await finalize()

    run.trainer.finalize_save = slow  # type: ignore[method-assign]
    began = anyio.current_time()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("must_save_by", 1)
    assert anyio.current_time() - began <= 60
    assert [r.state for r in newest(run).records] == ["committed", "in_flight"]


async def test_time_is_left_for_a_step_that_nothing_came_after() -> None:
    """Step 1 takes 30 s; meanwhile the only slot has begun what takes for ever."""
    budget = {"checkpoint_must_save_by": "00:00:01:00"}

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(400 if prompt.ordinal == 2 else 0)

    config = settings(
        async_rl={
            "sampler": {"name": "in_order", "max_lookahead_versions": 1},
            "max_inflight_prompts": 1,
        },
        checkpointing={"save_period": 100} | budget,
    )
    run = MemoryRun(config, range(100), script=script)
    train = run.trainer.train_microbatches

    async def slow(batch: Any) -> None:
        await anyio.sleep(30)
        await train(batch)

    run.trainer.train_microbatches = slow  # type: ignore[method-assign]
    began = anyio.current_time()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("must_save_by", 1)
    assert anyio.current_time() - began == 30


# several things at once --------------------------------------------------------------------


@pytest.mark.parametrize("sibling", [0, 1, 2, None])
@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
async def test_a_worker_that_answers_the_last_cancel_with_an_error_fails_no_run(
    granularity: str, sibling: int | None
) -> None:
    """As when its connection is gone already. With `fail`, a dropped prompt would end the run."""

    async def script(prompt: Prompt, which: int, version: int) -> None:
        if prompt.ordinal >= 12:
            try:
                await anyio.sleep_forever()
            finally:
                if sibling in (None, which):
                    raise ConnectionError("gone")

    fail = {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "fail"}
    config = settings(granularity=granularity, async_rl={"rollout_failure": fail})
    run = MemoryRun(config, range(100), script=script)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 6)
    checked(run)


@pytest.mark.parametrize("late", [False, True])
async def test_a_source_may_answer_a_cancel_with_an_error(late: bool) -> None:
    run = MemoryRun(settings(), range(100))
    next_prompt = run.source.next_prompt

    async def gone() -> PulledPrompt:
        if len(run.source.pulled) < (5 if late else 12):
            return await next_prompt()
        try:
            await anyio.sleep_forever()
        finally:
            raise ConnectionError("gone")

    run.source.next_prompt = gone  # type: ignore[method-assign]
    if late:
        with pytest.raises(CallTimeout, match=r"source\.next_prompt"):
            await run.run()
    else:
        result = await run.run()
        assert result is not None and (result.reason, result.step) == ("max_steps", 6)


@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
async def test_what_ends_the_run_is_named_before_what_fails_beside_it(granularity: str) -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 5 and sibling == 1:
            await anyio.sleep(1)
            raise ConnectionError("gone")
        if prompt.ordinal == 5 and sibling == 2:
            try:
                await anyio.sleep(1.5)
            finally:
                raise WorkerDied("the last engine", "killed")

    run = MemoryRun(
        settings(granularity=granularity), range(100), script=script, latency=two_seconds
    )
    with pytest.raises(WorkerDied):
        await run.run()


@pytest.mark.parametrize("granularity", ["sibling", "prompt_group"])
async def test_a_stop_saves_siblings_that_finished_since_the_last_bundle(granularity: str) -> None:
    """Of step 3 nothing is committed: one sibling of each group takes for ever."""
    calls: Counter[tuple[int, int]] = Counter()

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        calls[prompt.ordinal, sibling] += 1
        if prompt.ordinal >= 4 and run.lives == 1:
            await anyio.sleep(10 if sibling else 1000)

    budget = {"checkpoint_must_save_by": "00:00:01:00"}
    run = MemoryRun(
        settings(granularity=granularity, checkpointing=budget), range(100), script=script
    )
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("must_save_by", 2)
    saved = [event.step for event in run.log.events if event.event == "checkpoint"]
    assert saved == ([1, 2, 2] if granularity == "sibling" else [1, 2])
    assert await run.run() is not None
    assert calls[4, 0] == 2 and calls[4, 1] == (1 if granularity == "sibling" else 2)
    checked(run)


async def test_bundles_are_ranked_by_numbers_of_other_libraries_too() -> None:
    class Number:
        def __float__(self) -> float:
            return 0.5

    run = MemoryRun(settings(grpo={"max_num_steps": 1}), range(100))
    finish_step = run.trainer.finish_step

    async def finish() -> dict[str, Any]:
        await finish_step()
        return {"loss": Number(), "most": 10**400, "what": "text"}

    run.trainer.finish_step = finish  # type: ignore[method-assign]
    assert await run.run() is not None
    metrics = verify(candidates(run.directory, run.disk)[0], run.disk).info.metrics
    assert metrics["train/loss"] == 0.5
    assert metrics.keys().isdisjoint({"train/most", "train/what", "incarnation"})
