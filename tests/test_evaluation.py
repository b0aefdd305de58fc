"""Evaluation in the loop: when, on which weights, in whose slots, and over crashes and stops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from test_controller import at, fates, settings, uneven

from sc_core.config import ControllerConfig, decode
from sc_core.cut import check_cut, cut_digest, decode_cut, digest_of_encoded, encode_cut
from sc_core.errors import (
    BundleInconsistent,
    ConfigError,
    DataFailure,
    StallError,
    WorkerDied,
)
from sc_core.records import Cut, EvaluatedPrompt, Evaluation, GroupId, Prompt
from sc_core.testing import MemoryRun
from sc_core.verify import verify

pytestmark = pytest.mark.anyio

SMALL = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
EVERY_4 = SMALL | {"val_period": 4}


def a_run(sampler: str = "in_order-0", *, held_out: int = 6, **given: Any) -> MemoryRun:
    grpo = EVERY_4 | given.pop("grpo", {})
    script = given.pop("script", None)
    config = settings(sampler, grpo=grpo, **given)
    prompts = [f"held out {number}" for number in range(held_out)]
    return MemoryRun(config, range(500), latency=uneven, script=script, held_out=prompts)


def values(run: MemoryRun, name: str = "val/reward") -> dict[int, float]:
    """A metric by step, where there is one."""
    return {line["step"]: line[name] for line in run.metrics.steps if name in line}


def evaluated(run: MemoryRun) -> Counter[tuple[int, int]]:
    """How often each held-out prompt was sent, by weight version and number."""
    return Counter((v, -1 - ordinal) for ordinal, _, v in run.engines.rollouts if ordinal < 0)


def each_once(versions: list[int], prompts: int = 6) -> Counter[tuple[int, int]]:
    return Counter((version, number) for version in versions for number in range(prompts))


# when, and what it says ------------------------------------------------------------------


@pytest.mark.parametrize(
    "when, versions",
    [
        ({}, [4, 8, 12]),
        ({"val_period": 5}, [5, 10]),
        ({"val_period": 5, "val_at_end": True}, [5, 10, 12]),
        ({"val_period": 0, "val_at_start": True}, [0]),
        ({"val_period": 6, "val_at_start": True, "val_at_end": True}, [0, 6, 12]),
        ({"val_period": 0}, []),
    ],
)
async def test_an_evaluation_is_made_when_it_is_due_on_the_weights_of_that_step(
    when: dict[str, Any], versions: list[int]
) -> None:
    run = a_run("windowed", grpo=when)
    await run.run()
    assert list(values(run)) == versions
    assert evaluated(run) == each_once(versions)
    assert [line["step"] for line in run.metrics.steps if "train/reward" in line] == [*range(1, 13)]
    assert fates(run)["trained"] == 24
    assert run.controller is not None and run.store.rows.keys() == run.controller.rows()


async def test_the_metrics_are_those_of_the_rewards_and_training_is_none_the_wiser() -> None:
    rewards: dict[int, list[float]] = {}
    run = a_run(grpo={"num_val_generations_per_prompt": 3, "max_val_samples": 5})
    rollout = run.engines.rollout

    async def noted(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        if prompt.ordinal < 0 and version == 8:
            rewards.setdefault(prompt.ordinal, []).append(sample.reward)
        return sample

    run.engines.rollout = noted  # type: ignore[method-assign]
    await run.run()
    assert {len(of_one) for of_one in rewards.values()} == {3} and len(rewards) == 5
    means = [math.fsum(of_one) / 3 for of_one in rewards.values()]
    mean = math.fsum(means) / 5
    std = math.sqrt(math.fsum((one - mean) ** 2 for one in means) / 5)
    (line,) = (line for line in run.metrics.steps if line["step"] == 8)
    assert line["val/reward"] == pytest.approx(mean) and 0 < mean < 1
    assert line["val/reward_std"] == pytest.approx(std)
    assert (line["val/prompts"], line["val/failed"], line["val/tokens"]) == (5, 0, 5 * (4 + 5 + 6))
    assert line["timing/val/total"] > 0 and "timing/train/total_step_time" in line
    assert run.controller is not None
    assert run.controller.statistics().last_evaluation["val/reward"] == values(run)[12]

    alone = MemoryRun(settings(grpo=SMALL), range(500), latency=uneven)
    await alone.run()
    assert alone.trainer.weights == run.trainer.weights


async def test_the_end_of_prompts_is_an_end_too() -> None:
    run = a_run(steps=100, grpo={"val_period": 0, "val_at_end": True})
    run.prompts = range(5)
    run.start_life()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 3)
    assert list(values(run)) == [3] and evaluated(run) == each_once([3])
    info = verify(run.directory / "step_3", run.disk).info
    assert info.metrics["val/reward"] == values(run)[3]
    await run.run()  # the bundle has it
    assert evaluated(run) == Counter() and run.metrics.steps == []


# slots -----------------------------------------------------------------------------------


class Slots:
    """Notes when engines begin with a group, and how many they work at, of both kinds."""

    def __init__(self) -> None:
        self.busy: Counter[bool] = Counter()
        self.most = self.beside = 0
        self.begun: list[tuple[float, int, int]] = []  #: time, ordinal, weight version

    async def __call__(self, prompt: Prompt, sibling: int, version: int) -> None:
        if sibling:
            return
        held_out = prompt.ordinal < 0
        self.begun.append((anyio.current_time(), prompt.ordinal, version))
        self.busy[held_out] += 1
        self.most = max(self.most, self.busy.total())
        self.beside += min(self.busy[True], self.busy[False]) > 0
        try:
            await anyio.sleep(20)  # longer than any sibling takes: the group ends with this one
        finally:
            self.busy[held_out] -= 1

    def overtaken(self, version: int) -> list[int]:
        """Prompts of training that went out while held-out ones waited."""
        waited = [when for when, ordinal, at in self.begun if ordinal < 0 and at == version]
        assert len(waited) == 6
        return [o for when, o, _ in self.begun if o >= 0 and waited[0] < when < waited[-1]]


@pytest.mark.parametrize("max_inflight", [1, 3, 8])
async def test_evaluation_and_training_share_the_slots_and_evaluation_goes_first(
    max_inflight: int,
) -> None:
    slots = Slots()
    limits = {"max_inflight_prompts": max_inflight, "max_buffered_rollouts": 40}
    run = a_run("windowed", async_rl=limits, script=slots)
    result = await run.run()
    assert result is not None and result.step == 12
    assert list(values(run)) == [4, 8, 12]
    assert slots.most == max_inflight
    assert [slots.overtaken(version) for version in (4, 8, 12)] == [[], [], []]
    assert (slots.beside > 0) == (max_inflight > 1)  # training had what was left over


async def test_rollouts_go_on_while_an_evaluation_waits_for_a_straggler() -> None:
    async def one_is_slow(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal >= 0:
            begun.append(anyio.current_time())
        elif prompt.ordinal == -3 and version == 4:
            waited.append(anyio.current_time())
            await anyio.sleep(300)

    begun: list[float] = []
    waited: list[float] = []
    limits = {"max_inflight_prompts": 3, "max_buffered_rollouts": 30}
    await a_run("windowed", async_rl=limits, script=one_is_slow).run()
    beside = [when for when in begun if waited[0] < when < waited[0] + 300]
    assert len(beside) > 20 and max(beside) - min(beside) > 20


# failures --------------------------------------------------------------------------------


async def test_a_prompt_has_the_attempts_of_any_other_and_is_then_counted_as_failed() -> None:
    async def flaky(prompt: Prompt, sibling: int, version: int) -> None:
        groups.append(prompt.group_id)
        attempt = prompt.group_id.rpartition(".")[2]
        if prompt.ordinal == -1 or (prompt.ordinal == -2 and attempt != "2"):
            raise ConnectionError("engine went away")
        if prompt.ordinal == -3:
            raise DataFailure("it has no answer")
        if prompt.ordinal == -4 and attempt == "0":
            await anyio.sleep_forever()

    groups: list[str] = []
    run = a_run(script=flaky, async_rl={"deadlines": {"rollout_s": 50}})
    result = await run.run()
    assert result is not None and result.step == 12
    held_out = Counter(group for group in groups if group.startswith("val4."))
    assert held_out == Counter(
        ["val4.0.0", "val4.0.1", "val4.0.2", "val4.1.0", "val4.1.1", "val4.1.2"]
        + ["val4.2.0", "val4.3.0", "val4.3.1", "val4.4.0", "val4.5.0"]
    )
    (line,) = (line for line in run.metrics.steps if line["step"] == 4)
    assert (line["val/prompts"], line["val/failed"]) == (4, 2)
    assert line["timing/val/total"] > 50
    assert result.counters["infra_failures"] == 0 and fates(run) == {"trained": 24}


async def test_a_prompt_that_backs_off_leaves_its_slot_to_the_next() -> None:
    async def first_fails_once(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal < 0:
            began.append((prompt.group_id, anyio.current_time()))
        if prompt.group_id == "val4.0.0":
            raise ConnectionError("engine went away")

    began: list[tuple[str, float]] = []
    backoff = {"backoff_base_s": 100, "max_backoff_s": 100}
    slow = {"max_inflight_prompts": 1, "rollout_failure": backoff}
    await a_run(script=first_fails_once, async_rl=slow, held_out=2, steps=4).run()
    assert [group for group, _ in began] == ["val4.0.0", "val4.1.0", "val4.0.1"]
    (_, first), (_, second), (_, again) = began
    assert second - first < 50 and again - first >= 100


async def test_failed_prompts_have_no_part_in_the_mean() -> None:
    async def one_fails(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == -6:
            raise DataFailure("it has no answer")

    run, without = a_run(script=one_fails), a_run(held_out=5)
    await run.run()
    await without.run()
    assert values(run) == values(without)
    assert set(values(run, "val/failed").values()) == {1}


async def test_a_failed_sibling_ends_the_others_and_leaves_no_half_prompt() -> None:
    async def second_fails(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == -1:
            if sibling == 1:
                raise DataFailure("it has no answer")
            try:
                await anyio.sleep(1000)
            finally:
                ended.append(anyio.current_time())

    ended: list[float] = []
    run = a_run(script=second_fails, grpo={"num_val_generations_per_prompt": 3})
    await run.run()
    assert set(values(run, "val/prompts").values()) == {5}
    assert set(values(run, "val/tokens").values()) == {5 * (4 + 5 + 6)}
    assert len(ended) == 3 * 2 and max(values(run, "timing/val/total").values()) < 500


async def test_a_sample_of_other_weights_is_a_failure() -> None:
    run = a_run()
    rollout = run.engines.rollout

    async def older(prompt: Prompt, sibling: int, version: int) -> Any:
        sample = await rollout(prompt, sibling, version)
        if prompt.ordinal == -2:
            return replace(sample, end_weight_version=version - 1)
        return sample

    run.engines.rollout = older  # type: ignore[method-assign]
    await run.run()
    assert set(values(run, "val/failed").values()) == {1}


async def test_an_evaluation_in_which_all_fail_has_no_reward_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal < 0 and version == 8:
            raise ZeroDivisionError("in the reward function")

    best = {"save_period": 4, "metric_name": "val:reward", "keep_top_k": 2, "ft_keep_latest_k": 1}
    run = a_run(script=broken, checkpointing=best)
    result = await run.run()
    assert result is not None and result.step == 12
    assert list(values(run)) == [4, 12]
    assert values(run, "val/failed") == {4: 0, 8: 6, 12: 0}
    assert "after step 8: none of 6 prompts could be evaluated; the last failed as" in caplog.text
    assert "ZeroDivisionError: in the reward function" in caplog.text
    assert run.bundles() == [4, 12]  # one without the number is worse than any other


async def test_a_worker_that_died_ends_the_run() -> None:
    async def dies(prompt: Prompt, sibling: int, version: int) -> None:
        if (prompt.ordinal, sibling) == (-4, 1):
            raise ConnectionError("engine went away")
        if prompt.ordinal < 0:
            try:
                await anyio.sleep(100)
            except anyio.get_cancelled_exc_class():
                raise WorkerDied("every generation worker", "killed") from None

    run = a_run(script=dies, grpo={"num_val_generations_per_prompt": 2})
    with pytest.raises(WorkerDied, match="every generation worker died: killed"):
        await run.run()
    assert run.metrics.steps[-1]["step"] == 4  # the step that was made has its line


async def test_a_finished_evaluation_is_progress_and_a_finished_prompt_is_none() -> None:
    async def slow(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal < 0:
            await anyio.sleep(80)

    limits = {
        "stall_watchdog": {"stall_timeout_s": 100},
        "max_inflight_prompts": 4,
        "max_buffered_rollouts": 4,
    }
    result = await a_run(script=slow, async_rl=limits, held_out=4).run()
    assert result is not None and result.step == 12
    told = "an evaluation is under way: rollout of sibling 0 of group val4.4.0 has not returned"
    with pytest.raises(StallError, match=told):
        await a_run(script=slow, async_rl=limits, held_out=5).run()

    async def one_step_in_50_s(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(60)  # an evaluation and a step in 100 s, and neither in less than 50

    result = await a_run(script=one_step_in_50_s, async_rl=limits, held_out=4).run()
    assert result is not None and result.step == 12


async def test_a_stall_before_an_evaluation_has_a_slot_names_who_holds_it() -> None:
    async def hangs(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 8:  # of step 5
            await anyio.sleep_forever()

    limits = {
        "stall_watchdog": {"stall_timeout_s": 100},
        "max_inflight_prompts": 1,
        "max_buffered_rollouts": 4,
        "deadlines": {"rollout_s": 1e6},
    }
    run = a_run("windowed", script=hangs, async_rl=limits)
    told = (
        r"evaluation waits for a slot; groups in flight: 1; rollout of sibling \d of group 8\.0 has"
    )
    with pytest.raises(StallError, match=told):
        await run.run()


# stops, saves and crashes ----------------------------------------------------------------


def after(count: int, act: Callable[[], None]) -> Any:
    """Acts once, when `count` prompts of the evaluation at version 8 are finished."""
    sent = 0

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        nonlocal sent
        if prompt.ordinal < 0 and version == 8:
            sent += 1
            if sent > count:
                await anyio.sleep(30)
                act()
                try:
                    await anyio.sleep(1000)
                except anyio.get_cancelled_exc_class():
                    raise ConnectionError("the request was aborted") from None

    return script


@pytest.mark.parametrize("finished", [0, 1, 5])
async def test_a_stop_in_mid_evaluation_keeps_what_is_finished_and_a_resume_does_the_rest(
    finished: int,
) -> None:
    run = a_run(async_rl={"rollout_failure": {"max_infra_attempts_per_prompt": 1}})
    run.script = after(finished, lambda: run.controller.stop())  # type: ignore[union-attr]
    run.start_life()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 8)
    assert list(values(run)) == [4] and run.metrics.steps[-1]["step"] == 8
    evaluation = verify(run.directory / "step_8", run.disk).cut.evaluation
    assert evaluation is not None and evaluation.summary is None
    done = {(8, result.number) for result in evaluation.results}
    assert len(done) == finished

    run.script = None
    result = await run.run()
    assert result is not None and result.step == 12
    assert evaluated(run) == Counter((each_once([8, 12]).keys()) - done)
    whole = a_run()
    await whole.run()
    assert list(values(run)) == [8, 12]
    assert values(run)[8] == values(whole)[8]
    first = run.metrics.steps[0]
    assert (first["step"], first["incarnation"]) == (8, run.log.incarnation)
    assert first["train/reward"] == whole.metrics.steps[7]["train/reward"]
    assert run.trainer.weights == whole.trainer.weights


async def test_a_stop_at_the_last_evaluation_leaves_it_to_the_next_start() -> None:
    run = a_run(steps=8)
    run.script = after(2, lambda: run.controller.stop())  # type: ignore[union-attr]
    run.start_life()
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("stopped", 8)
    run.script = None
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 8)
    assert evaluated(run).total() == 4
    assert verify(run.directory / "step_8", run.disk).info.metrics["val/reward"] == values(run)[8]
    await run.run()
    assert run.engines.rollouts == []


async def test_a_bundle_asked_for_in_mid_evaluation_has_its_results() -> None:
    run = a_run(checkpointing={"save_period": 100})
    ask = after(3, lambda: run.controller.request_checkpoint())  # type: ignore[union-attr]
    run.script = ask
    run.start_life()
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    run.script = None
    result = await run.run()
    assert result is not None and result.step == 12
    assert list(values(run)) == [8, 12]
    assert evaluated(run) == each_once([8, 12]) - Counter({(8, number): 1 for number in range(3)})


async def test_an_evaluation_goes_on_while_a_bundle_is_saved() -> None:
    async def slow_save(call: str, point: str) -> None:
        if call == "save_checkpoint" and point == "midway":
            saving.append(anyio.current_time())
            await anyio.sleep(400)

    async def ask(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == -1 and version == 4 and run.controller is not None:
            run.controller.request_checkpoint()
        if prompt.ordinal < 0:
            began.append(anyio.current_time())

    saving: list[float] = []
    began: list[float] = []
    run = a_run(script=ask, async_rl={"max_inflight_prompts": 1}, steps=4)
    run.hooks = slow_save
    run.config = replace(
        run.config, checkpointing=replace(run.config.checkpointing, save_period=100)
    )
    await run.run()
    assert sum(saving[0] < when < saving[0] + 400 for when in began) == 5


@pytest.mark.parametrize("save_period, again", [(4, []), (3, [8])])
async def test_a_crash_repeats_a_finished_evaluation_only_if_no_bundle_has_it(
    save_period: int, again: list[int]
) -> None:
    run = a_run(checkpointing={"save_period": save_period})
    assert await run.run(crash_when=at("trained", 17)) is None  # in step 9, after an evaluation
    result = await run.run()
    assert result is not None and result.step == 12
    assert evaluated(run) == each_once([*again, 12])
    assert fates(run)["trained"] >= 24


@pytest.mark.parametrize("kind, count", [("dispatched", 11), ("committed", 14), ("checkpoint", 2)])
async def test_a_killed_run_ends_like_one_that_was_not(kind: str, count: int) -> None:
    def made() -> MemoryRun:
        return a_run(grpo={"val_at_start": True}, steps=8)

    run, whole = made(), made()
    await whole.run()
    assert await run.run(crash_when=at(kind, count)) is None
    result = await run.run()
    assert result is not None and result.step == 8
    assert run.trainer.weights == whole.trainer.weights
    assert values(run).items() <= values(whole).items() and 8 in values(run)
    assert max(evaluated(run).values()) == 1


async def test_other_held_out_prompts_or_numbers_begin_anew() -> None:
    for change in ("prompts", "generations", "off"):
        run = a_run()
        run.script = after(3, lambda run=run: run.controller.stop())  # type: ignore[misc]
        run.start_life()
        await run.run()
        run.script = None
        assert run.held_out is not None
        if change == "prompts":
            run.held_out = [*run.held_out[:-1], "another"]
        elif change == "generations":
            run.config = settings(grpo=EVERY_4 | {"num_val_generations_per_prompt": 2})
        else:
            run.config, run.held_out = settings(grpo=SMALL), None
        result = await run.run()
        assert result is not None and result.step == 12
        again = {"prompts": 6, "generations": 12, "off": 0}[change]
        assert sum(n for (v, _), n in evaluated(run).items() if v == 8) == again


# bundles ---------------------------------------------------------------------------------


async def test_a_bundle_of_the_same_step_has_the_number_and_is_ranked_by_it() -> None:
    best = {"save_period": 2, "metric_name": "val:reward", "keep_top_k": 2}
    run = a_run("windowed", checkpointing=best, steps=18, grpo={"val_period": 4})
    await run.run()
    found = values(run)
    assert list(found) == [4, 8, 12, 16] and len(set(found.values())) == 4
    ranked = sorted(found, key=found.__getitem__)[-2:]
    assert run.bundles() == sorted({*ranked, 18})
    info = verify(run.directory / f"step_{ranked[0]}", run.disk).info
    assert info.metrics["val/reward"] == found[ranked[0]]


@pytest.mark.parametrize("name", ["train:reward", "train/reward"])
async def test_both_spellings_of_a_metric_rank_alike(name: str) -> None:
    best = {"save_period": 1, "metric_name": name, "keep_top_k": 1}
    run = MemoryRun(settings(grpo=SMALL, checkpointing=best), range(500), latency=uneven)
    await run.run()
    rewards = values(run, "train/reward")
    assert run.bundles() == sorted({max(rewards, key=rewards.__getitem__), 12})


@pytest.mark.parametrize("name", [None, "train:rewrd"])
async def test_a_bundle_without_the_number_it_is_ranked_by_is_told_of(
    name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    best = {"save_period": 6, "metric_name": name, "keep_top_k": 1}
    await MemoryRun(settings(grpo=SMALL, checkpointing=best), range(500)).run()
    told = [m for m in caplog.messages if m.endswith("with keep_top_k it comes last")]
    assert len(told) == 2 and (name or "").replace(":", "/") in told[0]


# settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section, key, value, says",
    [
        ("grpo", "val_period", -1, "grpo.val_period is -1; it must be at least 0"),
        ("grpo", "max_val_samples", 0, "grpo.max_val_samples is 0"),
        ("grpo", "num_val_generations_per_prompt", 0, "num_val_generations_per_prompt is 0"),
        ("checkpointing", "metric_name", "val:reward", "nothing is evaluated: set grpo.val_period"),
        ("checkpointing", "metric_name", "val/reward", "nothing is evaluated: set grpo.val_period"),
        ("checkpointing", "metric_name", "val:accuracy", "an evaluation has val/reward, "),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    section: str, key: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        decode({section: {key: value}}, ControllerConfig)


@pytest.mark.parametrize("when", ["val_period", "val_at_start", "val_at_end"])
async def test_an_evaluation_without_prompts_is_refused_at_construction(when: str) -> None:
    config = settings(grpo={when: 1 if when == "val_period" else True})
    with pytest.raises(ConfigError, match="give the controller a port `validation`"):
        await MemoryRun(config, range(500)).run()
    with pytest.raises(ConfigError, match="there are no held-out prompts"):
        await MemoryRun(config, range(500), held_out=[]).run()


# the cut ---------------------------------------------------------------------------------


def a_cut(**evaluation: Any) -> Cut:
    sound: dict[str, Any] = {"weight_version": 3, "fingerprint": "f", "prompts": 4}
    return Cut(
        incarnation="one",
        event_seq=9,
        step=3,
        weight_version=3,
        group_size=2,
        prompts_per_step=2,
        next_ordinal=0,
        position=None,
        evaluation=Evaluation(**(sound | evaluation)) if evaluation else None,
    )


def test_a_cut_without_an_evaluation_is_written_as_it_was_before_there_were_any() -> None:
    assert b"evaluation" not in encode_cut(a_cut())
    assert cut_digest(a_cut()) == "6a9b9fcc40508479f208919d2b10e51d9e3dc846a4c5311764dc17b03370c1c1"


def test_an_evaluation_survives_the_disk_and_is_in_the_digest() -> None:
    result = EvaluatedPrompt(number=2, rewards=(0.5, 1.0), tokens=7)
    cuts = [
        a_cut(),
        a_cut(results=(result,)),
        a_cut(results=(replace(result, rewards=(0.5, 0.0)),)),
        a_cut(summary={"val/reward": 0.75}),
    ]
    assert len({cut_digest(cut) for cut in cuts}) == 4
    for cut in cuts:
        check_cut(cut)
        assert decode_cut(encode_cut(cut)) == cut
        assert digest_of_encoded(encode_cut(cut)) == cut_digest(cut)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"weight_version": 2}, "under way at weight version 2, but the cut is of version 3"),
        ({"weight_version": 4, "summary": {}}, "finished at weight version 4, but"),
        (
            {"results": (EvaluatedPrompt(number=4),)},
            r"prompts \[4\]; they are distinct and below 4",
        ),
        ({"results": (EvaluatedPrompt(number=-1),)}, r"prompts \[-1\]"),
        ({"results": (EvaluatedPrompt(number=1),) * 2}, r"prompts \[1, 1\]"),
    ],
)
def test_a_cut_whose_evaluation_can_t_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BundleInconsistent, match=says):
        check_cut(a_cut(**wrong))
    check_cut(a_cut(weight_version=2, summary={"val/reward": 1.0}))


def test_a_held_out_prompt_says_so() -> None:
    def prompt(ordinal: int) -> Prompt:
        return Prompt(ordinal=ordinal, group_id=GroupId("any"), payload=None)

    assert [prompt(ordinal).held_out for ordinal in (-2, -1, 0, 1)] == [True, True, False, False]
