"""`rollout_recovery.default_granularity: sibling`: what has finished is generated once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.cut import check_cut
from sc_core.errors import BundleInconsistent, Conservation, DataPlaneError, RowsNotCleared
from sc_core.filters import ZeroVarianceFilter
from sc_core.ledger import Ledger
from sc_core.outlook import outlook
from sc_core.records import Cut, FinishedSibling, Prompt, PulledPrompt, Stamp
from sc_core.testing import MemoryRun
from sc_core.verify import candidates, verify

pytestmark = pytest.mark.anyio
G = 3
SAMPLERS: dict[str, dict[str, Any]] = {
    "in_order": {"name": "in_order", "max_lookahead_versions": 2},
    "windowed": {"name": "windowed", "max_staleness_versions": 3},
    "weight_fifo": {"name": "weight_fifo", "max_staleness_versions": 2},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 2},
}


def settings(
    sampler: str = "ready_first", *, granularity: str = "sibling", **sections: Any
) -> ControllerConfig:
    data: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": G,
            "max_num_steps": 6,
        },
        "async_rl": {"sampler": SAMPLERS[sampler]},
        "rollout_recovery": {"default_granularity": granularity},
        "checkpointing": {"save_period": 1},
    }
    for section, values in sections.items():
        data[section] |= values
    return decode(data, ControllerConfig)


class Calls:
    """A script that counts rollout calls, and fails those it is told to, after a second."""

    def __init__(self, fails: Callable[[Prompt, int], bool] = lambda prompt, sibling: False):
        self.of: dict[int, Counter[int]] = defaultdict(Counter)  #: calls by ordinal and sibling
        self._fails = fails

    async def __call__(self, prompt: Prompt, sibling: int, version: int) -> None:
        self.of[prompt.ordinal][sibling] += 1
        if self._fails(prompt, sibling):
            await anyio.sleep(1)
            raise ConnectionError("engine went away")


def first_attempts(ordinal: int, sibling: int, count: int) -> Callable[[Prompt, int], bool]:
    attempts = {f"{ordinal}.{attempt}" for attempt in range(count)}
    return lambda prompt, which: which == sibling and prompt.group_id in attempts


def checked(run: MemoryRun) -> Counter[str]:
    """The law holds in the log and in memory, and no row is without an owner."""
    report = audit(run.log.events)
    assert report.ok, report.violations
    assert run.controller is not None
    run.controller.audit()
    assert not (run.store.rows.keys() ^ run.controller.rows()) - run.controller.suspects()
    return Counter(event.event for event in run.log.events)


def two_seconds(prompt: Prompt, sibling: int) -> float:
    return 2.0


def newest(run: MemoryRun) -> Cut:
    return verify(candidates(run.directory, run.disk)[0], run.disk).cut


# retries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "others"), [("sibling", 1), ("prompt_group", 3)])
async def test_a_retry_generates_what_is_missing(granularity: str, others: int) -> None:
    calls = Calls(first_attempts(1, 2, 2))
    run = MemoryRun(
        settings(granularity=granularity), range(100), script=calls, latency=two_seconds
    )
    assert await run.run() is not None
    assert calls.of[1] == {0: others, 1: others, 2: 3}
    checked(run)


async def test_a_group_is_as_old_as_its_oldest_sibling() -> None:
    calls = Calls(first_attempts(1, 2, 1))
    config = settings(
        async_rl={"rollout_failure": {"backoff_base_s": 10.0}}, grpo={"max_num_steps": 20}
    )
    run = MemoryRun(config, range(100), script=calls, latency=two_seconds)
    stamps: list[tuple[int, int]] = []

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 1:
            stamps.append((sibling, version))
        await calls(prompt, sibling, version)

    run.script = script
    run.start_life()
    assert await run.run() is not None
    (group,) = (e for e in run.log.events if (e.event, e.ordinal) == ("committed", 1))
    assert group.weight_version == 0
    assert sorted(stamps[:3]) == [(0, 0), (1, 0), (2, 0)]
    assert stamps[3][0] == 2 and stamps[3][1] > 0  # each is told the version that serves it
    checked(run)


async def test_finished_siblings_that_no_step_could_train_on_are_made_anew() -> None:
    calls = Calls(first_attempts(1, 2, 1))
    config = settings(
        "windowed",
        async_rl={
            "sampler": {"name": "windowed", "max_staleness_versions": 0},
            "rollout_failure": {"backoff_base_s": 15.0},
            "max_buffered_rollouts": 4,
        },
        grpo={"max_num_steps": 20},
    )
    run = MemoryRun(config, range(10_000), script=calls, latency=two_seconds)
    assert await run.run() is not None
    assert calls.of[1] == {0: 2, 1: 2, 2: 2}
    checked(run)


async def test_a_dropped_prompt_takes_the_rows_of_its_siblings_along() -> None:
    calls = Calls(lambda prompt, sibling: (prompt.ordinal, sibling) == (1, 2))
    run = MemoryRun(settings(), range(100), script=calls, latency=two_seconds)
    assert await run.run() is not None
    assert checked(run)["dropped"] == 1


async def test_a_filtered_group_takes_the_rows_of_its_siblings_along() -> None:
    class Odd(ZeroVarianceFilter):
        def keep(self, rewards: Any) -> bool:
            kept.append(list(rewards))
            return len(kept) % 3 != 0

    kept: list[list[float]] = []
    run = MemoryRun(settings(), range(100), group_filter=Odd())
    assert await run.run() is not None
    assert checked(run)["dropped"] > 0
    assert {len(rewards) for rewards in kept} == {G}


async def test_a_row_that_can_t_be_written_is_tried_again_under_another_id() -> None:
    failed: list[Any] = []

    async def hooks(call: str, point: str) -> None:
        if (call, point) == ("put_samples", "midway") and len(failed) < 2:
            failed.append(call)
            raise DataPlaneError("no room")

    run = MemoryRun(settings(), range(100), hooks=hooks)
    assert await run.run() is not None
    assert checked(run)["redispatched"] in (1, 2)


async def test_a_row_that_can_t_be_cleared_ends_the_run() -> None:
    async def hooks(call: str, point: str) -> None:
        if (call, point) in (("put_samples", "midway"), ("clear_samples", "before")):
            raise DataPlaneError("no room")

    run = MemoryRun(settings(), range(100), hooks=hooks)
    with pytest.raises(RowsNotCleared):
        await run.run()


# restarts --------------------------------------------------------------------------------


def slow_last(prompt: Prompt, sibling: int) -> float:
    return 30.0 if sibling == G - 1 and prompt.ordinal % 3 == 2 else 1.0


@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_a_restart_keeps_finished_siblings(sampler: str) -> None:
    calls = Calls()
    run = MemoryRun(settings(sampler), range(100), script=calls, latency=slow_last)
    assert await run.run(crash_when=lambda e: e.event == "checkpoint" and e.step == 1) is None
    cut = newest(run)
    kept = {(r.ordinal, one.sibling) for r in cut.records for one in r.finished}
    assert kept
    before = {(ordinal, sibling) for ordinal, sibling in kept if calls.of[ordinal][sibling] == 1}
    assert await run.run() is not None
    assert before and all(calls.of[ordinal][sibling] == 1 for ordinal, sibling in before)
    checked(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_recovery": {"default_granularity": "prompt_group"}},
        {"checkpointing": {"load_replay_buffer": False}},
    ],
    ids=str,
)
async def test_a_restart_that_keeps_none_clears_their_rows(changes: dict[str, Any]) -> None:
    calls = Calls()
    run = MemoryRun(settings(), range(100), script=calls, latency=slow_last)
    assert await run.run(crash_when=lambda e: e.event == "checkpoint" and e.step == 1) is None
    ordinals = [r.ordinal for r in newest(run).records if r.finished]
    run.config = settings(**changes)
    notes = outlook(newest(run), run.config).notes
    assert any("clears the rows" in note and "finished sibling" in note for note in notes)
    assert await run.run() is not None
    assert ordinals and all(calls.of[ordinal][0] == 2 for ordinal in ordinals)
    checked(run)


async def test_a_cut_between_the_last_sibling_and_the_commit_commits_after_a_restart() -> None:
    ledger = in_flight()
    for sibling in range(G):
        ledger.finish_sibling(0, finished(sibling))
    restored = Ledger.restored(cut_of(ledger), prompts_per_step=2, group_size=G)
    record = restored.get(0)
    assert record is not None and (record.state, record.attempt) == ("waiting", 1)
    assert len(record.finished) == G
    restored.dispatch(0, None)
    group = restored.commit(
        0,
        rewards=[1.0] * G,
        tokens=0,
        end_weight_version=0,
        rows=[one.sample_id for one in record.finished],
    )
    assert group.sample_ids == ("0.0_g0", "0.0_g1", "0.0_g2")
    restored.audit()


# ledger and cut --------------------------------------------------------------------------


def in_flight() -> Ledger:
    ledger = Ledger(prompts_per_step=2)
    ledger.pull(PulledPrompt(payload="p", position=1))
    ledger.dispatch(0, Stamp())
    return ledger


def finished(sibling: int, **fields: Any) -> FinishedSibling:
    row: dict[str, Any] = {
        "sibling": sibling,
        "sample_id": f"0.0_g{sibling}",
        "reward": 1.0,
        "tokens": 1,
        "end_weight_version": 0,
    }
    return FinishedSibling(**(row | fields))


def cut_of(ledger: Ledger) -> Cut:
    return ledger.cut(
        incarnation="one",
        event_seq=1,
        group_size=G,
        sampler="ready_first",
        sampler_state={},
        source_fingerprint="",
        suspects=(),
    )


def test_a_sibling_finishes_once() -> None:
    ledger = in_flight()
    ledger.finish_sibling(0, finished(1))
    with pytest.raises(Conservation, match="has its sibling 1 already"):
        ledger.finish_sibling(0, finished(1))
    record = ledger.finish_sibling(0, finished(0))
    assert [one.sibling for one in record.finished] == [0, 1]


def test_only_a_waiting_prompt_forgets_its_siblings() -> None:
    ledger = in_flight()
    ledger.finish_sibling(0, finished(1))
    with pytest.raises(Conservation, match="in_flight, not waiting"):
        ledger.forget_siblings(0)
    ledger.retry(0, "infra")
    assert ledger.forget_siblings(0) == ("0.0_g1",)
    assert list(ledger.rows()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"finished": (finished(1), finished(0))}, r"siblings \[1, 0\]; they are distinct"),
        ({"finished": (finished(0), finished(0))}, r"siblings \[0, 0\]; they are distinct"),
        ({"finished": (finished(G),)}, r"siblings \[3\]; they are distinct"),
        ({"finished": (finished(-1),)}, r"siblings \[-1\]; they are distinct"),
        ({"finished": (finished(0, end_weight_version=1),)}, "ended at weight version 1"),
        (
            {"state": "waiting", "start_weight_version": None},
            "start version None and keeps finished",
        ),
        (
            {"finished": (finished(0), finished(1, sample_id="0.0_g0"))},
            "row 0.0_g0 belongs to prompt 0 and to prompt 0",
        ),
    ],
    ids=str,
)
def test_a_cut_with_impossible_siblings_is_refused(change: dict[str, Any], problem: str) -> None:
    ledger = in_flight()
    ledger.finish_sibling(0, finished(1))
    cut = cut_of(ledger)
    check_cut(cut)
    with pytest.raises(BundleInconsistent, match=problem):
        check_cut(replace(cut, records=(replace(cut.records[0], **change),)))


def test_a_committed_prompt_with_siblings_of_its_own_is_refused() -> None:
    ledger = in_flight()
    ledger.commit(0, rewards=[1.0] * G, tokens=0, end_weight_version=0)
    cut = cut_of(ledger)
    record = replace(cut.records[0], finished=(finished(0),))
    with pytest.raises(BundleInconsistent, match="committed with start version 0 and keeps"):
        check_cut(replace(cut, records=(record,)))


def test_a_suspect_row_is_nobodys() -> None:
    ledger = in_flight()
    ledger.finish_sibling(0, finished(1))
    with pytest.raises(BundleInconsistent, match="suspect, but belongs to prompt 0"):
        check_cut(replace(cut_of(ledger), suspects=("0.0_g1",)))
