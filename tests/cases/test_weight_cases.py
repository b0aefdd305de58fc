"""H19 and H20: which weights made a group, and what is left of a sync that failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest
from lives import ALL, Lives, effective, of_kind, settings, trained

from sc_core.config import ControllerConfig
from sc_core.errors import CallTimeout, EnginesFailed, RolloutError, WeightSyncError
from sc_core.events import Event
from sc_core.ports import EventKind
from sc_core.records import Group, Prompt
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio

MODES = ["in_flight", "drain", "abort_stale"]


# H19: versions of samples


def windowed(steps: int = 9, **rl: Any) -> ControllerConfig:
    """K = 1, one group per step and two under way: one may be slow while others train."""
    return settings(
        "windowed", p=1, k=1, g=1, steps=steps, async_rl={"max_buffered_rollouts": 2} | rl
    )


class Slow(Lives):
    """One group is dispatched at version 3 and does as it is told; the others take a second."""

    def __init__(self, tell: Callable[[Slow, Prompt], Awaitable[None]], **options: Any) -> None:
        self.slow: int | None = None
        self.seen: dict[str, Group] = {}  #: groups at their commit

        async def script(prompt: Prompt, sibling: int, version: int) -> None:
            if self.slow is None and version == 3:
                self.slow = prompt.ordinal
                await tell(self, prompt)
            else:
                await anyio.sleep(1)

        super().__init__(
            windowed(), range(100), script=script, latency=no_time, step_s=1, **options
        )

    def start_life(self) -> None:
        super().start_life()
        append_many = self.log.append_many

        def notice(kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
            assert self.controller is not None or kind == "run_started"
            if kind == "committed" and self.controller is not None:
                group_id = each[0]["group_id"]
                group = self.controller._state.ledger.index.get(group_id)
                assert group is not None
                self.seen[group_id] = group
            return append_many(kind, each)

        self.log.append_many = notice  # type: ignore[method-assign]

    async def until_served(self, version: int) -> None:
        while self.engines.serves["engine0"] < version:  # noqa: ASYNC110 - on a virtual clock
            await anyio.sleep(0.25)

    def story(self) -> list[Event]:
        return [event for event in effective(self) if event.ordinal == self.slow]


def no_time(prompt: Prompt, sibling: int) -> float:
    return 0.0


def kinds(events: Sequence[Event]) -> list[str]:
    return [event.event for event in events]


async def test_h19_a_group_is_as_old_as_its_dispatch_however_late_its_samples_are() -> None:
    run = Slow(lambda run, _: run.until_served(5))
    assert await run.run() is not None
    group = run.seen[f"{run.slow}.0"]
    assert (group.start_weight_version, group.end_weight_version) == (3, 5)
    story = run.story()
    assert kinds(story) == ["admitted", "dispatched", "committed", "evicted", "dropped"]
    assert (story[1].weight_version, story[2].weight_version) == (3, 3)
    assert story[4].reason == "stale: 2 versions old"
    assert run.slow not in [ordinal for step in trained(run).values() for ordinal in step]


async def test_h19_turns_of_three_versions_count_as_the_first() -> None:
    served: list[int] = []

    async def three_turns(run: Slow, prompt: Prompt) -> None:
        assert run.turns is not None
        for version in (3, 4, 5):
            await run.until_served(version)
            async with run.turns.turn() as at:
                served.append(at)
                assert run.engines.serves["engine0"] == at

    run = Slow(three_turns, turns=True)
    assert await run.run() is not None
    assert served == [3, 4, 5]
    group = run.seen[f"{run.slow}.0"]
    assert (group.start_weight_version, group.end_weight_version) == (3, 5)
    assert kinds(run.story())[2:] == ["committed", "evicted", "dropped"]


async def test_h19_a_retry_is_stamped_with_the_version_of_its_own_dispatch() -> None:
    async def fail_at_5(run: Slow, prompt: Prompt) -> None:
        await run.until_served(5)
        raise RolloutError("the first attempt")

    run = Slow(fail_at_5)
    run.config = windowed(rollout_failure={"backoff_base_s": 0.0})
    assert await run.run() is not None
    group = run.seen[f"{run.slow}.1"]
    assert group.start_weight_version == 5
    story = run.story()
    assert kinds(story)[1:5] == ["dispatched", "redispatched", "dispatched", "committed"]
    assert (story[1].weight_version, story[3].weight_version) == (3, 5)
    assert run.slow in [ordinal for step in trained(run).values() for ordinal in step]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", ALL)
async def test_h19_no_request_leaves_for_an_engine_older_than_its_stamp(
    sampler: str, mode: str
) -> None:
    """Syncs take their time and groups finish at any moment of them."""
    served: list[int] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        oldest = min(run.engines.serves.values())
        served.append(oldest)
        assert oldest >= version
        if mode == "drain":
            assert oldest == version and not run.engines.paused

    def uneven(prompt: Prompt, sibling: int) -> float:
        return 0.3 + (prompt.ordinal * 7 + sibling * 3) % 11 / 4

    config = settings(sampler, p=2, k=2, steps=8, async_rl={"weight_sync_mode": mode})
    run = MemoryRun(config, range(1000), script=script, latency=uneven, engines=3)
    for name in ("pause", "transfer", "resume"):
        slowly(run, name)
    result = await run.run()
    assert result is not None and result.step == 8
    assert max(served) >= 6
    if mode == "drain":
        committed = of_kind(effective(run), "committed")
        assert len(committed) >= 16


def slowly(run: MemoryRun, name: str) -> None:
    call = getattr(run.engines, name)

    async def slow(*args: Any) -> Any:
        await anyio.sleep(0.7)
        return await call(*args)

    setattr(run.engines, name, slow)


# H20: what is left of a sync that failed

THREE = ("engine0", "engine1", "engine2")


class Faulty(MemoryRun):
    """Three engines; `fault` is called once, in the sync of version 3, before its pause."""

    def __init__(self, fault: Callable[[MemoryRun], None], **options: Any) -> None:
        config = settings("windowed", p=2, k=1, steps=6, async_rl=options.pop("rl", {}))
        super().__init__(
            config, range(1000), latency=lambda p, s: 0.5 + p.ordinal % 3, engines=3, **options
        )
        pause, once = self.engines.pause, [fault]

        async def faulty() -> None:
            assert self.controller is not None
            if self.controller.statistics().weight_version == 3 and once:
                once.pop()(self)
            await pause()

        self.engines.pause = faulty  # type: ignore[method-assign]

    def syncs(self) -> list[Event]:
        return of_kind(self.log.events, "weight_sync")

    def check_failed_closed(self) -> None:
        """No engine is paused, and no group went out under the version that was not confirmed."""
        assert self.controller is not None
        assert self.controller.statistics().gate_closed_for == "weight sync of version 3"
        assert [event.weight_version for event in self.syncs()] == [0, 1, 2]
        dispatched = of_kind(self.log.events, "dispatched")
        assert max(event.weight_version for event in dispatched) == 2  # type: ignore[type-var]
        assert self.log.events[-1].event == "stopped"


def fails(call: Any, engine: str, times: int = 99) -> Callable[[MemoryRun], None]:
    return lambda run: run.engines.fail(call, engine, times)


FAILING = [("pause", "engine2"), ("transfer", "engine1"), ("resume", "engine1")]


@pytest.mark.parametrize("call, engine", FAILING)
async def test_h20_a_run_that_needs_the_engine_ends_and_names_it(call: str, engine: str) -> None:
    run = Faulty(fails(call, engine))
    with pytest.raises(
        EnginesFailed, match=f"{call} failed on {engine}: {call} was told to"
    ) as failed:
        await run.run()
    assert failed.value.failures.keys() == {engine}
    run.check_failed_closed()
    paused = {name for name, each in run.engines._engines.items() if each.resumed is not None}
    assert run.controller is not None
    out = run.controller.statistics().engines_out
    assert paused == out.keys() == ({engine} if call == "resume" else set())


@pytest.mark.parametrize("call, engine", FAILING)
async def test_h20_a_run_that_can_do_without_the_engine_declares_it_out(
    call: str, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[str] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        reports.append(str(run.controller.report()))

    run = Faulty(fails(call, engine), replaceable=True, script=script)
    result = await run.run()
    assert f"{engine} is out: {call} was told to fail" in reports[-1]
    assert "is out" not in reports[0]
    assert result is not None and (result.step, result.weight_version) == (6, 6)
    assert run.controller is not None
    stats = run.controller.statistics()
    left = tuple(name for name in THREE if name != engine)
    assert stats.engines == left
    assert stats.engines_out == {engine: f"{call} was told to fail"}
    assert f"engine {engine} is out of service: {call} was told to fail" in caplog.messages
    syncs = run.syncs()
    assert [event.weight_version for event in syncs] == list(range(7))
    assert [event.engines for event in syncs] == [THREE, None, None, left, None, None, None]
    assert syncs[3].reason == f"engines out of service: {engine}: {call} was told to fail"
    assert not run.engines.paused and run.engines.out.keys() == {engine}
    effective(run)


@pytest.mark.parametrize("call", ["pause", "transfer", "resume"])
@pytest.mark.parametrize("replaceable", [False, True])
async def test_h20_one_failure_is_repeated_and_the_version_moves_once(
    call: str, replaceable: bool
) -> None:
    run = Faulty(fails(call, "engine1", times=1), replaceable=replaceable)
    result = await run.run()
    assert result is not None and (result.step, result.weight_version) == (6, 6)
    assert [event.weight_version for event in run.syncs()] == list(range(7))
    assert run.engines.serves == dict.fromkeys(THREE, 6) and run.engines.out == {}


@pytest.mark.parametrize("failures, ends", [(1, False), (2, True)])
async def test_h20_a_transfer_that_raises_is_repeated_as_often_as_configured(
    failures: int, ends: bool
) -> None:
    def fault(run: MemoryRun) -> None:
        transfer, left = run.engines.transfer, [failures]

        async def broken(version: int) -> Mapping[str, int]:
            if left[0]:
                left[0] -= 1
                raise OSError("the link is down")
            return await transfer(version)

        run.engines.transfer = broken  # type: ignore[method-assign]

    run = Faulty(fault, replaceable=True)
    if not ends:
        assert await run.run() is not None
        assert [event.weight_version for event in run.syncs()] == list(range(7))
        return
    with pytest.raises(WeightSyncError, match=r"weight_sync.transfer failed: OSError: the link"):
        await run.run()
    run.check_failed_closed()
    assert not run.engines.paused and run.engines.out == {}


async def test_h20_a_transfer_without_an_end_is_not_repeated() -> None:
    calls: list[int] = []

    def fault(run: MemoryRun) -> None:
        async def hang(version: int) -> Mapping[str, int]:
            calls.append(version)
            await anyio.sleep_forever()
            raise AssertionError

        run.engines.transfer = hang  # type: ignore[method-assign]

    run = Faulty(fault, replaceable=True)
    with pytest.raises(CallTimeout, match=r"weight_sync.transfer did not return within 300 s"):
        await run.run()
    run.check_failed_closed()
    assert calls == [3] and not run.engines.paused


async def test_h20_a_cancel_during_the_transfer_resumes_every_engine() -> None:
    def fault(run: MemoryRun) -> None:
        transfer = run.engines.transfer

        async def slow(version: int) -> Mapping[str, int]:
            assert run.engines.paused
            life.cancel()
            await anyio.sleep(20)
            return await transfer(version)

        run.engines.transfer = slow  # type: ignore[method-assign]

    run = Faulty(fault)
    with anyio.CancelScope() as life:
        await run.run()
    assert life.cancelled_caught and not run.engines.paused
    dispatched = of_kind(run.log.events, "dispatched")
    assert max(event.weight_version for event in dispatched) == 2  # type: ignore[type-var]
    assert run.engines.serves == dict.fromkeys(THREE, 3), "it was awaited to its end"


async def test_h20_the_first_sync_of_a_life_is_like_any_other() -> None:
    run = MemoryRun(settings(p=2, k=0, steps=2), range(100), engines=3, replaceable=True)
    run.engines.fail("transfer", "engine0", 99)
    result = await run.run()
    assert result is not None and result.step == 2
    assert run.engines.serves == {"engine1": 2, "engine2": 2}
    assert {version for _, _, version in run.engines.rollouts} == {0, 1, 2}


async def test_h20_an_engine_that_was_the_last_is_named_although_it_could_be_put_out() -> None:
    run = MemoryRun(settings(p=2, k=0, steps=2), range(100), engines=2, replaceable=True)
    for engine in ("engine0", "engine1"):
        run.engines.fail("pause", engine, 99)
    with pytest.raises(EnginesFailed, match="pause failed on engine0: .*; engine1: "):
        await run.run()
    assert run.engines.rollouts == []
