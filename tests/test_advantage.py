"""The advantage stage: its overlap, its section, masked siblings, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from test_controller import at, settings

from sc_core.advantage import AdvantageStage
from sc_core.barrier import CheckpointBarrier
from sc_core.calls import inline
from sc_core.config import DeadlinesConfig, RolloutRecoveryConfig
from sc_core.cut import check_cut
from sc_core.errors import (
    BundleInconsistent,
    ConfigError,
    EstimatorError,
    WrongAnswer,
    root_cause,
)
from sc_core.estimates import check_estimates
from sc_core.filters import ZeroVarianceFilter
from sc_core.ledger import Ledger
from sc_core.ports import AdvantageEstimator, Runner
from sc_core.records import Batch, Group, Prompt, PulledPrompt, Sample, Stamp, group_id, sample_ids
from sc_core.rows import Rows
from sc_core.spans import Spans
from sc_core.testing import LeaveOneOut, MeanBaseline, MemoryDataPlane, MemoryRun, MemoryStore
from sc_core.verify import candidates, verify

pytestmark = pytest.mark.anyio


def group(ordinal: int, siblings: int, masked: Sequence[int] = ()) -> Group:
    name = group_id(ordinal, 0)
    return Group(
        group_id=name,
        ordinal=ordinal,
        sample_ids=sample_ids(name, siblings),
        start_weight_version=0,
        end_weight_version=0,
        commit_seq=ordinal,
        masked=tuple(masked),
    )


class Plane(MemoryDataPlane):
    """Tells when each call begins and ends; each takes a second."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.told: list[str] = []

    async def get_samples(self, sample_ids: Sequence[str], select_fields: Sequence[str]) -> Any:
        async with Told(self.told, "get", sample_ids[0]):
            return await super().get_samples(sample_ids, select_fields)

    async def put_samples(self, sample_ids: Sequence[str], fields: Any, tags: Any = None) -> None:
        async with Told(self.told, "put", sample_ids[0]):
            await super().put_samples(sample_ids, fields, tags)


def columns_of(store: MemoryStore, row: str) -> dict[str, Any]:
    return {name: msgspec.msgpack.decode(raw) for name, raw in store.rows[row].columns.items()}


def stored(stage: Stage) -> list[dict[str, Any]]:
    return [columns_of(stage.store, row) for row in stage.store.rows]


class Told:
    def __init__(self, calls: list[str], name: str, row: str) -> None:
        self._calls, self._name = calls, f"{name} {row.partition('.')[0]}"

    async def __aenter__(self) -> None:
        self._calls.append(self._name)
        await anyio.sleep(1)

    async def __aexit__(self, *_: object) -> None:
        self._calls.append(f"{self._name} done")


class Stage:
    """A stage over rows with these rewards, one list per group."""

    def __init__(
        self,
        rewards: Mapping[int, Sequence[float]],
        masked: Mapping[int, Sequence[int]] | None = None,
        estimator: AdvantageEstimator | None = None,
    ) -> None:
        masked = masked or {}
        self.groups = tuple(
            group(ordinal, len(each), masked.get(ordinal, ())) for ordinal, each in rewards.items()
        )
        self.batch = Batch(step=1, weight_version=0, groups=self.groups)
        self.store = MemoryStore()
        self.plane = Plane(self.store)
        self.barrier = CheckpointBarrier()
        self.estimator = estimator or MeanBaseline()
        self._rewards = [reward for each in rewards.values() for reward in each]

    async def run(self, runner: Runner = inline) -> dict[int, list[float]]:
        rows = Rows(self.plane, self.barrier, DeadlinesConfig())
        self.plane.told.clear()
        stage = AdvantageStage(
            rows, self.barrier, self.estimator, runner, deadline_s=60.0, spans=Spans()
        )
        await MemoryDataPlane(self.store).put_samples(
            self.batch.sample_ids, {"reward": self._rewards}
        )
        await stage.run(self.batch)
        found = await MemoryDataPlane(self.store).get_samples(self.batch.sample_ids, ["advantage"])
        each = iter(found["advantage"])
        return {one.ordinal: [next(each) for _ in one.sample_ids] for one in self.groups}


# groups ------------------------------------------------------------------------------------


async def test_two_groups_of_the_same_prompt_have_a_baseline_each() -> None:
    seen: list[tuple[int, ...]] = []

    class Spy(LeaveOneOut):
        def estimate(self, columns: Any, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
            seen.append(tuple(group_sizes))
            return super().estimate(columns, group_sizes)

    run = MemoryRun(settings(steps=2), ["the same"] * 100)
    run.estimator = Spy()
    advantages: dict[int, list[float]] = {}
    train = run.trainer.train_microbatches

    async def look(batch: Batch) -> None:
        for one in batch.groups:
            rows = [columns_of(run.store, row) for row in one.sample_ids]
            others = [sum(r["reward"] for r in rows) - row["reward"] for row in rows]
            expected = [r["reward"] - o / 2 for r, o in zip(rows, others, strict=True)]
            assert [r["advantage"] for r in rows] == pytest.approx(expected)
            advantages[one.ordinal] = expected
        await train(batch)

    run.trainer.train_microbatches = look  # type: ignore[method-assign]
    assert await run.run() is not None
    assert len({tuple(each) for each in advantages.values()}) == 8
    assert seen == [(3, 3, 3, 3)] * 2


async def test_slices_do_not_mix_groups() -> None:
    rewards = {ordinal: [float(ordinal), float(ordinal + 3)] for ordinal in range(40)}
    found = await Stage(rewards).run()
    assert found == {ordinal: [-1.5, 1.5] for ordinal in range(40)}


async def test_an_estimator_of_the_whole_chunk_gets_it_in_one_call() -> None:
    seen: list[tuple[int, ...]] = []

    class OverAll(MeanBaseline):
        def estimate(self, columns: Any, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
            seen.append(tuple(group_sizes))
            kept = [r for r, m in zip(columns["reward"], columns["masked"], strict=True) if not m]
            mean = sum(kept) / len(kept)
            return {"advantage": [reward - mean for reward in columns["reward"]]}

    rewards = {ordinal: [float(ordinal), float(ordinal)] for ordinal in range(41)}
    stage = Stage(rewards, {40: [0, 1]}, OverAll(scope="chunk"))
    found = await stage.run()
    assert seen == [(2,) * 41]
    assert found == {ordinal: [ordinal - 19.5] * 2 for ordinal in range(41)}
    assert [call for call in stage.plane.told if call.startswith("put")] == ["put 0", "put 0 done"]


@pytest.mark.parametrize(("chunk", "fine"), [(None, True), (4, True), (3, False), (1, False)])
async def test_a_step_in_chunks_is_refused_where_the_whole_is_compared(
    chunk: int | None, fine: bool
) -> None:
    config = settings(steps=1)
    rl = replace(config.async_rl, min_groups_for_streaming_train=chunk)
    run = MemoryRun(replace(config, async_rl=rl), range(100))
    run.estimator = MeanBaseline(scope="chunk")
    if fine:
        assert await run.run() is not None
        return
    with pytest.raises(
        ConfigError, match=rf"min_groups_for_streaming_train is {chunk}, .* all 4 groups of a step"
    ):
        await run.run()
    run.estimator = MeanBaseline()
    assert await run.run() is not None


async def test_a_scope_that_nobody_knows_is_refused() -> None:
    run = MemoryRun(settings(steps=1), range(100))
    run.estimator = MeanBaseline(scope="batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scope is 'batch'; it is one of group, chunk"):
        await run.run()


# the overlap -------------------------------------------------------------------------------


async def test_fetch_estimate_and_write_back_overlap() -> None:
    calls: list[str] = []

    async def slowly(work: Callable[..., Any], *args: Any) -> Any:
        calls.append("estimate")
        await anyio.sleep(1)
        calls.append("estimate done")
        return work(*args)

    stage = Stage({n: [0.0, 1.0] for n in range(64)}, estimator=MeanBaseline(heavy=True))
    stage.plane.told = calls
    started = anyio.current_time()
    await stage.run(slowly)  # type: ignore[arg-type]
    assert anyio.current_time() - started == pytest.approx(4 + 2)  # not 4 * 3
    assert calls.index("get 16") < calls.index("estimate done")
    assert calls.index("get 32") < calls.index("put 0 done")
    assert calls.index("put 0") < calls.index("get 48 done")
    puts = [call for call in calls if call.startswith("put") and not call.endswith("done")]
    assert puts == ["put 0", "put 16", "put 32", "put 48"]


async def test_the_write_back_waits_for_a_checkpoint_and_the_rest_does_not() -> None:
    stage = Stage({n: [0.0, 1.0] for n in range(64)})

    async def save() -> None:
        async with stage.barrier.checkpoint("save"):
            await anyio.sleep(10)
            begun = [call for call in stage.plane.told if not call.endswith("done")]
            assert "get 32" in begun and not any(call.startswith("put") for call in begun)

    async with anyio.create_task_group() as tg:
        tg.start_soon(save)
        await anyio.sleep(1)
        tg.start_soon(stage.run)
    assert [call for call in stage.plane.told if call.startswith("put")][-1] == "put 48 done"
    assert not stage.barrier.statistics().holders


# masked siblings ---------------------------------------------------------------------------


async def test_masked_siblings_move_no_baseline_and_have_no_advantage() -> None:
    rewards = {0: [1.0, 0.0, 9.0, 1.0], 1: [1.0, 0.0, 1.0, 1.0], 2: [5.0, 7.0, 1.0, 1.0]}
    masked = {0: [2], 2: [0, 1, 2, 3]}
    found = await Stage(rewards, masked).run()
    assert found[0] == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])
    assert found[1] == pytest.approx([0.25, -0.75, 0.25, 0.25])
    assert found[2] == [0.0] * 4
    found = await Stage(rewards, {**masked, 1: [0, 1, 2]}, LeaveOneOut()).run()
    assert found[0] == pytest.approx([0.5, -1.0, 0.0, 0.5])
    assert found[1] == [0.0] * 4  # who is left has nobody to be compared with


async def test_an_estimator_that_knows_no_masks_is_not_given_any() -> None:
    class Blind(MeanBaseline):
        select_fields = ("reward",)  # type: ignore[assignment]

        def estimate(self, columns: Any, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
            assert set(columns) == {"reward"}
            columns["masked"] = [False] * len(columns["reward"])
            return super().estimate(columns, group_sizes)

    assert await Stage({3: [0.0, 1.0]}, estimator=Blind()).run() == {3: [-0.5, 0.5]}
    stage = Stage({3: [0.0, 1.0], 4: [0.0, 1.0]}, {4: [1]}, Blind())
    with pytest.raises(EstimatorError, match=r"group 4\.0 has masked siblings.*add masked to"):
        await stage.run()
    assert not any("advantage" in row for row in stored(stage))


def cut_off(which: Callable[[Prompt, int], bool], run: MemoryRun) -> None:
    """Let the engines of this life mark the samples that `which` names."""
    rollout = run.engines.rollout

    async def marked(prompt: Prompt, sibling: int, version: int) -> Sample:
        made = await rollout(prompt, sibling, version)
        return Sample(
            fields=made.fields,
            reward=made.reward,
            tokens=made.tokens,
            end_weight_version=made.end_weight_version,
            masked=which(prompt, sibling),
        )

    run.engines.rollout = marked  # type: ignore[method-assign]


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_a_run_leaves_masked_siblings_out_and_goes_on(granularity: str) -> None:
    """Of some groups one sibling is masked, of some all, and of whole steps everything."""

    def which(prompt: Prompt, sibling: int) -> bool:
        return prompt.ordinal // 4 == 1 or prompt.ordinal % 3 == 0 or sibling == 1

    recovery = RolloutRecoveryConfig(default_granularity=granularity)  # type: ignore[arg-type]
    config = replace(settings(steps=4), rollout_recovery=recovery)
    run = MemoryRun(config, range(100))
    cut_off(which, run)
    chunks: list[Batch] = []
    train = run.trainer.train_microbatches

    async def look(batch: Batch) -> None:
        chunks.append(batch)
        for one in batch.groups:
            rows = [columns_of(run.store, row) for row in one.sample_ids]
            kept = [r["reward"] for n, r in enumerate(rows) if n not in one.masked]
            everything = kept or [row["reward"] for row in rows]
            assert one.reward == pytest.approx(sum(everything) / len(everything))
            for sibling, row in enumerate(rows):
                expected = 0.0 if sibling in one.masked else row["reward"] - one.reward
                assert row["advantage"] == pytest.approx(expected)
        await train(batch)

    run.trainer.train_microbatches = look  # type: ignore[method-assign]
    result = await run.run()
    assert result is not None and (result.step, result.reason) == (4, "max_steps")
    whole = [one.masked for batch in chunks for one in batch.groups]
    assert whole[:8] == [(0, 1, 2), (1,), (1,), (0, 1, 2), *[(0, 1, 2)] * 4]
    assert list(chunks[0].trained_ids) == ["1.0_g0", "1.0_g2", "2.0_g0", "2.0_g2"]
    assert chunks[1].trained_ids == ()
    assert all(math.isfinite(step["train/loss"]) for step in run.metrics.steps)


async def test_the_filter_is_asked_of_the_siblings_that_are_trained_on() -> None:
    class Spy(ZeroVarianceFilter):
        def keep(self, rewards: Sequence[float]) -> bool:
            asked.append(len(rewards))
            return super().keep(rewards)

    asked: list[int] = []
    run = MemoryRun(settings(steps=2), range(100), group_filter=Spy())
    cut_off(lambda prompt, sibling: prompt.ordinal == 2 or sibling == prompt.ordinal, run)
    assert await run.run() is not None
    assert sorted(asked[:4]) == [0, 2, 2, 3]
    dropped = [e.group_id for e in run.log.events if e.event == "dropped"]
    assert "2.0" in dropped


# what is refused ---------------------------------------------------------------------------


class Returns(MeanBaseline):
    """An estimator that returns what it was given."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self._answers = list(answers)

    def estimate(self, columns: Any, group_sizes: Sequence[int]) -> Any:
        return self._answers.pop(0)


class Array:
    """Several numbers that are no sequence, like a tensor."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = numbers

    def __repr__(self) -> str:
        return f"Array{self._numbers}"

    def sum(self) -> float:
        return sum(self._numbers)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"advantage": [0.0, NAN, 0.0, 0.0]}, r"advantage nan for row 5.0_g1 of group 5\.0"),
        ({"advantage": [0.0, 0.0, -INF, 0.0]}, r"advantage -inf for row 7.0_g0 of group 7\.0"),
        ({"advantage": [0.0, 0.0, 0.0, [1.0, NAN]]}, r"\[1.0, nan\] for row 7.0_g1 of group 7\.0"),
        ({"advantage": [0.0, Array(1, NAN), 0.0, 0.0]}, r"Array\(1, nan\) for row 5.0_g1"),
        ({"advantage": [0.0, 0.0, None, 0.0]}, r"None for row 7.0_g0 of group 7\.0"),
        ({"advantage": [0.0, 0.0, "1", 0.0]}, r"'1' for row 7.0_g0"),
        ({"advantage": [0.0] * 4, "value": [0.0, 0.0, NAN, 0.0]}, r"value nan for row 7.0_g0"),
        ({"advantage": [0.0, 0.0, 0.0]}, r"estimate returned 3 for column advantage, not 4"),
        ({"advantage": 0.0}, r"estimate returned a value of type float for column"),
        ({}, r"the columns none; it must make new ones, and masked, reward were given"),
        ({"reward": [0.0] * 4}, r"the columns reward; it must make new ones"),
        (None, r"returned None, not the columns of 4 rows"),
        ([0.0] * 4, r"type list, not the columns of 4 rows"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused(answer: Any, problem: str) -> None:
    stage = Stage({5: [0.0, 1.0], 7: [0.0, 1.0]}, estimator=Returns(answer))
    with pytest.raises(ExceptionGroup) as raised:
        await stage.run()
    error = root_cause(raised.value)
    with pytest.raises((EstimatorError, WrongAnswer), match=problem):
        raise error
    assert all(row.keys() == {"reward"} for row in stored(stage))
    assert not stage.barrier.statistics().holders


async def test_each_slice_has_the_same_columns() -> None:
    rewards = {n: [0.0, 1.0] for n in range(17)}
    fine, other = {"advantage": [0.0] * 32}, {"advantage": [0.0] * 2, "value": [0.0] * 2}
    stage = Stage(rewards, estimator=Returns(fine, other))
    with pytest.raises(ExceptionGroup) as raised:
        await stage.run()
    assert "returned the columns advantage, value, and advantage before" in str(
        root_cause(raised.value)
    )


async def test_a_run_ends_with_the_estimators_error() -> None:
    class Bad(MeanBaseline):
        def estimate(self, columns: Any, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
            made = super().estimate(columns, group_sizes)
            made["advantage"][4] = NAN
            return made

    run = MemoryRun(settings(steps=2), range(100))
    run.estimator = Bad()
    with pytest.raises(EstimatorError, match=r"nan for row 1.0_g1 of group 1\.0"):
        await run.run()
    assert run.controller is not None
    run.controller.audit()
    assert run.controller.statistics().committed >= 4  # the open step was abandoned


@pytest.mark.parametrize("value", [0, 1.5, True, [1.0, 2], (), Array(1.0, 2.0), [Array(0.0)]])
def test_finite_values_of_any_kind_pass(value: Any) -> None:
    assert check_estimates({"a": [value]}, ["0.0_g0"], read=("reward",)) == {"a"}


async def test_a_sample_that_is_masked_maybe_is_no_sample() -> None:
    run = MemoryRun(settings(steps=1), range(100))
    cut_off(lambda prompt, sibling: 0 if prompt.ordinal == 1 else False, run)  # type: ignore[arg-type, return-value]
    assert await run.run() is not None
    (first, *_) = [e for e in run.log.events if e.event == "redispatched"]
    assert first.reason is not None and "masked = 0, which is no bool" in first.reason


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_masks_survive_a_restart(granularity: str) -> None:
    """In the index, and in the ledger where a group is not whole yet."""
    recovery = RolloutRecoveryConfig(default_granularity=granularity)  # type: ignore[arg-type]
    config = replace(settings("ready_first", steps=6), rollout_recovery=recovery)

    def latency(prompt: Prompt, sibling: int) -> float:
        return 1.0 + 3 * sibling + 0.7 * (prompt.ordinal % 4)

    run = MemoryRun(config, range(100), latency=latency)
    cut_off(lambda prompt, sibling: sibling == 0, run)
    save = run.trainer.save

    async def save_late(directory: Path) -> None:
        await save(directory)
        await anyio.sleep(8)

    run.trainer.save = save_late  # type: ignore[method-assign]
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    cut = verify(candidates(run.directory, run.disk)[0], run.disk).cut
    finished = [one for record in cut.records for one in record.finished]
    assert {group.masked for group in cut.groups} <= {(0,)}
    assert all(one.masked is (one.sibling == 0) for one in finished)
    assert bool(finished) is (granularity == "sibling")
    assert cut.groups
    trained: list[Group] = []
    start_life = run.start_life

    def start_and_look() -> None:
        start_life()
        train = run.trainer.train_microbatches

        async def look(batch: Batch) -> None:
            trained.extend(batch.groups)
            await train(batch)

        run.trainer.train_microbatches = look  # type: ignore[method-assign]

    run.start_life = start_and_look  # type: ignore[method-assign]
    assert await run.run() is not None
    kept = {group.group_id for group in cut.groups} | {
        group_id(record.ordinal, record.attempt + 1) for record in cut.records if record.finished
    }
    assert {one.masked for one in trained if one.group_id in kept} == {(0,)}
    assert {one.masked for one in trained if one.group_id not in kept} == {()}


@pytest.mark.parametrize("masked", [(3,), (-1,), (1, 0), (1, 1)])
async def test_a_cut_that_masks_what_is_not_there_is_refused(masked: tuple[int, ...]) -> None:
    ledger = Ledger(prompts_per_step=1)
    ledger.pull(PulledPrompt("p", 1))
    ledger.dispatch(0, Stamp())
    made = ledger.commit(0, rewards=[1.0, 4.0, 2.0], tokens=3, end_weight_version=0, masked=[1])
    assert (made.masked, made.reward) == ((1,), 1.5)
    cut = ledger.cut(
        incarnation="a",
        event_seq=1,
        group_size=3,
        sampler="windowed",
        sampler_state={},
        source_fingerprint="",
        suspects=(),
    )
    check_cut(cut)
    with pytest.raises(BundleInconsistent, match=r"group 0\.0 has masked siblings"):
        check_cut(replace(cut, groups=(replace(made, masked=masked),)))
