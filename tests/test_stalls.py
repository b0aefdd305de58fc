"""Seven planted stalls, each told by its cause: a closed gate, dead engines, a hung put, a lost
sibling, an exhausted source, groups that nobody selects, a stuck save."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from sc_core.audit import audit
from sc_core.calls import inline
from sc_core.config import ControllerConfig, decode
from sc_core.errors import CallTimeout, PromptDropped, SaveError, StallError
from sc_core.ports import SamplerView
from sc_core.records import Group, Prompt, PulledPrompt, Stamp
from sc_core.samplers import ReadyFirst
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio

PATIENT = {"rollout_s": 1e5, "source_s": 1e5, "data_plane_s": 500, "snapshot_s": 500,
           "trainer_s": 500, "weight_sync_s": 500, "disk_s": 500}  # fmt: skip
"""Deadlines past the watchdog's 50 s, so that it comes first."""


def settings(sampler: str = "in_order", *, watched: bool = True, **rl: Any) -> ControllerConfig:
    """Steps of 2 groups of 2; `watched`: by a watchdog that is faster than every deadline."""
    if watched:
        rl = {"deadlines": PATIENT, "stall_watchdog": {"stall_timeout_s": 50}, **rl}
    return decode(
        {
            "grpo": {
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
                "max_num_steps": 4,
            },
            "async_rl": {"sampler": {"name": sampler}, **rl},
            "checkpointing": {"save_period": 2},
        },
        ControllerConfig,
    )


def a_second(prompt: Prompt, sibling: int) -> float:
    return 1.0


async def hang(*_: Any) -> Any:
    await anyio.sleep_forever()


async def told(run: MemoryRun, *, within_s: float = 1000) -> str:
    """Run into the stall; the report, once it was seen to pickle."""
    began = anyio.current_time()
    with pytest.raises(StallError) as caught:
        await run.run()
    assert anyio.current_time() - began <= within_s
    error = caught.value
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.cause) == (type(error), str(error), error.cause)
    assert error.cause.startswith("no progress for 50 s: ")
    stopped = run.log.events[-1]
    assert (stopped.event, stopped.reason) == ("stopped", f"failed: StallError: {error.cause}")
    assert audit(run.log.events).ok
    assert run.controller is not None
    barrier = run.controller.statistics().barrier
    assert not barrier.waiters
    # a section whose call hung stays closed: that call may write yet
    assert all(held.age_s >= 500 for held in barrier.holders)
    return str(error)


# 1: the gate ---------------------------------------------------------------------------


async def test_a_closed_gate_is_named_with_the_call_behind_it() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    transfer = run.engines.transfer

    async def once(version: int) -> Any:
        return await (hang() if version else transfer(version))

    run.engines.transfer = once  # type: ignore[method-assign]
    report = await told(run)
    cause, *rest = report.splitlines()
    assert cause == (
        "no progress for 50 s: the weight gate is closed for weight sync of version 1:"
        " weight_sync.transfer has not returned for 50 s (deadline 500 s)"
    )
    assert "  gate       closed: weight sync of version 1" in rest
    assert any("train pump: weight_sync.transfer for 50 s of 500 s (weights.py:" in r for r in rest)


async def test_a_first_sync_that_never_ends_is_a_stall_too() -> None:
    run = MemoryRun(settings(), range(50))
    run.engines.pause = hang  # type: ignore[method-assign]
    report = await told(run)
    assert "the weight gate is closed for start: weight_sync.pause has not returned" in report


async def test_a_drain_names_the_rollout_that_it_waits_for() -> None:
    async def one_hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (2, 1):
            await anyio.sleep_forever()

    config = settings(
        "windowed", weight_sync_mode="drain", max_inflight_prompts=4, max_buffered_rollouts=4
    )
    run = MemoryRun(config, range(50), latency=a_second, script=one_hangs)
    report = await told(run)
    assert report.splitlines()[0].startswith(
        "no progress for 50 s: the weight gate is closed for weight sync of version 1:"
        " it waits for all rollouts, and 1 are under way; rollout of sibling 1 of group 2.0"
        " has not returned for 5"
    )


# 2: the engines ------------------------------------------------------------------------


async def dead(prompt: Prompt, sibling: int, version: int) -> None:
    await anyio.sleep(1)
    if version:
        raise ConnectionError("engine 7 is gone")


async def test_dead_engines_are_told_by_what_every_attempt_fails_with() -> None:
    endless = {"max_consecutive_dropped_prompts": 10**6}
    run = MemoryRun(settings(rollout_failure=endless), range(10**4), script=dead)
    cause = (await told(run)).splitlines()[0]
    assert "every attempt fails: " in cause and "ConnectionError: engine 7 is gone" in cause


async def test_dead_engines_end_a_run_by_the_limit_of_drops_in_a_row() -> None:
    run = MemoryRun(settings(watched=False), range(10**4), script=dead)
    with pytest.raises(PromptDropped, match="ConnectionError: engine 7 is gone"):
        await run.run()


async def test_engines_that_hang_are_told_by_their_oldest_request() -> None:
    run = MemoryRun(settings(), range(50), script=hang)
    report = await told(run)
    assert "groups ready for target 0: 0, under way: 2; rollout of sibling " in report
    assert " has not returned for 50 s" in report
    assert "  requests   4 rollouts under way" in report


# 3: a put ------------------------------------------------------------------------------


def hang_in(name: str, at: str = "midway") -> Any:
    async def hooks(call: str, point: str) -> None:
        if (call, point) == (name, at):
            await anyio.sleep_forever()

    return hooks


async def test_a_hung_put_is_named_with_its_group() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second, hooks=hang_in("put_samples"))
    cause, *rest = (await told(run, within_s=1600)).splitlines()
    assert "data_plane.put_samples of group " in cause and "has not returned for 49 s" in cause
    assert any(line.startswith("  barrier    held by mutation 'commit ") for line in rest)


async def test_a_hung_put_ends_a_run_by_its_own_deadline() -> None:
    run = MemoryRun(settings(watched=False), range(50), hooks=hang_in("put_samples"))
    with pytest.raises(CallTimeout, match=r"data_plane\.put_samples did not return within 60 s"):
        await run.run()


async def test_a_save_behind_a_hung_put_names_who_holds_the_barrier() -> None:
    """The bundle of step 2 waits for a commit that was let in while the trainer saved."""
    saving = False

    async def hooks(call: str, point: str) -> None:
        if saving and (call, point) == ("put_samples", "midway"):
            await anyio.sleep_forever()

    async def slow_save(directory: Path) -> None:
        nonlocal saving
        saving = True
        await anyio.sleep(5)

    run = MemoryRun(settings("windowed"), range(50), latency=a_second, hooks=hooks)
    run.trainer.save = slow_save  # type: ignore[method-assign]
    cause = (await told(run)).splitlines()[0]
    assert "the barrier, for checkpoint 'checkpoint of step 2', is not free: held by " in cause
    assert "mutation 'commit " in cause and "in data_plane.put_samples for" in cause


# 4: a sibling --------------------------------------------------------------------------


async def test_a_sibling_that_never_returns_is_named() -> None:
    async def one_hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (3, 1):
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(50), latency=a_second, script=one_hangs)
    cause, *rest = (await told(run)).splitlines()
    assert cause == (
        "no progress for 50 s: groups ready for target 1: 1, under way: 1; rollout of sibling 1 of"
        " group 3.0 has not returned for 50 s (deadline 100000 s)"
    )
    assert "  targets    1: 1 ready, 1 under way" in rest
    assert "  oldest     3.0, rollout of sibling 1 of group 3.0 for 50 s of 100000 s" in rest
    tree = [line for line in rest if line.startswith("    ")]
    assert tree[0].startswith("    train pump: groups to train on (train.py:")
    (sibling,) = (line for line in tree if " sibling: " in line)
    assert sibling.startswith("          ")  # below its attempt, the rollout pump and the run
    assert re.search(r"\(attempt\.py:\d+ _rollout > testing/ports\.py:\d+ rollout\)$", sibling), (
        sibling
    )


async def test_a_sibling_that_never_returns_fails_by_its_own_deadline() -> None:
    async def one_hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (3, 1):
            await anyio.sleep_forever()

    run = MemoryRun(settings(watched=False), range(50), latency=a_second, script=one_hangs)
    result = await run.run()
    assert result is not None and result.step == 4
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.ordinal == 3 and "sibling 1 of group 3.2 took longer than" in str(dropped.reason)


async def test_a_sibling_that_returns_nothing_is_a_recorded_drop() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    rollout = run.engines.rollout

    async def nothing(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        return None if (prompt.ordinal, sibling) == (3, 1) else sample

    run.engines.rollout = nothing  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and result.step == 4
    (dropped,) = (e for e in run.log.events if e.event == "dropped")
    assert dropped.ordinal == 3 and "3." in str(dropped.reason)


async def test_a_held_out_prompt_that_never_returns_is_named() -> None:
    async def one_hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal < 0 and version == 2:
            await anyio.sleep_forever()

    data = msgspec.to_builtins(settings())
    data["grpo"]["val_period"] = 2
    run = MemoryRun(
        decode(data, ControllerConfig),
        range(50),
        latency=a_second,
        script=one_hangs,
        held_out=["q"],
    )
    cause = (await told(run)).splitlines()[0]
    assert (
        "rollout of sibling " in cause and " of group val2.0.0 has not returned for 50 s" in cause
    )


# 5: the source -------------------------------------------------------------------------


class Silent:
    """A source that gives 2 prompts and no more answer."""

    def __init__(self, run: MemoryRun) -> None:
        self._source = run.source

    async def next_prompt(self) -> PulledPrompt:
        if len(self._source.pulled) == 2:
            await anyio.sleep_forever()
        return await self._source.next_prompt()

    async def seek(self, position: Any) -> None:
        await self._source.seek(position)

    def fingerprint(self) -> str:
        return self._source.fingerprint()


async def test_a_source_that_never_answers_is_named() -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    run.source = Silent(run)  # type: ignore[assignment]
    assert (await told(run)).splitlines()[0] == (
        "no progress for 50 s: the source gives nothing: source.next_prompt has not returned for"
        " 50 s (deadline 100000 s)"
    )
    run = MemoryRun(settings(watched=False), range(50), latency=a_second)
    run.source = Silent(run)  # type: ignore[assignment]
    with pytest.raises(CallTimeout, match=r"source\.next_prompt did not return within 600 s"):
        await run.run()


async def test_a_source_that_ended_under_a_group_that_cant_complete() -> None:
    async def last_hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 2:
            await anyio.sleep_forever()

    run = MemoryRun(settings(), range(3), latency=a_second, script=last_hangs)
    report = await told(run)
    assert "the source has ended; groups ready for target 1: 0, under way: 1; rollout" in report
    (prompts,) = (line for line in report.splitlines() if line.startswith("  prompts "))
    assert prompts.endswith("1 in flight, 0 committed, 0 selected; the source has ended")


# 6: the sampler ------------------------------------------------------------------------


class Picky(ReadyFirst):
    """Selects nothing; with `evicting`, gives up all that is ready, so that commits go on."""

    name = "picky"

    def __init__(self, *, evicting: bool = False) -> None:
        super().__init__(max_staleness_versions=1)
        self._evicting = evicting

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        return ()

    def evict(self, view: SamplerView) -> Sequence[Group]:
        return tuple(view.index.ready_in_commit_order()) if self._evicting else ()


class TwoAhead(Picky):
    """Means every group for a step that nobody will ever reach."""

    name = "two_ahead"
    stamps_targets = True

    def admit(self, view: SamplerView) -> Stamp | None:
        target = view.weight_version + 2
        return Stamp(target) if view.live_of_target(target) < view.prompts_per_step else None

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
        ready = tuple(view.index.ready_of_target(view.weight_version))[:at_most]
        return ready if len(ready) >= at_least else ()


async def test_groups_that_no_select_takes() -> None:
    run = MemoryRun(settings(max_buffered_rollouts=4), range(50), sampler=Picky())
    assert (await told(run)).splitlines()[0] == (
        "no progress for 50 s: groups committed: 4, and none is selectable: sampler picky is at"
        " weight version 0, ready start versions are {0: 4}"
    )


async def test_commits_that_go_on_do_not_hide_that_nothing_is_trained() -> None:
    run = MemoryRun(settings(), range(500), latency=a_second, sampler=Picky(evicting=True))
    report = await told(run)
    assert run.controller is not None
    assert sum(e.event == "committed" for e in run.log.events) > 50
    assert " groups were committed and " in report and "dropped, so no step is full" in report
    assert "stale: 0 versions old" in report


async def test_targets_that_nobody_fills() -> None:
    run = MemoryRun(settings(max_buffered_rollouts=4), range(50), sampler=TwoAhead())
    assert (await told(run)).splitlines()[0] == (
        "no progress for 50 s: groups committed: 2, and none is selectable: sampler two_ahead wants"
        " target 0, ready targets are {2: 2}; sampler two_ahead admits no prompt beside 2 live"
    )


async def test_a_report_that_cant_be_written_hides_no_stall() -> None:
    class Broken(Picky):
        def admit(self, view: SamplerView) -> Stamp | None:
            if view.live_count >= 2 and anyio.current_time() > 40:
                raise ZeroDivisionError("in admit")
            return Stamp() if view.live_count < 2 else None

        stamps_targets = True

    run = MemoryRun(settings(max_buffered_rollouts=4), range(50), sampler=Broken())
    assert "no report could be written: ZeroDivisionError: in admit" in await told(run)


# 7: a save -----------------------------------------------------------------------------


async def test_a_stuck_snapshot_is_named() -> None:
    run = MemoryRun(settings(), range(50), hooks=hang_in("save_checkpoint"))
    cause, *rest = (await told(run)).splitlines()
    assert cause.endswith("data_plane.save_checkpoint has not returned for 50 s (deadline 500 s)")
    held = (
        "  barrier    held by checkpoint 'checkpoint of step 2' for 50 s; waiting: mutation 'commit"
    )
    assert any(line.startswith(held) for line in rest)


@pytest.mark.parametrize("call", ["save", "finish_step", "train_microbatches"])
async def test_a_stuck_trainer_is_named(call: str) -> None:
    run = MemoryRun(settings(), range(50))
    setattr(run.trainer, call, hang)
    cause = (await told(run, within_s=1600)).splitlines()[0]
    assert cause.endswith(f"trainer.{call} has not returned for 50 s (deadline 500 s)")


async def test_a_stuck_fetch_of_the_advantage_stage_is_named() -> None:
    run = MemoryRun(settings(), range(50), hooks=hang_in("get_samples", "before"))
    cause = (await told(run, within_s=1600)).splitlines()[0]
    assert "data_plane.get_samples has not returned for 50 s (deadline 500 s)" in cause


class StuckDisk:
    """A runner whose work of that name never ends."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def __call__(self, work: Any, *args: Any) -> Any:
        if getattr(work, "__name__", "") in self._names:
            await anyio.sleep_forever()
        return await inline(work, *args)


@pytest.mark.parametrize(
    ("work", "named"),
    [
        ("stage", "staging a bundle has not returned for 50 s (deadline 500 s)"),
        ("on_disk", "publishing a bundle has not returned for"),
    ],
)
async def test_a_stuck_disk_is_named(work: str, named: str) -> None:
    run = MemoryRun(settings(), range(50), latency=a_second)
    run.runner = StuckDisk(work)
    cause = (await told(run)).splitlines()[0]
    assert named in cause
    if work == "on_disk":  # training went on, up to the next save
        assert "the bundle before is not published yet: " in cause
        assert len(run.trainer.trained) == 4


async def test_stuck_saves_end_a_run_by_their_own_deadlines() -> None:
    run = MemoryRun(settings(watched=False), range(50))
    run.trainer.finalize_save = hang  # type: ignore[method-assign]
    with pytest.raises(SaveError, match=r"trainer\.finalize_save did not return within 1800 s"):
        await run.run()
    assert run.bundles() == []
    for work, named in (("stage", "staging"), ("on_disk", "publishing")):
        run = MemoryRun(settings(watched=False), range(50))
        run.runner = StuckDisk(work)
        with pytest.raises((CallTimeout, SaveError), match=f"{named} a bundle did not return"):
            await run.run()
