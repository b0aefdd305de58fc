"""What ports may do wrong, and what must not become of a run because of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from test_controller import at, fates, owned_rows, settings, uneven

from sc_core.audit import audit
from sc_core.bundle import BundleStore
from sc_core.controller import SingleController
from sc_core.errors import (
    CallCancelled,
    CallFailed,
    CallTimeout,
    Conservation,
    SaveError,
    WrongAnswer,
)
from sc_core.index import ReplayIndex
from sc_core.ports import EventKind, SamplerView
from sc_core.records import Group, Prompt, Sample, Stamp
from sc_core.samplers import ReadyFirst
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio


def tampered(run: MemoryRun, change: Callable[[Sample], object]) -> MemoryRun:
    """`run`, where sibling 1 of prompt 5 always comes back changed."""
    rollout = run.engines.rollout

    async def changed(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        return change(sample) if (prompt.ordinal, sibling) == (5, 1) else sample

    run.engines.rollout = changed  # type: ignore[method-assign, assignment]
    return run


class Number:
    """As numpy's: a number to Python, and nothing that msgpack can hold."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda s: None, "infra failure: .*came back without a result"),
        (lambda s: replace(s, reward=float("nan")), "data failure: .*has reward nan"),
        (lambda s: replace(s, reward=float("-inf")), "data failure: .*has reward -inf"),
        (lambda s: replace(s, reward=None), "infra failure: .*is not a number"),
        (lambda s: replace(s, tokens=None), "infra failure: .*is not a number"),
        (lambda s: replace(s, reward=1e300), "data failure: .*has reward 1e\\+300"),
        (lambda s: replace(s, reward=10**400), "infra failure: .*is not a number"),
        (lambda s: replace(s, tokens=-1), "infra failure: .*has -1 tokens"),
        (lambda s: replace(s, tokens=2**70), "infra failure: .*has 1180591620717411303424 tokens"),
        (lambda s: replace(s, fields={}), r"infra failure: .*has the columns \[\]"),
        (lambda s: replace(s, fields={1: 2}), r"infra failure: .*has the columns \[1\]"),
        (lambda s: replace(s, fields=None), "infra failure: .*has NoneType for its fields"),
        (lambda s: replace(s, end_weight_version=99), "ended at weight version 99, not between"),
        (lambda s: replace(s, end_weight_version=-1), "ended at weight version -1, not between"),
    ],
)
async def test_a_worker_that_returns_rubbish_costs_its_own_prompt_only(
    change: Callable[[Sample], object], reason: str
) -> None:
    run = tampered(MemoryRun(settings(steps=3), range(100)), change)
    result = await run.run()
    assert result is not None and result.step == 3
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.ordinal == 5 and dropped.reason is not None
    assert re.search(reason, dropped.reason)
    assert run.store.rows.keys() == owned_rows(run)
    assert fates(run)["trained"] == 12


@pytest.mark.parametrize("change", [lambda s: {"reward": 1.0}, lambda s: s.fields])
async def test_a_rollout_that_is_no_sample_ends_the_run_at_once(
    change: Callable[[Sample], object], caplog: pytest.LogCaptureFixture
) -> None:
    run = tampered(MemoryRun(settings(steps=3), range(100)), change)
    named = r"worker\.rollout returned .* for sibling 1 of group 5\.0, not a Sample"
    with pytest.raises(WrongAnswer, match=named):
        await run.run()
    assert not [e for e in run.log.events if e.event in ("redispatched", "dropped")]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_an_answer_of_an_evaluation_that_is_no_sample_ends_the_run_at_once() -> None:
    config = settings(steps=1, grpo={"val_at_start": True})
    run = MemoryRun(config, range(100), held_out=range(3))
    rollout = run.engines.rollout

    async def changed(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        return {"reward": 1.0} if prompt.held_out else sample

    run.engines.rollout = changed  # type: ignore[method-assign, assignment]
    with pytest.raises(WrongAnswer, match=r"returned a value of type dict for sibling 0 of group"):
        await run.run()


async def test_numbers_of_other_libraries_are_taken_for_what_they_are() -> None:
    def change(sample: Sample) -> Sample:
        return replace(sample, reward=Number(1), tokens=Number(5), end_weight_version=Number(1))

    run = tampered(MemoryRun(settings(steps=3), range(100)), change)
    result = await run.run()
    assert result is not None and result.counters["dropped"] == 0
    assert fates(run)["trained"] == 12


def test_a_group_that_can_t_be_hashed_leaves_the_index_as_it_was() -> None:
    index = ReplayIndex()
    group = Group(
        group_id="0.0",  # type: ignore[arg-type]
        ordinal=0,
        sample_ids=("0.0_g0",),
        start_weight_version=0,
        end_weight_version=0,
        commit_seq=0,
        tokens=Number(1),  # type: ignore[arg-type]
    )
    with pytest.raises(TypeError):
        index.add(group)
    assert len(index) == index.ready_count == 0


async def test_a_timeout_of_the_worker_itself_is_not_taken_for_the_deadline() -> None:
    async def broken(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 5:
            raise TimeoutError("of the socket")

    run = MemoryRun(settings(steps=3), range(100), script=broken)
    await run.run()
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.reason == "infra failure: TimeoutError: of the socket"


async def test_attempts_without_end_do_not_overflow_their_backoff() -> None:
    failures = 0

    async def flaky(prompt: Prompt, sibling: int, version: int) -> None:
        nonlocal failures
        if prompt.ordinal == 1 and failures < 1100:
            failures += 1
            raise ConnectionError("still away")

    forever = {"max_infra_attempts_per_prompt": 10**6, "max_backoff_s": 0.001}
    config = settings(
        steps=1, grpo={"num_generations_per_prompt": 1}, async_rl={"rollout_failure": forever}
    )
    run = MemoryRun(config, range(100), script=flaky)
    result = await run.run()
    assert result is not None and result.counters["infra_failures"] == 1100


# calls that hang, fail or are cancelled ----------------------------------------------------


@pytest.mark.parametrize("call", ["connect", "source.seek"])
async def test_what_comes_before_the_pumps_has_a_deadline_too(call: str) -> None:
    run = MemoryRun(settings(steps=6), range(100))
    assert await run.run(crash_when=at("trained", 20)) is None
    build = run.open

    async def hang(*_: Any) -> Any:
        await anyio.sleep_forever()

    async def opened(bundles: BundleStore) -> SingleController:
        controller = await build(bundles)
        if call == "connect":
            controller._ports = replace(controller._ports, connect=hang)
        else:
            run.source.seek = hang  # type: ignore[method-assign, assignment]
        return controller

    run.open = opened  # type: ignore[method-assign]
    with pytest.raises(CallTimeout, match=rf"^{call} did not return"):
        await run.run()


async def test_a_weight_file_that_is_never_finished_is_named() -> None:
    run = MemoryRun(settings(steps=6), range(100))
    run.trainer.finalize_save = anyio.sleep_forever  # type: ignore[method-assign]
    with pytest.raises(SaveError, match=r"trainer\.finalize_save did not return within 1800 s"):
        await run.run()


async def test_a_close_that_fails_too_does_not_hide_the_root_cause() -> None:
    async def broken(call: str, point: str) -> None:
        if call in ("get_samples", "aclose"):
            raise ConnectionError(f"no {call}")

    with pytest.raises(CallFailed, match=r"data_plane\.get_samples .* no get_samples"):
        await MemoryRun(settings(), range(100), hooks=broken).run()


async def test_a_run_that_failed_before_it_began_leaves_its_log_sound() -> None:
    async def broken(call: str, point: str) -> None:
        if call == "list_sample_ids":
            raise ConnectionError("no route")

    run = MemoryRun(settings(steps=3), range(100), hooks=broken)
    with pytest.raises(CallFailed, match=r"^data_plane\.list_sample_ids failed: .* no route"):
        await run.run()
    run.hooks = None
    await run.run()
    assert fates(run)["trained"] == 12


@pytest.mark.parametrize(
    "call", ["source.next_prompt", "put_samples", "trainer.prepare", "trainer.finalize_save"]
)
def test_a_call_cancelled_by_somebody_else_ends_the_run_with_an_error(call: str) -> None:
    """As by an executor that shuts down: an `asyncio.CancelledError` that no scope has sent."""

    async def cancelled(*_: Any) -> Any:
        raise asyncio.CancelledError

    async def hooks(name: str, point: str) -> None:
        if name == call:
            raise asyncio.CancelledError

    run = MemoryRun(settings(), range(100), hooks=hooks)
    port, _, name = call.partition(".")
    if name:
        setattr(getattr(run, port), name, cancelled)
    with pytest.raises(CallCancelled, match="outside this run"):
        asyncio.run(run.run())


@pytest.mark.parametrize("kind", ["admitted", "committed", "selected", "trained"])
async def test_a_log_with_a_hole_takes_nothing_more(kind: EventKind) -> None:
    run = MemoryRun(settings("windowed", steps=6), range(100), latency=uneven)
    append_many, seen = run.log.append_many, 0

    def full_once(what: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        nonlocal seen
        seen += what == kind
        if what == kind and seen == (4 if kind in ("selected", "trained") else 13):
            raise OSError(28, "No space left on device")
        return append_many(what, each)

    run.log.append_many = full_once  # type: ignore[method-assign, assignment]
    with pytest.raises(CallFailed, match=f"^appending {kind} to the event log .* No space left"):
        await run.run()
    assert audit(run.log.events).ok
    assert run.controller is not None and run.controller.statistics().selected == 0
    result = await run.run()
    assert result is not None and result.step == 6
    assert fates(run)["trained"] >= 24


# samplers, and settings that were changed --------------------------------------------------


class _Selects(ReadyFirst):
    name = "wrong"

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        ready = tuple(view.index.ready_in_commit_order())
        return ready if len(ready) > at_most else ()


class _Evicts(ReadyFirst):
    name = "wrong"
    seen: Group | None = None

    def evict(self, view: SamplerView) -> Sequence[Group]:
        if self.seen is None:
            self.seen = next(view.index.ready_in_commit_order(), None)
        return (self.seen,) if self.seen and view.weight_version else ()


class _Stamps(ReadyFirst):
    name = "wrong"

    def admit(self, view: SamplerView) -> Stamp | None:
        return Stamp(target_step=-1)


@pytest.mark.parametrize(
    "sampler, problem",
    [
        (_Selects(1), "sampler wrong selected 5 groups of 4 at most"),
        (_Evicts(1), "sampler wrong gives up group 0.0, which is not ready"),
        (_Stamps(1), "prompt 0 is stamped with target -1"),
    ],
)
async def test_a_sampler_that_breaks_its_promise_ends_the_run(
    sampler: ReadyFirst, problem: str
) -> None:
    config = settings(async_rl={"max_buffered_rollouts": 12})
    run = MemoryRun(config, range(100), sampler=sampler)
    with pytest.raises(Conservation, match=problem):
        await run.run()
    assert audit(run.log.events).ok


async def test_fewer_places_than_restored_groups_leave_no_step_short_for_ever() -> None:
    run = MemoryRun(settings("in_order-2"), range(500), latency=uneven)
    assert await run.run(crash_when=at("trained", 30)) is None
    lost: list[int] = []

    async def broken(prompt: Prompt, sibling: int, version: int) -> None:
        lost[:] = lost or [prompt.ordinal]
        if prompt.ordinal == lost[0]:
            raise ConnectionError("engine went away")

    run.script = broken
    run.config = settings(
        "in_order-2",
        async_rl={
            "max_buffered_rollouts": 4,
            "rollout_failure": {"max_infra_attempts_per_prompt": 1},
        },
    )
    result = await run.run()
    assert result is not None and (result.step, result.counters["dropped"]) == (12, 1)
    assert fates(run)["dropped"] == 1


async def test_a_checkpoint_asked_for_is_taken_although_a_stop_comes_first() -> None:
    async def ask(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 14:  # of step 4, with the bundle of step 3 written
            run.controller.request_checkpoint()  # type: ignore[union-attr]
            run.controller.stop()  # type: ignore[union-attr]
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(500), script=ask)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 3)
    assert [e.step for e in run.log.events if e.event == "checkpoint"] == [3, 3]


async def test_a_drain_counts_requests_that_are_about_to_leave() -> None:
    """Between a dispatch and its first request lie two task switches, and maybe a sync."""
    run = MemoryRun(settings(steps=2, async_rl={"weight_sync_mode": "drain"}), range(100))
    append_many, counted = run.log.append_many, []

    def notice(kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        if kind == "dispatched":
            counted.append(run.controller._state.requests.value)  # type: ignore[union-attr]
        return append_many(kind, each)

    run.log.append_many = notice  # type: ignore[method-assign]
    await run.run()
    assert len(counted) >= 8 and min(counted) >= 3
    assert run.controller is not None and run.controller._state.requests.value == 0
