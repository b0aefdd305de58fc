"""Every decision of a run, taken anew: clean where nothing was altered, exact where one was."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from test_controller import at, settings, uneven
from virtual_clock import VirtualClockLoop

from sc_core.audit import audit
from sc_core.config import ControllerConfig, RolloutRecoveryConfig, SamplerConfig
from sc_core.decisions import DecisionSettings
from sc_core.difference import Difference
from sc_core.errors import RestoreError
from sc_core.events import Event, JsonlEventLog
from sc_core.ports import Sampler, SamplerView
from sc_core.records import Cut, Group
from sc_core.replay import ReplayReport, replay, replay_log
from sc_core.samplers import InOrder, ReadyFirst, Windowed, build_sampler
from sc_core.testing import MemoryRun
from sc_core.testing.scenarios import GRANULARITIES, SAMPLERS, memory_run
from sc_core.testing.scenarios import settings as scenario
from sc_core.verify import candidates, verify


def cuts(run: MemoryRun) -> list[tuple[str, Cut]]:
    return [(path.name, verify(path, run.disk).cut) for path in candidates(run.directory, run.disk)]


def replayed(run: MemoryRun, **options: Any) -> ReplayReport:
    """Against all bundles; whatever the log has was decided by the sampler."""
    report = replay(run.log.events, cuts(run), **options)
    assert report.ok, report.difference
    assert audit(run.log.events).events == report.events
    return report


# runs as they were -------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.anyio
async def test_a_run_that_crashed_twice_decides_the_same_again(
    sampler: str, granularity: str
) -> None:
    run = memory_run(scenario(sampler, granularity))
    assert await run.run(crash_when=at("committed", 13), seed=2) is None
    assert await run.run(crash_when=at("selected", 6), seed=3) is None
    assert replay(run.log.events).ok
    assert await run.run() is not None
    report = replayed(run)
    assert len(report.history) > 1 and len(report.bundles) > 1
    assert report.selections >= 12 and report.admissions >= 24


SWITCHES: list[tuple[str, str, dict[str, Any]]] = [
    ("windowed", "in_order-2", {}),
    ("in_order-2", "windowed", {}),
    ("ready_first", "in_order-0", {}),
    ("in_order-2", "in_order-0", {}),
    ("in_order-2", "in_order-2", {"grpo": {"num_prompts_per_step": 3}}),
    ("weight_fifo", "weight_fifo", {"grpo": {"num_prompts_per_step": 3}}),
    ("in_order-2", "in_order-2", {"async_rl": {"max_buffered_rollouts": 4}}),
    ("in_order-2", "in_order-2", {"checkpointing": {"load_replay_buffer": False}}),
    ("windowed", "windowed", {"checkpointing": {"load_replay_buffer": False}}),
]


@pytest.mark.parametrize(("before", "after", "sections"), SWITCHES)
def test_each_incarnation_is_replayed_under_its_own_settings(
    before: str, after: str, sections: dict[str, Any]
) -> None:
    run = MemoryRun(settings(before), range(500), latency=uneven)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(run.run(crash_when=at("checkpoint", 2))) is None
    run.config = settings(after, **sections)
    assert len(replayed(lived(run)).history) == 2


@pytest.mark.parametrize("sampler", ["in_order-2", "windowed", "ready_first"])
@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.anyio
async def test_the_tail_is_one_short_step(sampler: str, chunk: int | None) -> None:
    config = settings(sampler, async_rl={"min_groups_for_streaming_train": chunk})
    run = MemoryRun(config, range(18), latency=uneven)
    result = await run.run()
    assert result is not None and result.reason == "exhausted"
    replayed(run)
    last = run.log.events[-1].seq
    late = Event(seq=last + 1, t=0.0, incarnation=run.log.incarnation, event="admitted", ordinal=18)
    found = difference([*run.log.events, late])
    assert (found.seq, found.decision) == (last + 1, "ledger")
    assert "prompt 18 came after the end of prompts" in found.answer


@pytest.mark.anyio
async def test_retries_drops_and_streaming_chunks() -> None:
    async def script(prompt: Any, sibling: int, version: int) -> None:
        if prompt.ordinal % 5 == 2 and sibling == 1:
            await anyio.sleep(3)
            raise ConnectionError("engine went away")

    config = settings(
        "in_order-2",
        async_rl={
            "min_groups_for_streaming_train": 2,
            "rollout_failure": {"max_infra_attempts_per_prompt": 2},
        },
    )
    run = MemoryRun(config, range(200), latency=uneven, script=script)
    assert await run.run() is not None
    kinds = Counter(event.event for event in run.log.events)
    assert kinds["dropped"] > 5 < kinds["redispatched"]
    assert replayed(run).selections > 12


@pytest.mark.parametrize("sampler", ["in_order-0", "in_order-2", "ready_first", "weight_fifo"])
@pytest.mark.parametrize("reserve", [0, 3])
def test_shorter_steps_and_prompts_in_reserve(sampler: str, reserve: int) -> None:
    async def script(prompt: Any, sibling: int, version: int) -> None:
        if prompt.ordinal % 7 == 2:
            await anyio.sleep(1 + prompt.ordinal % 3)
            raise ConnectionError("engine went away")

    failure = {
        "on_dropped_prompt": "shortfall",
        "max_infra_attempts_per_prompt": 1,
        "replacement_reserve_prompts": reserve,
    }
    config = settings(sampler, async_rl={"rollout_failure": failure})
    run = MemoryRun(config, range(200), latency=uneven, script=script)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(run.run(crash_when=at("trained", 21))) is None
    report = replayed(lived(run))
    dropped = [event for event in run.log.events if event.event == "dropped"]
    assert any(event.step is not None for event in dropped)
    assert report.selections >= 12 and len(report.history) == 2


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
@pytest.mark.parametrize("sampler", ["in_order-2", "windowed", "weight_fifo"])
def test_a_tail_that_is_given_up(sampler: str, on_stale: str) -> None:
    rl = {"on_stale_prompt": on_stale, "min_groups_for_streaming_train": 1}
    config = settings(sampler, grpo={"short_last_step": "drop"}, async_rl=rl)
    run = lived(MemoryRun(config, range(18), latency=uneven))
    assert replayed(run).evictions >= 2
    events = run.log.events
    number = of_kind(events, "evicted")[-1]
    tail = events[number]
    found = difference(
        forged(events, number, "selected", ordinal=tail.ordinal, group_id=tail.group_id, step=5)
    )
    assert (found.seq, found.decision) == (tail.seq, "evict")


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_aborts_are_the_samplers(on_stale: str, granularity: str) -> None:
    rl = {
        "weight_sync_mode": "abort_stale",
        "max_buffered_rollouts": 12,
        "on_stale_prompt": on_stale,
    }
    config = settings("windowed", async_rl=rl)
    recovery = msgspec.convert({"default_granularity": granularity}, RolloutRecoveryConfig)

    def latency(prompt: Any, sibling: int) -> float:
        return 20.0 + sibling if prompt.ordinal % 5 == 3 else 1.0 + sibling / 2

    run = MemoryRun(replace(config, rollout_recovery=recovery), range(200), latency=latency)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(run.run(crash_when=at("trained", 17))) is None
    assert replayed(lived(run)).evictions > 1
    events = [event for event in run.log.events if event.incarnation == run.log.incarnation]
    events = [event for event in run.log.events if event.seq < events[0].seq]  # the first life
    number = of_kind(events, "aborted")[0]
    aborted = events[number]
    out = next(n for n in of_kind(events, "dispatched") if events[n].ordinal == aborted.ordinal)
    early = forged(events, out + 1, "aborted", ordinal=aborted.ordinal, group_id=aborted.group_id)
    found = difference(early)
    assert (found.seq, found.ordinal) == (early[-1].seq, aborted.ordinal)
    assert (found.decision, found.answer) == (
        "abort",
        "the sampler may still select what started at version 0",
    )


@pytest.mark.anyio
async def test_a_log_on_disk_that_ends_amid_an_instant(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run = MemoryRun(settings("in_order-2"), range(100), latency=uneven)
    run.log = log = JsonlEventLog(path)  # type: ignore[assignment]
    assert await run.run() is not None
    log.close()
    report = replay_log(path, cuts(run))
    assert report.ok and report.selections == 12 and len(report.bundles) == 4
    lines = path.read_bytes().splitlines(keepends=True)
    selected = [number for number, line in enumerate(lines) if b'"selected"' in line]
    path.write_bytes(b"".join(lines[: selected[6]]) + lines[selected[6]][:40])
    report = replay_log(path)
    assert (report.ok, report.selections, report.events) == (True, 2, selected[6])


def test_nothing_happened_yet() -> None:
    assert replay([]) == ReplayReport()


# one decision altered ----------------------------------------------------------------------


def difference(events: Sequence[Event], **options: Any) -> Difference:
    found = replay(events, **options).difference
    assert found is not None
    return found


def lived(run: MemoryRun) -> MemoryRun:
    """Once, to its end; on one backend, as what is looked at is the log."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(run.run()) is not None
    replayed(run)
    return run


@cache
def finished(sampler: str) -> MemoryRun:
    return lived(MemoryRun(settings(sampler), range(300), latency=uneven))


def of_kind(events: Sequence[Event], kind: str) -> list[int]:
    """Their positions."""
    return [number for number, event in enumerate(events) if event.event == kind]


def ready_before(events: Sequence[Event], number: int) -> list[int]:
    """Ordinals committed, and neither selected nor evicted, before that event."""
    ready: dict[int, None] = {}
    for event in events[:number]:
        if event.event in ("committed", "abandoned"):
            ready[event.ordinal or 0] = None
        elif event.event in ("selected", "evicted"):
            del ready[event.ordinal or 0]
    return list(ready)


def forged(events: Sequence[Event], number: int, kind: Any, **fields: Any) -> list[Event]:
    """The log up to `number`, and one more event in the place of what follows."""
    fields.setdefault("group_id", f"{fields['ordinal']}.0")
    old = events[number]
    last = Event(seq=old.seq, t=old.t, incarnation=old.incarnation, event=kind, **fields)
    return [*events[:number], last]


@pytest.mark.parametrize(
    "sampler", ["in_order-0", "in_order-2", "windowed", "weight_fifo", "ready_first"]
)
def test_another_group_selected(sampler: str) -> None:
    events = finished(sampler).log.events
    altered = 0
    for number in of_kind(events, "selected"):
        others = ready_before(events, number)
        event = events[number]
        taken = {e.ordinal for e in events[number : number + 4] if e.event == "selected"}
        for ordinal in [other for other in others if other not in taken][:1]:
            other = replace(event, ordinal=ordinal, group_id=f"{ordinal}.0")
            found = difference([*events[:number], other, *events[number + 1 :]])
            assert (found.seq, found.ordinal, found.decision) == (event.seq, ordinal, "select")
            assert event.group_id in found.answer.split()
            assert found.view is not None and found.view.ready == len(others) + (
                sum(e.step == event.step for e in events[:number] if e.event == "selected")
            )
            altered += 1
    assert altered or sampler == "in_order-0"


def test_one_group_too_few_and_one_too_many() -> None:
    events = finished("ready_first").log.events
    last = of_kind(events, "selected")[7]  # of step 2
    after = events[last + 1]
    found = difference([*events[:last], *events[last + 1 :]])
    assert (found.seq, found.decision) == (after.seq, "select")
    assert str(events[last].group_id) in found.answer.split()
    found = difference(forged(events, last + 1, "selected", ordinal=99, step=2))
    assert (found.seq, found.decision) == (after.seq, "select")
    assert found.answer == "step 2 has all of its groups"


def test_a_step_finished_short_while_more_could_come() -> None:
    config = settings("in_order-2", async_rl={"min_groups_for_streaming_train": 1})
    events = lived(MemoryRun(config, range(100), latency=uneven)).log.events
    selected = of_kind(events, "selected")
    last = {events[n].step: n for n in selected}  # of each step
    step, alone = next((step, n) for step, n in last.items() if n - 1 not in selected)
    left_out = events[alone].ordinal
    short = [e for e in events if e.ordinal != left_out or e.event not in ("selected", "trained")]
    found = difference(short)
    first = next(e for e in short if (e.event, e.step) == ("trained", step))
    assert (found.seq, found.decision) == (first.seq, "ledger")
    assert found.answer == "the step has 1 groups too few"


def test_another_target_stamped() -> None:
    events = finished("in_order-2").log.events
    for number in of_kind(events, "dispatched")[:30:5]:
        event = events[number]
        assert event.step is not None
        other = replace(event, step=event.step + 1)
        found = difference([*events[:number], other, *events[number + 1 :]])
        assert (found.seq, found.ordinal, found.decision) == (event.seq, event.ordinal, "admit")
        assert found.answer == f"the sampler stamps it for step {event.step}"
        assert found.view is not None and found.view.live == number_live(events, number)


def number_live(events: Sequence[Event], number: int) -> int:
    kinds = Counter(event.event for event in events[:number])
    return kinds["dispatched"] - kinds["trained"]


@pytest.mark.parametrize("sampler", ["in_order-0", "in_order-2", "weight_fifo", "ready_first"])
def test_a_prompt_let_out_that_the_sampler_refuses(sampler: str) -> None:
    events = finished(sampler).log.events
    number = of_kind(events, "trained")[0]  # all are live that may be
    admitted = of_kind(events[:number], "admitted")
    ordinal = len(admitted)
    known = [*events[:number]]
    if len(admitted) == len(of_kind(known, "dispatched")):
        (forged_one,) = forged(events, number, "admitted", ordinal=ordinal, group_id=None)[-1:]
        known.append(forged_one)
    else:
        ordinal -= 1
    seq = events[number].seq + 1
    out = Event(
        seq=seq,
        t=0.0,
        incarnation=events[0].incarnation,
        event="dispatched",
        ordinal=ordinal,
        group_id=f"{ordinal}.0",
        weight_version=0,
        step=3 if "order" in sampler else None,
    )
    found = difference([*known, out])
    assert (found.seq, found.decision) == (seq, "admit")
    assert found.answer == "the sampler admits nothing"


@cache
def with_evictions(on_stale: str = "drop") -> MemoryRun:
    """The freshest train first, and what is left over becomes too old, several at a time."""
    config = settings(
        "windowed", async_rl={"max_buffered_rollouts": 14, "on_stale_prompt": on_stale}
    )
    sampler = replace(config.async_rl.sampler, sample_freshest_first=True)
    config = replace(config, async_rl=replace(config.async_rl, sampler=sampler))
    run = MemoryRun(config, range(300), latency=lambda prompt, sibling: 1 + prompt.ordinal % 5)
    assert replayed(lived(run)).evictions > 4
    return run


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
def test_evictions_are_the_samplers(on_stale: str) -> None:
    events = with_evictions(on_stale).log.events
    assert ("redispatched" in {event.event for event in events}) is (on_stale == "requeue")
    number = of_kind(events, "evicted")[0]
    stale = events[number]
    # left where it is
    after = number + 2
    found = difference([*events[:number], *events[after:]])
    assert found.seq >= events[after].seq  # in time, unless nothing ever depends on it
    # selected although it is too old
    found = difference(
        forged(events, number, "selected", ordinal=stale.ordinal, group_id=stale.group_id, step=7)
    )
    assert (found.seq, found.ordinal, found.decision) == (stale.seq, stale.ordinal, "select")
    assert stale.group_id not in found.answer.split()
    # evicted, and then nothing
    found = difference([*events[: number + 1], *events[after:]])
    assert (found.seq, found.decision) == (events[after].seq, "ledger")
    assert found.answer.startswith(f"what comes is {events[number + 1].event} ")


def test_an_eviction_that_comes_early() -> None:
    events = with_evictions().log.events
    commits = {event.ordinal: n for n, event in enumerate(events) if event.event == "committed"}
    tried = 0
    for number in of_kind(events, "evicted"):
        event = events[number]
        early = commits[event.ordinal] + 1
        if not any(early <= trained < number for trained in of_kind(events, "trained")):
            continue  # it was too old when it came
        tried += 1
        found = difference(
            forged(events, early, "evicted", ordinal=event.ordinal, group_id=event.group_id)
        )
        assert (found.seq, found.ordinal, found.decision) == (
            events[early].seq,
            event.ordinal,
            "evict",
        )
        assert event.group_id not in found.answer.split()
    assert tried > 2


def test_only_some_of_those_too_old_evicted() -> None:
    events = with_evictions().log.events
    evicted = of_kind(events, "evicted")
    number = next(n for n in evicted if n + 2 in evicted)  # with its `dropped` between them
    found = difference([*events[: number + 2], *events[number + 4 :]])
    after = events[number + 4]
    if after.event == "evicted":
        pytest.fail("a third one was too old as well: find another pair")
    assert (found.seq, found.decision) == (after.seq, "evict")
    assert found.answer == f"the sampler also gives up {events[number + 2].group_id}"


def test_a_bundle_that_is_not_what_the_log_leads_to() -> None:
    run = MemoryRun(settings("in_order-2"), range(300), latency=uneven)
    save = run.trainer.save

    async def save_late(directory: Path) -> None:
        await save(directory)
        await anyio.sleep(40)

    run.trainer.save = save_late  # type: ignore[method-assign]
    lived(run)
    (name, cut), *_ = sorted(cuts(run), key=lambda named: named[1].event_seq)
    assert len(cut.groups) > 4
    at_fault = next(record for record in cut.records if record.target_step is not None)
    moved = replace(at_fault, target_step=7)
    records = tuple(moved if record is at_fault else record for record in cut.records)
    found = difference(run.log.events, bundles=[(name, replace(cut, records=records))])
    assert (found.seq, found.ordinal) == (cut.event_seq, at_fault.ordinal)
    assert found.decision == "ledger" and found.answer.endswith(" for step 7")
    groups = cut.groups[::-1]
    found = difference(run.log.events, bundles=[(name, replace(cut, groups=groups))])
    assert (found.seq, found.ordinal) == (cut.event_seq, None)


# another sampler ---------------------------------------------------------------------------


def of_another_k(k: int) -> Callable[[DecisionSettings], Sampler]:
    def build(recorded: DecisionSettings) -> Sampler:
        config = msgspec.convert(recorded.sampler, SamplerConfig)
        other = replace(config, max_staleness_versions=k, max_lookahead_versions=k)
        return build_sampler(other, recorded.groups_per_step)

    return build


@pytest.mark.parametrize("sampler", ["weight_fifo", "ready_first", "in_order-2"])
def test_a_smaller_k_would_have_let_out_fewer(sampler: str) -> None:
    run = finished(sampler)
    fifth = run.log.events[of_kind(run.log.events, "dispatched")[4]]  # P is 4
    found = difference(run.log.events, sampler=of_another_k(0))
    assert (found.seq, found.decision) == (fifth.seq, "admit")
    assert found.answer == "the sampler admits nothing"
    assert found.view is not None and found.view.live == 4


def test_a_larger_k_would_have_evicted_later() -> None:
    run = with_evictions()
    first = run.log.events[of_kind(run.log.events, "evicted")[0]]
    found = difference(run.log.events, sampler=of_another_k(9))
    assert (found.seq, found.decision) == (first.seq, "evict")
    assert str(found).startswith(f"seq {first.seq}: evict: the log has evicted {first.group_id};")


class Freshest(Windowed):
    """A custom sampler."""

    name = "freshest"

    def __init__(self, config: SamplerConfig, prompts_per_step: int) -> None:
        super().__init__(config.max_staleness_versions, freshest_first=True)


def custom(target: str) -> ControllerConfig:
    config = settings("windowed")
    sampler = replace(config.async_rl.sampler, name="custom", target=target)
    rl = replace(config.async_rl, sampler=sampler, max_buffered_rollouts=12)
    return replace(config, async_rl=rl)


def test_a_custom_sampler_is_imported_by_its_target() -> None:
    run = lived(MemoryRun(custom("test_replay:Freshest"), range(100), latency=uneven))
    with pytest.raises(RestoreError, match="gone:Sampler can't be imported"):
        replay(
            [
                replace(
                    event,
                    settings={
                        **event.settings,
                        "sampler": {"name": "custom", "target": "gone:Sampler"},
                    },
                )
                if event.settings
                else event
                for event in run.log.events
            ]
        )


def test_a_sampler_given_as_an_object_must_be_given_again() -> None:
    run = MemoryRun(settings(), range(100), latency=uneven, sampler=ReadyFirst(2))
    with pytest.raises(RestoreError):
        lived(run)
    with pytest.raises(RestoreError, match=r"was given a sampler object, a sc_core.*:ReadyFirst"):
        replay(run.log.events)
    replayed(run, sampler=lambda recorded: ReadyFirst(2))


def test_a_sampler_that_raises_is_a_difference() -> None:
    class Broken(InOrder):
        def select(self, view: SamplerView, at_least: int, at_most: int) -> Sequence[Group]:
            raise IndexError("off by one")

    run = finished("in_order-2")
    found = difference(run.log.events, sampler=lambda recorded: Broken(2))
    assert (found.decision, found.answer) == ("select", "the sampler raises IndexError: off by one")


# logs that can't be replayed ---------------------------------------------------------------


def test_an_old_log_lacks_the_settings() -> None:
    events = finished("windowed").log.events
    old = [replace(event, settings=None) for event in events]
    with pytest.raises(RestoreError, match=r"seq 1: run_started of .* has no settings \(sampler"):
        replay(old)
    assert events[0].settings is not None
    some = {name: value for name, value in events[0].settings.items() if name != "places"}
    with pytest.raises(RestoreError, match="missing required field `places`"):
        replay([replace(events[0], settings=some), *events[1:]])


def test_a_log_without_its_beginning_has_no_history() -> None:
    events = finished("windowed").log.events
    with pytest.raises(RestoreError, match="no history to replay: seq 2: incarnation"):
        replay(events[1:])


@pytest.mark.parametrize("kind", ["dispatched", "committed", "trained", "redispatched", "dropped"])
def test_what_can_not_have_happened_is_a_difference(kind: Any) -> None:
    events = finished("windowed").log.events
    number = of_kind(events, "committed")[3]
    found = difference(forged(events, number, kind, ordinal=250))
    assert (found.seq, found.ordinal, found.decision) == (events[number].seq, 250, "ledger")
