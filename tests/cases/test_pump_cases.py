"""Public failures of the two pumps, each under its name in the collection of cases."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import trio
from lives import ALL, effective, of_kind, settings, trained
from trio.testing import MockClock

from sc_core.audit import audit
from sc_core.config import ControllerConfig
from sc_core.errors import CallCancelled, DataPlaneError, PromptDropped, RowsNotCleared
from sc_core.records import Cut, Prompt, Sample
from sc_core.testing import MemoryRun
from sc_core.testing.schedule import run_alone
from sc_core.verify import verify

pytestmark = pytest.mark.anyio
on_both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio-0"], indirect=True)
P, G = 4, 2


def one_second(prompt: Prompt, sibling: int) -> float:
    return 1.0


def sound(run: MemoryRun) -> None:
    """C1, C2; no half group can be selected; each row has an owner, or is known to have none."""
    assert run.controller is not None
    run.controller.audit()
    state = run.controller._state
    ledger, stats = state.ledger, run.controller.statistics()
    assert stats.places_held == ledger.live_count <= stats.places_capacity
    assert (stats.barrier.holders, stats.barrier.waiters) == ((), ())
    for group in ledger.index.groups():
        assert len(group.sample_ids) == G and run.store.rows.keys() >= set(group.sample_ids)
    assert not (run.store.rows.keys() ^ run.controller.rows()) - run.controller.suspects()
    assert audit(run.log.events).ok


# H05: a group that gives no result ------------------------------------------------------------

DEADLINE_S = 10.0
POLICIES: dict[str, dict[str, Any]] = {
    "retry": {"max_infra_attempts_per_prompt": 2},
    "replace": {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "replace"},
    "short-step": {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "shortfall"},
    "fail": {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "fail"},
}
FIRST_STEP = {"retry": (0, 1, 2, 3), "replace": (0, 1, 3, 4), "short-step": (0, 1, 3)}


async def nothing() -> Any:
    return None


async def cancelled_from_outside() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(1, task.cancel)
    await anyio.sleep(5)


async def gone_without_a_result(
    policy: str, first_attempt: Callable[[int], Awaitable[Any] | None]
) -> MemoryRun:
    """Two steps; `first_attempt` says what sibling i of group 2.0 returns, if not a sample."""
    rl = {"rollout_failure": POLICIES[policy], "deadlines": {"rollout_s": DEADLINE_S}}
    run = MemoryRun(settings(p=P, k=0, g=G, steps=2, async_rl=rl), range(100), latency=one_second)
    run.log._now = anyio.current_time
    rollout, append_many = run.engines.rollout, run.log.append_many
    at_resolution: list[float] = []

    async def spoiled(prompt: Prompt, sibling: int, version: int) -> Sample:
        found = first_attempt(sibling) if prompt.group_id == "2.0" else None
        if found is None:
            return await rollout(prompt, sibling, version)
        return await found  # type: ignore[no-any-return]

    def look(kind: Any, each: Any) -> int:
        if kind in ("dropped", "redispatched"):
            assert run.controller is not None
            assert each[0]["ordinal"] == 2
            run.controller.audit()  # places and slots of that instant
            at_resolution.append(anyio.current_time() - began)
        return append_many(kind, each)

    run.engines.rollout = spoiled  # type: ignore[method-assign]
    run.log.append_many = look  # type: ignore[method-assign]
    began = anyio.current_time()
    if policy == "fail":
        with pytest.raises(PromptDropped, match=r"group 2\.0 used up its attempts"):
            await run.run()
        assert anyio.current_time() - began <= DEADLINE_S
    else:
        result = await run.run()
        assert result is not None and result.step == 2
        assert len(at_resolution) == 1 and at_resolution[0] <= DEADLINE_S
        assert run.trainer.trained[0] == FIRST_STEP[policy]
        assert len(run.trainer.trained[1]) == P
    sound(run)
    return run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["a-nothing", "b-never-returns", "c-fewer-siblings"])
@on_both
async def test_h05_a_group_without_a_result_is_resolved_in_time(
    how: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def first_attempt(sibling: int) -> Awaitable[Any] | None:
        if how == "b-never-returns":
            return anyio.sleep_forever()
        return nothing() if how == "a-nothing" or sibling == 1 else None

    await gone_without_a_result(policy, first_attempt)
    assert "group 2.0 failed (infra)" in caplog.text


@pytest.mark.parametrize("sibling", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_h05_d_a_group_whose_task_is_cancelled_from_outside_is_resolved(
    policy: str, sibling: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On asyncio, which alone has cancels that no scope has sent."""

    async def live() -> None:
        await gone_without_a_result(
            policy, lambda which: cancelled_from_outside() if which == sibling else None
        )

    assert run_alone(live()) == []
    assert "group 2.0 failed (infra): CallCancelled" in caplog.text


# H07: the end of the data -----------------------------------------------------------------------

DATA = {"a": (6, 1, 0), "b": (6, 3, 0), "c-one-never-completes": (6, 1, 1), "d": (8, 1, 0)}
"""Prompts, epochs, and how many of the prompts never complete."""


@pytest.mark.parametrize("tail", ["train", "drop"])
@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("sampler", ALL)
@on_both
async def test_h07_a_run_ends_with_its_data(sampler: str, case: str, tail: str) -> None:
    prompts, epochs, lost = DATA[case]
    config = settings(
        sampler,
        p=P,
        k=1,
        steps=10,
        grpo={"short_last_step": tail},
        async_rl={
            "rollout_failure": {"max_infra_attempts_per_prompt": 1},
            "deadlines": {"rollout_s": DEADLINE_S},
        },
    )

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if lost and prompt.ordinal == 2:
            await anyio.sleep_forever()

    for batch in (P, 1):  # the loader drops the short last batch of each epoch, or keeps it
        run = MemoryRun(
            config, range(prompts), epochs=epochs, batch=batch, latency=one_second, script=script
        )
        given = prompts // batch * batch * epochs
        full, rest = divmod(given - lost, P)
        began = anyio.current_time()
        result = await run.run()
        assert anyio.current_time() - began <= DEADLINE_S + full + 1
        short = [rest] if rest and tail == "train" else []
        assert [len(groups) for groups in run.trainer.trained] == [P] * full + short
        assert result is not None and (result.reason, result.step) == (
            "exhausted",
            full + len(short),
        )
        selected = len(of_kind(effective(run), "selected"))  # no step is begun to be given up
        assert selected == sum(map(len, run.trainer.trained))
        reasons = Counter((e.reason or "").partition(":")[0] for e in dropped(run))
        left = {"short last step": rest} if rest and tail == "drop" else {}
        assert reasons == {**left, **({"infra failure": lost} if lost else {})}
        once = [ordinal for step in trained(run).values() for ordinal in step]
        assert sorted([*once, *(e.ordinal for e in dropped(run))]) == list(range(given))
        sound(run)
        cut = last_cut(run)
        assert (cut.position, cut.exhausted, cut.records) == (given, True, ())

        again = await run.run()
        assert again is not None and (again.reason, again.step) == ("exhausted", result.step)
        assert (run.trainer.trained, run.engines.rollouts) == ([], [])


@pytest.mark.parametrize("sampler", ALL)
@on_both
async def test_h07_a_source_that_was_given_more_epochs_goes_on(sampler: str) -> None:
    run = MemoryRun(settings(sampler, p=P, k=1, steps=10), range(6), latency=one_second)
    for epochs, made in ((1, [4, 2]), (1, []), (3, [4, 4, 4])):
        run.epochs = epochs
        result = await run.run()
        assert result is not None and result.reason == "exhausted"
        assert [len(groups) for groups in run.trainer.trained] == made
    assert last_cut(run).position == 18
    assert sorted(sum(trained(run).values(), [])) == list(range(18))
    sound(run)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("sampler", ALL)
@on_both
async def test_h07_a_short_last_step_that_was_begun_is_given_up_whole(
    sampler: str, chunk: int
) -> None:
    """The last prompt fails when the step has trained on the others already."""
    config = settings(
        sampler,
        p=P,
        k=0,
        grpo={"short_last_step": "drop"},
        async_rl={
            "min_groups_for_streaming_train": chunk,
            "rollout_failure": {"max_infra_attempts_per_prompt": 1},
        },
    )

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 7:
            await anyio.sleep(5)
            raise ConnectionError("engine went away")

    run = MemoryRun(config, range(8), latency=one_second, script=script)
    abandon_step, abandoned = run.trainer.abandon_step, list[float]()

    async def abandon() -> None:
        abandoned.append(anyio.current_time())
        await abandon_step()

    run.trainer.abandon_step = abandon  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 1)
    assert len(abandoned) == 1
    assert {e.reason for e in dropped(run) if e.ordinal != 7} == {"short last step: 3 of 4 groups"}
    assert run.store.rows.keys() == set()
    sound(run)


def dropped(run: MemoryRun) -> list[Any]:
    return of_kind(effective(run), "dropped")


def last_cut(run: MemoryRun) -> Cut:
    return verify(run.directory / f"step_{run.bundles()[-1]}", run.disk).cut


# H08: a failure at every point of an attempt -----------------------------------------------------

FAILING = 40
at_work: ContextVar[tuple[int, int]] = ContextVar("at_work", default=(-1, -1))  #: ordinal, sibling
POINTS = {
    "right-after-reserve": ("rollout", "before"),
    "in-generation": ("rollout", "midway"),
    "after-k-of-G-rows": ("put_samples", "midway"),
    "after-the-rows": ("put_samples", "after"),
}


def tight(granularity: str, *, steps: int = 1, attempts: int = 1, **sections: Any) -> Any:
    """Four places and no more."""
    failure = {
        "max_infra_attempts_per_prompt": attempts,
        "max_consecutive_dropped_prompts": 100,
        "backoff_base_s": 1.0,
    }
    return settings(
        p=P,
        k=0,
        g=G,
        steps=steps,
        async_rl={"max_buffered_rollouts": P, "rollout_failure": failure},
        rollout_recovery={"default_granularity": granularity},
        **sections,
    )


def failing_at(config: ControllerConfig, call: str, point: str, *, uncleared: bool) -> MemoryRun:
    """The first 40 groups fail there, with their last row if rows are written one by one."""
    by_sibling = config.rollout_recovery.default_granularity == "sibling"

    async def fail(name: str, where: str) -> None:
        ordinal, sibling = at_work.get()
        if not 0 <= ordinal < FAILING or (by_sibling and sibling != G - 1):
            return
        if (name, where) == (call, point) or (uncleared and name == "clear_samples"):
            raise DataPlaneError(f"{name} failed {where}")

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        at_work.set((prompt.ordinal, sibling))
        await fail("rollout", "before")
        await anyio.sleep(1)
        await fail("rollout", "midway")

    return MemoryRun(config, range(1000), script=script, hooks=fail)


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
@pytest.mark.parametrize("at", POINTS)
@on_both
async def test_h08_after_forty_failures_the_next_group_goes_through(
    at: str, granularity: str, attempts: int
) -> None:
    run = failing_at(tight(granularity, attempts=attempts), *POINTS[at], uncleared=False)
    append_many = run.log.append_many

    def look(kind: Any, each: Any) -> int:
        assert run.controller is not None
        if kind in ("dropped", "redispatched", "committed"):
            run.controller.audit()
            stats = run.controller.statistics()
            assert stats.places_held <= P and stats.in_flight <= P
        if kind == "selected":
            sound_rows = run.store.rows.keys()
            assert all(sound_rows >= set(g.sample_ids) for g in index(run).groups())
        return append_many(kind, each)

    run.log.append_many = look  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and result.step == 1
    assert run.trainer.trained == [tuple(range(FAILING, FAILING + P))]
    drops = dropped(run)
    assert sorted(e.ordinal for e in drops) == list(range(FAILING))
    name, where = POINTS[at]
    assert {e.reason for e in drops} == {f"infra failure: DataPlaneError: {name} failed {where}"}
    assert result.counters["infra_drops"] == FAILING
    assert result.counters["infra_failures"] == FAILING * (attempts - 1)
    assert len(of_kind(effective(run), "redispatched")) == FAILING * (attempts - 1)
    sound(run)


def index(run: MemoryRun) -> Any:
    assert run.controller is not None
    return run.controller._state.ledger.index


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
@pytest.mark.parametrize("at", ["after-k-of-G-rows", "after-the-rows"])
@on_both
async def test_h08_a_cleanup_that_fails_too_ends_the_run(at: str, granularity: str) -> None:
    """Its ids must not be used twice, and the next start clears them."""
    run = failing_at(tight(granularity), *POINTS[at], uncleared=True)
    with pytest.raises(RowsNotCleared, match="suspect rows could not be cleared"):
        await run.run()
    assert run.controller is not None and run.controller.suspects()
    assert len(index(run)) == 0
    sound(run)
    groups = [e.group_id for e in of_kind(run.log.events, "dispatched")]
    assert len(set(groups)) == len(groups) == P


# H08 by cancellation instead of an error, at every await

EVERY = 5  #: of the steps of the event loop at which a cancel might arrive


def cancelled_from_outside_at(granularity: str, sibling: int, step: int) -> str:
    """Two steps of training, in which somebody cancels the task that makes a sibling of group 5.

    It does so before the given step of the event loop, counted while that group is in flight.
    Returns what came of it.
    """
    config = tight(granularity, steps=2, attempts=3)
    run = MemoryRun(config, range(100), latency=one_second)
    rollout, tasks, outcomes = run.engines.rollout, list[Any](), list[str]()
    left = step

    async def noted(prompt: Prompt, which: int, version: int) -> Sample:
        if (prompt.group_id, which) == ("5.0", sibling):
            tasks.append(asyncio.current_task())
        return await rollout(prompt, which, version)

    def before_step() -> None:
        nonlocal left
        if tasks and left >= 0 and not tasks[0].done():
            assert run.controller is not None
            record = run.controller._state.ledger.get(5)
            if record is not None and record.state == "in_flight":
                left -= 1
                if left < 0:
                    tasks[0].cancel()

    async def live() -> None:
        try:
            result = await run.run()
        except CallCancelled:
            outcomes.append("ended")
            return
        finally:
            sound(run)
            assert run.controller is not None and run.controller._state.requests.value == 0
        assert result is not None and [len(step) for step in run.trainer.trained] == [P, P]
        again = len(of_kind(run.log.events, "redispatched"))
        outcomes.append("too late" if left >= 0 else f"{again} again")

    run.engines.rollout = noted  # type: ignore[method-assign]
    assert run_alone(live(), before_step) == []
    return outcomes[0]


@pytest.mark.parametrize("sibling", range(G))
@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
def test_h08_an_attempt_cancelled_from_outside_at_any_await_leaks_nothing(
    granularity: str, sibling: int
) -> None:
    """It costs an attempt, or ends the run by name: in the middle of a write nobody knows more."""
    outcomes = Counter[str]()
    step = 0
    while not outcomes["too late"]:
        outcomes[cancelled_from_outside_at(granularity, sibling, step)] += 1
        step += EVERY
    assert outcomes["1 again"] > 0
    assert outcomes.keys() <= {"1 again", "0 again", "ended", "too late"}


class _BeforeSteps(trio.abc.Instrument):
    def __init__(self, before_step: Callable[[], None]) -> None:
        self.before_step = before_step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.before_step()


def cancelled_at(backend: str, granularity: str, step: int) -> bool:
    """Cancel a run before that step of the event loop, then go on from its newest bundle.

    Returns whether it had so many.
    """
    config = tight(granularity, steps=2, attempts=3, checkpointing={"save_period": 1})
    run = MemoryRun(config, range(100), latency=one_second)
    scopes: list[anyio.CancelScope] = []
    left = step

    def before_step() -> None:
        nonlocal left
        if scopes and left >= 0:
            left -= 1
            if left < 0:
                scopes[0].cancel()

    async def live() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await run.run()
        if scope.cancelled_caught and run.controller is not None:
            sound(run)
        scopes.clear()
        result = await run.run()
        assert result is not None and result.step == 2
        assert [len(step) for step in trained(run).values()] == [P, P]
        sound(run)

    if backend == "asyncio":
        assert run_alone(live(), before_step) == []
    else:
        instrument = _BeforeSteps(before_step)
        trio.run(live, clock=MockClock(autojump_threshold=0), instruments=[instrument])
    return left < 0


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_h08_a_run_cancelled_at_any_await_leaks_nothing_and_goes_on(
    backend: str, granularity: str
) -> None:
    step = 0
    while cancelled_at(backend, granularity, step):
        step += 19
    assert step > 100
