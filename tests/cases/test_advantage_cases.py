"""Failures of generation must not come to look like answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from lives import effective, of_kind, settings

from sc_core.errors import DataFailure, PromptDropped
from sc_core.records import Batch, Prompt, Sample
from sc_core.testing import LeaveOneOut, MemoryRun

pytestmark = pytest.mark.anyio
REWARDS = (1.0, 0.0, 1.0, 1.0)  #: of each prompt's siblings
TROUBLED = 2  #: the ordinal whose last sibling raises


class H09(MemoryRun):
    """P = 2, G = 4, and prompt `TROUBLED` whose sibling 3 raises in its first `failures` calls."""

    def __init__(self, granularity: str, failures: int, error: Exception, **failure: Any) -> None:
        config = settings(
            p=2,
            k=0,
            g=4,
            steps=4,
            async_rl={"rollout_failure": failure},
            rollout_recovery={"default_granularity": granularity},
        )
        super().__init__(config, range(100))
        self.estimator = LeaveOneOut()
        self.failures = failures
        self.advantages: dict[str, list[float]] = {}  #: of what was trained on, by group
        rollout, train = self.engines.rollout, self.trainer.train_microbatches
        self.calls = 0  #: to the sibling that raises

        async def with_given_rewards(prompt: Prompt, sibling: int, version: int) -> Sample:
            made = await rollout(prompt, sibling, version)
            if (prompt.ordinal, sibling) == (TROUBLED, 3):
                self.calls += 1
                if self.calls <= self.failures:
                    raise error
            reward = REWARDS[sibling]
            fields = {**made.fields, "reward": reward}
            return msgspec.structs.replace(made, fields=fields, reward=reward)

        async def look(batch: Batch) -> None:
            for group in batch.groups:
                self.advantages[group.group_id] = self.column(group.sample_ids, "advantage")
                assert self.column(group.sample_ids, "reward") == [1, 0, 1, 1]
                assert group.reward == 0.75
            await train(batch)

        self.engines.rollout = with_given_rewards  # type: ignore[method-assign]
        self.trainer.train_microbatches = look  # type: ignore[method-assign]

    def column(self, rows: Sequence[str], name: str) -> list[Any]:
        raw = [self.store.rows[row].columns[name] for row in rows]
        return [msgspec.msgpack.decode(value) for value in raw]


EXPECTED = pytest.approx([1 / 3, -1.0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
@pytest.mark.parametrize("cause", ["infra", "data"])
async def test_h09_a_failed_sibling_is_made_again_not_replaced_by_a_zero(
    granularity: str, cause: str
) -> None:
    error = DataFailure("no answer") if cause == "data" else ConnectionError("engine went away")
    run = H09(
        granularity, 1, error, max_infra_attempts_per_prompt=2, max_data_attempts_per_prompt=2
    )
    result = await run.run()
    assert result is not None and result.step == 4
    assert run.calls == 2
    committed = {event.group_id for event in of_kind(effective(run), "committed")}
    assert f"{TROUBLED}.0" not in committed and f"{TROUBLED}.1" in committed
    assert run.advantages.keys() == {
        "0.0",
        "1.0",
        f"{TROUBLED}.1",
        *(f"{n}.0" for n in range(3, 8)),
    }
    assert all(found == EXPECTED for found in run.advantages.values())
    assert not any(
        value == pytest.approx(2 / 3) for found in run.advantages.values() for value in found
    )
    assert result.counters[f"{cause}_failures"] == 1
    assert result.counters["infra_failures"] + result.counters["data_failures"] == 1
    assert [step["train/reward"] for step in run.metrics.steps] == [0.75] * 4


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_h09_with_no_retry_left_the_group_is_dropped_whole(granularity: str) -> None:
    run = H09(granularity, 9, DataFailure("no answer"), max_infra_attempts_per_prompt=5)
    result = await run.run()
    assert result is not None and result.step == 4
    assert run.calls == 1  # the budget of infrastructure failures is another
    (dropped,) = of_kind(effective(run), "dropped")
    assert dropped.ordinal == TROUBLED and dropped.reason is not None
    assert dropped.reason.startswith("data failure: ")
    assert run.advantages.keys() == {f"{n}.0" for n in (0, 1, 3, 4, 5, 6, 7, 8)}
    assert all(found == EXPECTED for found in run.advantages.values())
    assert not [row for row in run.store.rows if row.startswith(f"{TROUBLED}.")]


@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_h09_or_the_run_fails(granularity: str) -> None:
    run = H09(
        granularity,
        9,
        ConnectionError("engine went away"),
        max_infra_attempts_per_prompt=2,
        on_dropped_prompt="fail",
    )
    with pytest.raises(PromptDropped, match=rf"group {TROUBLED}\.1 used up its attempts"):
        await run.run()
    assert run.calls == 2
    assert not [name for name in run.advantages if name.startswith(f"{TROUBLED}.")]
