"""What follows when a prompt has used up its attempts, and what stands ready to replace it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from test_controller import SAMPLERS, at, fates, settings, uneven

from sc_core.audit import audit
from sc_core.config import ControllerConfig
from sc_core.errors import ConfigError, DataFailure, PromptDropped, TooManyDropped
from sc_core.events import Event
from sc_core.filters import ZeroVarianceFilter
from sc_core.ledger import Ledger
from sc_core.outlook import outlook
from sc_core.ports import Sampler
from sc_core.records import Cut, Prompt, PulledPrompt, Stamp
from sc_core.samplers import InOrder, ReadyFirst, WeightFifo
from sc_core.testing import MemoryRun
from sc_core.testing.ports import Script
from sc_core.verify import verify

pytestmark = pytest.mark.anyio
on_both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio-0"], indirect=True)
STEPS = 6


def failing(sampler: str = "in_order-0", *, rl: Any = None, **failure: Any) -> ControllerConfig:
    """Steps of 4 groups; a prompt that fails once has used up its attempts."""
    sections = {"rollout_failure": {"max_infra_attempts_per_prompt": 1} | failure, **(rl or {})}
    return settings(sampler, steps=STEPS, async_rl=sections)


def broken(ordinals: Collection[int], after_s: float = 0.0) -> Script:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal in ordinals:
            await anyio.sleep(after_s)
            raise ConnectionError("engine went away")

    return script


def events(run: MemoryRun, kind: str) -> list[Event]:
    """Of the last life."""
    mine = run.log.incarnation
    return [e for e in run.log.events if e.incarnation == mine and e.event == kind]


def lengths(run: MemoryRun) -> list[int]:
    return [len(step) for step in run.trainer.trained]


def summed(run: MemoryRun, name: str) -> int:
    return sum(step[name] for step in run.metrics.steps)


def cut_of(run: MemoryRun, step: int) -> Cut:
    return verify(run.directory / f"step_{step}", run.disk).cut


def within_places(run: MemoryRun) -> None:
    """The law holds, and so it does against every bundle."""
    assert run.controller is not None
    run.controller.audit()
    report = audit(run.log.events, [(f"step_{step}", cut_of(run, step)) for step in run.bundles()])
    assert report.ok and report.bundles, report


# shortfall ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "chunk"), [*((sampler, 1) for sampler in SAMPLERS), ("in_order-2", None)]
)
@on_both
async def test_a_dropped_prompt_makes_its_step_shorter(sampler: str, chunk: int | None) -> None:
    config = failing(
        sampler, rl={"min_groups_for_streaming_train": chunk}, on_dropped_prompt="shortfall"
    )
    run = MemoryRun(config, range(500), latency=uneven, script=broken({5, 6, 13, 15}, after_s=3))
    result = await run.run()
    assert result is not None and result.step == STEPS
    dropped = [event for event in events(run, "dropped") if event.ordinal in (5, 6, 13, 15)]
    assert len(dropped) == 4
    assert {(e.reason or "").partition(":")[0] for e in dropped} == {
        "infra failure, step made shorter"
    }
    shorter = Counter(event.step for event in dropped)
    assert lengths(run) == [4 - shorter[version] for version in range(STEPS)]
    if sampler.startswith("in_order"):
        target = {e.ordinal: e.step for e in events(run, "dispatched")}
        assert all(event.step == target[event.ordinal] for event in dropped)
    assert summed(run, "train/dropped_prompt_groups") == 4
    assert summed(run, "train/replaced_prompt_groups") == 0
    assert result.counters["infra_drops"] == result.counters["shortfall"] == 4
    within_places(run)


@pytest.mark.parametrize("sampler", SAMPLERS)
@on_both
async def test_no_step_takes_more_than_its_bound_because_another_was_short(sampler: str) -> None:
    """In-order steps have no group too many, and no lag exceeds the bound."""
    config = failing(sampler, on_dropped_prompt="shortfall")
    many = {ordinal for ordinal in range(100) if ordinal % 3 == 1}
    run = MemoryRun(config, range(500), latency=uneven, script=broken(many, after_s=2))
    result = await run.run()
    assert result is not None and result.step == STEPS
    assert min(lengths(run)) >= 1 and max(lengths(run)) <= 4
    if sampler.startswith("in_order"):
        targets = Counter(e.step for e in events(run, "dispatched"))
        short = Counter(e.step for e in events(run, "dropped") if e.step is not None)
        replaced = [e for e in events(run, "dropped") if e.step is None]
        assert targets[0] == 4 + len([e for e in replaced if e.ordinal < 4])  # type: ignore[operator]
        assert lengths(run) == [4 - short[version] for version in range(STEPS)]
    if sampler in ("in_order-2", "weight_fifo"):
        bound = 2 if sampler == "in_order-2" else 1
        assert max(s["train/staleness_versions_max"] for s in run.metrics.steps) <= bound
    within_places(run)


@pytest.mark.parametrize("sampler", SAMPLERS)
@on_both
async def test_the_last_group_of_a_step_is_replaced(sampler: str) -> None:
    config = failing(sampler, on_dropped_prompt="shortfall")
    run = MemoryRun(config, range(500), script=broken(range(12)), latency=lambda *_: 1.0)
    result = await run.run()
    assert result is not None and result.step == STEPS
    assert min(lengths(run)) == 1
    dropped = {e.ordinal: e for e in events(run, "dropped")}
    replaced = [dropped[ordinal] for ordinal in range(12) if dropped[ordinal].step is None]
    assert replaced and all((e.reason or "").startswith("infra failure: ") for e in replaced)
    assert summed(run, "train/dropped_prompt_groups") == 12
    assert summed(run, "train/replaced_prompt_groups") == len(replaced)
    within_places(run)


@on_both
async def test_a_step_that_waits_only_for_what_was_dropped_closes_at_once() -> None:
    config = failing(rl={"min_groups_for_streaming_train": 1}, on_dropped_prompt="shortfall")
    run = MemoryRun(config, range(500), script=broken({5}, after_s=30))
    closed: list[float] = []
    finish_step = run.trainer.finish_step

    async def finish() -> Any:
        closed.append(anyio.current_time())
        return await finish_step()

    run.trainer.finish_step = finish  # type: ignore[method-assign]
    began = anyio.current_time()
    assert await run.run() is not None
    assert run.trainer.trained[1] == (4, 6, 7)
    assert closed[1] - began == 30


@on_both
async def test_a_drop_beside_a_full_step_shortens_the_next() -> None:
    """While step 1 trains on all of its groups, one fails that no step is named for."""
    config = failing("ready_first", on_dropped_prompt="shortfall")
    run = MemoryRun(config, range(500), script=broken({5}, after_s=10))
    train = run.trainer.train_microbatches

    async def slow(batch: Any) -> None:
        await anyio.sleep(20)
        await train(batch)

    run.trainer.train_microbatches = slow  # type: ignore[method-assign]
    assert await run.run() is not None
    assert lengths(run) == [4, 3, *[4] * 4]
    within_places(run)


@pytest.mark.parametrize("sampler", SAMPLERS)
@on_both
async def test_a_crash_after_a_drop_gives_the_same_shorter_step(sampler: str) -> None:
    """A bundle is asked for at the drop; what failed before it does not fail again."""

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 6:
            await anyio.sleep(11)  # longer than 5 takes to fail
            run.controller.request_checkpoint()  # type: ignore[union-attr]
            await anyio.sleep(100)
        if prompt.ordinal == 5:
            await anyio.sleep(10)
            raise ConnectionError("engine went away")

    config = failing(
        sampler,
        rl={"min_groups_for_streaming_train": 1, "deadlines": {"rollout_s": 1000}},
        on_dropped_prompt="shortfall",
    )
    run = MemoryRun(config, range(500), script=script)
    finish_step = run.trainer.finish_step

    async def slow() -> Any:  # else those that need not wait for 5 would be far ahead
        await anyio.sleep(15)
        return await finish_step()

    run.trainer.finish_step = slow  # type: ignore[method-assign]
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    (step,) = run.bundles()
    cut = cut_of(run, step)
    ((short, count),) = cut.short_steps.items()
    assert count == 1 and short >= cut.weight_version
    assert "makes steps to come shorter, by 1 group that failed" in outlook(cut, config).notes
    run.script = None
    result = await run.run()
    assert result is not None and result.step == STEPS
    made = range(step, STEPS)
    assert lengths(run) == [3 if version == short else 4 for version in made]
    within_places(run)
    assert cut_of(run, STEPS).short_steps == {}


@pytest.mark.parametrize("per_step", [2, 6])
@pytest.mark.parametrize("sampler", ["in_order-2", "ready_first"])
@on_both
async def test_another_number_of_groups_per_step_keeps_what_is_short(
    sampler: str, per_step: int
) -> None:
    config = failing(sampler, on_dropped_prompt="shortfall")
    run = MemoryRun(config, range(500), script=broken({13, 14, 15}, after_s=30), latency=uneven)
    save = run.trainer.save

    async def save_late(directory: Any) -> None:
        await save(directory)
        await anyio.sleep(40)

    run.trainer.save = save_late  # type: ignore[method-assign]
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    cut = cut_of(run, 3)
    assert sum(cut.short_steps.values()) == 3
    run.script = None
    run.config = replace(config, grpo=replace(config.grpo, num_prompts_per_step=per_step))
    result = await run.run()
    assert result is not None and result.step == STEPS
    expected = [max(1, per_step - cut.short_steps.get(version, 0)) for version in range(3, STEPS)]
    assert lengths(run) == expected
    within_places(run)


@on_both
async def test_what_a_filter_drops_or_time_outdates_is_always_replaced() -> None:
    class Odd(ZeroVarianceFilter):
        def keep(self, rewards: Any) -> bool:
            kept.append(rewards)
            return len(kept) % 3 != 0

    kept: list[Any] = []
    fresh = {"name": "windowed", "max_staleness_versions": 0}
    config = failing(
        rl={"sampler": fresh, "max_buffered_rollouts": 8}, on_dropped_prompt="shortfall"
    )
    run = MemoryRun(config, range(500), latency=uneven, group_filter=Odd())
    assert await run.run() is not None
    assert lengths(run) == [4] * STEPS
    reasons = {(e.reason or "").partition(":")[0] for e in events(run, "dropped")}
    assert reasons == {"filtered", "stale"}
    assert summed(run, "train/dropped_prompt_groups") == 0
    assert run.metrics.steps[-1]["rollout/dropped_total"] == len(events(run, "dropped"))


def test_a_bundle_whose_short_steps_the_log_knows_nothing_of_is_named() -> None:
    cut = Ledger(prompts_per_step=4).cut(
        incarnation="one",
        event_seq=1,
        group_size=2,
        sampler="in_order",
        sampler_state={},
        source_fingerprint="",
        suspects=(),
    )
    started = Event(seq=1, t=0.0, incarnation="one", event="run_started", step=0)
    assert audit([started], [("step_0", cut)]).ok
    report = audit([started], [("step_0", replace(cut, short_steps={1: 2}))])
    assert "step_0 has the short steps {1: 2}; the log has {}" in str(report)


@on_both
async def test_a_later_step_that_goes_short_takes_no_place_from_the_one_to_fill() -> None:
    config = failing(
        "windowed", rl={"max_buffered_rollouts": 4}, on_dropped_prompt="shortfall"
    )  # as many places as a step has groups
    run = MemoryRun(config, range(100), script=broken({0}))
    result = await run.run()
    assert result is not None and result.step == STEPS
    assert lengths(run)[:3] == [4, 3, 4]
    within_places(run)


@on_both
async def test_a_shorter_step_leaves_no_healthy_group_over() -> None:
    config = settings(
        "windowed",
        steps=40,
        async_rl={
            "rollout_failure": {
                "max_infra_attempts_per_prompt": 1,
                "on_dropped_prompt": "shortfall",
            }
        },
    )
    run = MemoryRun(config, range(10**4), script=broken(range(0, 10**4, 7)), latency=lambda *_: 1.0)
    result = await run.run()
    assert result is not None and result.step == 40
    assert result.counters["shortfall"] > 20
    assert result.counters["evicted"] == 0
    within_places(run)


# admission of a short step ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "short", "admitted"),
    [
        (InOrder(1), {}, 8),
        (InOrder(1), {0: 1, 1: 2}, 5),
        (InOrder(1), {2: 3}, 8),
        (InOrder(1), {0: 9}, 5),
        (WeightFifo(1), {0: 1}, 7),
        (WeightFifo(1), {0: 3, 1: 3, 2: 3}, 2),
        (ReadyFirst(1), {1: 2}, 6),
        (ReadyFirst(0), {1: 2}, 4),
    ],
)
def test_a_sampler_lets_in_what_the_steps_to_come_take(
    sampler: Sampler, short: dict[int, int], admitted: int
) -> None:
    ledger = Ledger(prompts_per_step=4)
    ledger.short_steps.update(short)
    while (stamp := sampler.admit(ledger)) is not None:
        ledger.dispatch(ledger.pull(PulledPrompt("text", 0)).ordinal, stamp)
    assert ledger.live_count == admitted
    for step, count in short.items():
        assert ledger.live_of_target(step) <= max(1, 4 - count)


@pytest.mark.parametrize(
    ("sampler", "target", "selected", "short", "expected"),
    [
        (InOrder(1), 1, 0, {}, 1),
        (InOrder(1), 1, 0, {1: 2}, 1),
        (InOrder(1), 1, 0, {1: 3}, None),  # the last one
        (InOrder(1), None, 0, {}, None),  # no step counts on it
        (ReadyFirst(2), None, 0, {}, 0),
        (ReadyFirst(2), None, 3, {}, 0),
        (ReadyFirst(2), None, 4, {}, 1),  # the first is full
        (ReadyFirst(2), None, 3, {0: 1}, 1),
        (ReadyFirst(2), None, 4, {1: 3}, None),
        (WeightFifo(2), None, 0, {}, 2),
    ],
)
def test_which_step_goes_without_a_prompt(
    sampler: Sampler, target: int | None, selected: int, short: dict[int, int], expected: int | None
) -> None:
    ledger = Ledger(prompts_per_step=4)
    for ordinal in range(selected + 1):
        ledger.pull(PulledPrompt("text", 0))
        failed = ledger.dispatch(ordinal, Stamp(target))
    groups = [
        ledger.commit(ordinal, rewards=[1.0], tokens=0, end_weight_version=0)
        for ordinal in range(selected)
    ]
    ledger.select(groups)
    ledger.short_steps.update(short)
    assert ledger.can_shorten(sampler.step_of(ledger, failed)) == expected


def test_a_step_that_has_passed_is_not_shortened() -> None:
    ledger = Ledger(prompts_per_step=4)
    ledger.weight_version = 3
    assert ledger.can_shorten(2) is None and ledger.can_shorten(3) == 3


# bounds ------------------------------------------------------------------------------------


@on_both
async def test_drops_are_bounded_over_the_whole_history() -> None:
    """Two before the bundle, one that the crash undoes, and two after the resume."""
    config = failing(max_skipped_prompts=3)
    run = MemoryRun(config, range(500), script=broken({1, 7, 14, 22}, after_s=1))
    assert await run.run(crash_when=at("dropped", 3)) is None
    assert cut_of(run, 3).counters["infra_drops"] == 2
    with pytest.raises(TooManyDropped) as caught:
        await run.run()
    assert str(caught.value) == (
        "group 22.0 used up its attempts, after 3 prompts had been dropped;"
        " async_rl.rollout_failure.max_skipped_prompts is 3:"
        " ConnectionError: engine went away"
    )
    assert isinstance(caught.value, PromptDropped) and caught.value.group_id == "22.0"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    report = audit(run.log.events)  # the fourth is still there, for a resume with other settings
    assert report.ok and report.dropped == {"infra failure": 3}
    run.config = failing()
    result = await run.run()
    assert result is not None and result.counters["infra_drops"] == 4


@on_both
async def test_no_skipped_prompts_at_all() -> None:
    run = MemoryRun(failing(max_skipped_prompts=0), range(500), script=broken({7}))
    with pytest.raises(TooManyDropped, match=r"group 7\.0 .* after 0 prompts .* is 0"):
        await run.run()


@on_both
async def test_drops_in_a_row_say_how_many_there_were() -> None:
    config = failing(max_consecutive_dropped_prompts=5)
    run = MemoryRun(config, range(500), script=broken(range(8, 500)))
    with pytest.raises(TooManyDropped, match=r"after 5 prompts .* and no group committed since"):
        await run.run()
    assert fates(run) == {"trained": 8, "dropped": 5}


@on_both
async def test_both_causes_are_counted_apart() -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal in (3, 9, 12):
            raise DataFailure("no such image")
        if prompt.ordinal in (5, 11):
            raise ConnectionError("engine went away")

    run = MemoryRun(failing(max_infra_attempts_per_prompt=3), range(500), script=script)
    assert await run.run() is not None
    last = run.metrics.steps[-1]
    assert last["rollout/data_drops_total"] == 3
    assert last["rollout/infra_drops_total"] == 2
    assert last["rollout/skipped_total"] == last["rollout/dropped_total"] == 5
    assert last["rollout/redispatch_total"] == 4
    assert summed(run, "train/dropped_prompt_groups") == 5
    assert summed(run, "train/replaced_prompt_groups") == 5
    assert audit(run.log.events).dropped == {"data failure": 3, "infra failure": 2}


# back-off, attempts, deadlines ---------------------------------------------------------------


def one_step(failure: Any) -> ControllerConfig:
    return settings(steps=1, async_rl={"rollout_failure": failure})


@pytest.mark.parametrize(
    ("error", "waits"),
    [(ConnectionError("away"), [1, 2, 4, 5, 5]), (DataFailure("no image"), [1, 2, 4])],
    ids=["infra", "data"],
)
@on_both
async def test_each_cause_has_its_own_attempts_and_waits_longer_each_time(
    error: Exception, waits: list[float]
) -> None:
    tried: list[float] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 2 and sibling == 0:
            tried.append(anyio.current_time())
            raise error

    failure = {
        "max_infra_attempts_per_prompt": 6,
        "max_data_attempts_per_prompt": 4,
        "backoff_base_s": 1.0,
        "max_backoff_s": 5.0,
    }
    run = MemoryRun(
        settings(steps=1, async_rl={"rollout_failure": failure}), range(500), script=script
    )
    assert await run.run() is not None
    assert [after - before for before, after in pairwise(tried)] == waits
    (dropped,) = events(run, "dropped")
    assert dropped.group_id == f"2.{len(waits)}"


@on_both
async def test_a_failure_of_one_cause_uses_up_no_attempt_of_the_other() -> None:
    errors: list[Exception] = [
        ConnectionError("away"),
        DataFailure("bad"),
        ConnectionError("away"),
        DataFailure("bad"),
        ConnectionError("away"),
    ]
    tried: list[float] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 2 and sibling == 0:
            tried.append(anyio.current_time())
            if errors:
                raise errors.pop(0)

    failure = {
        "max_infra_attempts_per_prompt": 4,
        "max_data_attempts_per_prompt": 3,
        "backoff_base_s": 1.0,
    }
    run = MemoryRun(
        settings(steps=1, async_rl={"rollout_failure": failure}), range(500), script=script
    )
    assert await run.run() is not None
    assert events(run, "dropped") == []
    assert [after - before for before, after in pairwise(tried)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize("data", [False, True])
@on_both
async def test_attempts_survive_restarts(data: bool) -> None:
    """Three lives share four attempts: what was under way at a crash counts as no failure."""
    tried: list[tuple[int, float]] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 4 and sibling == 0:
            tried.append((run.lives, anyio.current_time()))
            raise DataFailure("bad") if data else ConnectionError("away")
        if prompt.ordinal == 5 and run.lives < 3:
            if sibling == 0:
                await anyio.sleep(15)
                run.controller.request_checkpoint()  # type: ignore[union-attr]
            await anyio.sleep(1000)

    cause = "data" if data else "infra"
    config = settings(
        steps=STEPS,
        async_rl={
            "rollout_failure": {
                f"max_{cause}_attempts_per_prompt": 4,
                "backoff_base_s": 10.0,
                "max_backoff_s": 100.0,
            },
            "deadlines": {"rollout_s": 5000},
        },
        checkpointing={"save_period": 100},
    )
    run = MemoryRun(config, range(500), script=script)
    for _ in range(2):  # killed 15 s in, with the next attempt due later
        assert await run.run(crash_when=at("checkpoint", 1)) is None
    result = await run.run()
    assert result is not None and result.step == STEPS
    assert Counter(life for life, _ in tried) == {1: 2, 2: 1, 3: 1}
    (dropped,) = events(run, "dropped")
    assert dropped.ordinal == 4 and result.counters[f"{cause}_drops"] == 1
    assert result.counters[f"{cause}_failures"] == 3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["rollout_s", "source_s", "data_plane_s"])
def test_no_deadline_is_without_a_bound(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"async_rl\.deadlines\.{name} is {seconds}; it must be"):
        settings(async_rl={"deadlines": {name: seconds}})


@pytest.mark.parametrize("name", ["max_skipped_prompts", "replacement_reserve_prompts"])
def test_numbers_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout_failure\.{name} is -1"):
        failing(**{name: -1})


# the reserve -----------------------------------------------------------------------------------


def slow_source(run: MemoryRun, seconds: float) -> None:
    """Later prompts than the first eight take their time to come."""
    next_prompt = run.source.next_prompt

    async def slow() -> PulledPrompt:
        if len(run.source.pulled) >= 8:
            await anyio.sleep(seconds)
        return await next_prompt()

    run.source.next_prompt = slow  # type: ignore[method-assign]


@pytest.mark.parametrize(("reserve", "waited_s"), [(0, 100), (1, 0), (4, 0)])
@on_both
async def test_a_dropped_prompt_is_replaced_without_waiting_for_the_source(
    reserve: int, waited_s: float
) -> None:
    """Prompt 1 fails after the source has given eight prompts and turned slow."""
    config = failing(replacement_reserve_prompts=reserve)
    run = MemoryRun(config, range(500), script=broken({1}, after_s=50), latency=lambda *_: 60.0)
    slow_source(run, 150)
    at_dispatch: dict[int, float] = {}
    append_many = run.log.append_many

    def timed(kind: Any, each: Any) -> int:
        if kind == "dispatched":
            at_dispatch.setdefault(each[0]["ordinal"], anyio.current_time() - began)
        return append_many(kind, each)

    run.log.append_many = timed  # type: ignore[method-assign]
    run.config = replace(config, grpo=replace(config.grpo, max_num_steps=1))
    if reserve == 0:  # nothing was asked of the source before
        run.source.pulled.extend(range(4))
    began = anyio.current_time()
    assert await run.run() is not None
    assert at_dispatch[4] == 50 + (150 if reserve == 0 else waited_s)


def at_commits(run: MemoryRun, look: Callable[[], None]) -> None:
    """Call `look` at each commit of this life, when the pump is at rest for a while."""
    append_many = run.log.append_many

    def looking(kind: Any, each: Any) -> int:
        if kind == "committed":
            look()
        return append_many(kind, each)

    run.log.append_many = looking  # type: ignore[method-assign]


def unadmitted(run: MemoryRun) -> list[int]:
    assert run.controller is not None
    return [r.ordinal for r in run.controller.ledger_records() if not r.admitted]


def one_by_one(prompt: Prompt, sibling: int) -> float:
    """No two groups finish together, whatever the order of tasks."""
    return 1 + prompt.ordinal % 5 + prompt.ordinal / 1e4


@pytest.mark.parametrize("sampler", ["in_order-2", "windowed", "ready_first"])
@on_both
async def test_a_reserve_waits_outside_of_places_and_changes_no_order(sampler: str) -> None:
    plain = MemoryRun(failing(sampler), range(500), latency=one_by_one)
    assert await plain.run() is not None
    config = failing(sampler, replacement_reserve_prompts=3)
    run = MemoryRun(config, range(500), latency=one_by_one)
    ahead: list[int] = []

    def look() -> None:
        assert run.controller is not None
        ahead.append(len(unadmitted(run)))
        live = len(run.controller.ledger_records())
        assert run.controller.statistics().places_held == live - ahead[-1]

    at_commits(run, look)
    assert await run.run() is not None
    assert max(ahead) == 3
    assert run.trainer.trained == plain.trainer.trained
    within_places(run)


@pytest.mark.parametrize(
    ("sampler", "before", "after"),
    [("in_order-2", 3, 0), ("in_order-2", 1, 3), ("windowed", 3, 1), ("windowed", 0, 2)],
)
@on_both
async def test_a_reserve_survives_a_restart_also_as_another_number(
    sampler: str, before: int, after: int
) -> None:
    run = MemoryRun(
        failing(sampler, replacement_reserve_prompts=before), range(500), latency=uneven
    )
    save, ahead = run.trainer.save, list[int]()

    async def save_late(directory: Any) -> None:
        await save(directory)
        await anyio.sleep(40)

    run.trainer.save = save_late  # type: ignore[method-assign]
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    reserve = [record.ordinal for record in cut_of(run, 3).records if not record.admitted]
    assert len(reserve) == before
    config = failing(sampler, replacement_reserve_prompts=after)
    run.config = replace(config, grpo=replace(config.grpo, max_num_steps=9))

    def look(event: Event) -> bool:
        if event.event == "committed":
            ahead.append(len(unadmitted(run)))
        return False

    result = await run.run(crash_when=look)
    assert result is not None and result.step == 9
    assert max(ahead[-4:]) == after
    first = {e.ordinal: e.seq for e in reversed(events(run, "dispatched"))}
    assert [first[ordinal] for ordinal in reserve] == sorted(first[o] for o in reserve)
    assert run.source.pulled[0] == cut_of(run, 3).position
    within_places(run)


@pytest.mark.parametrize("sampler", SAMPLERS)
@on_both
async def test_a_reserve_is_trained_before_the_prompts_are_exhausted(sampler: str) -> None:
    config = failing(sampler, replacement_reserve_prompts=5)
    run = MemoryRun(config, range(14), latency=uneven)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 4)
    assert fates(run) == {"trained": 14}
