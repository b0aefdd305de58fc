from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence

import pytest

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError, TooManyFiltered
from sc_core.filters import ZeroVarianceFilter
from sc_core.ports import GroupFilter
from sc_core.testing import MemoryRun


@pytest.mark.parametrize(
    ("rewards", "tolerance", "kept"),
    [
        ([0.0, 0.0, 0.0], 0.0, False),
        ([1.0], 0.0, False),
        ([0.0, 1.0, 0.0], 0.0, True),
        ([0.1 + 0.2, 0.3], 0.0, True),
        ([0.1 + 0.2, 0.3], 1e-9, False),
        ([0.0, 0.5], 0.5, False),
        ([0.0, 0.75], 0.5, True),
        ([math.nan, math.nan], 0.0, True),
        ([1.0, math.nan], 0.0, True),
        ([math.nan, 1.0, 1.0], 0.5, True),
        ([1.0, math.nan, 1.0], 0.5, True),
        ([math.inf, math.inf], 0.0, True),
    ],
)
def test_groups_without_a_difference_are_dropped(
    rewards: list[float], tolerance: float, kept: bool
) -> None:
    stock: GroupFilter = ZeroVarianceFilter(tolerance)
    assert stock.keep(rewards) is kept


@pytest.mark.parametrize("tolerance", [-0.1, math.nan])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        ZeroVarianceFilter(tolerance)


@pytest.mark.anyio
@pytest.mark.parametrize("asked_for", [True, False])
async def test_dynamic_sampling_fills_a_step_with_groups_that_teach(asked_for: bool) -> None:
    grpo = {
        "use_dynamic_sampling": asked_for,
        "num_generations_per_prompt": 2,  # of 16 rewards: every 16th group teaches nothing
        "max_num_steps": 12,
    }
    run = MemoryRun(decode({"grpo": grpo}, ControllerConfig), range(1000))
    assert (await run.run()).step == 12
    kinds = Counter(event.event for event in run.log.events)
    assert kinds["trained"] == 12 * 8
    assert (kinds["dropped"] > 0) is asked_for
    assert audit(run.log.events).ok


class Rejects:
    """A filter that keeps every n-th group, or none."""

    def __init__(self, keeps_each: int | None = None) -> None:
        self.asked = 0
        self._keeps_each = keeps_each

    def keep(self, rewards: Sequence[float]) -> bool:
        self.asked += 1
        return self._keeps_each is not None and self.asked % self._keeps_each == 0


def bounded(at_most: int | None, granularity: str = "prompt_group") -> ControllerConfig:
    settings = {
        "grpo": {"num_generations_per_prompt": 2, "max_num_steps": 3},
        "async_rl": {"max_consecutive_filtered_groups": at_most},
        "rollout_recovery": {"default_granularity": granularity},
    }
    return decode(settings, ControllerConfig)


@pytest.mark.anyio
@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_a_filter_that_keeps_nothing_ends_the_run(
    granularity: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = MemoryRun(bounded(40, granularity), range(1000), group_filter=Rejects())
    with pytest.raises(TooManyFiltered) as caught:
        await run.run()
    told = str(caught.value)
    assert "after 40 groups" in told and "it keeps nothing" in told
    assert "async_rl.max_consecutive_filtered_groups, which is 40" in told
    assert str(pickle.loads(pickle.dumps(caught.value))) == told
    assert Counter(event.event for event in run.log.events)["dropped"] == 40
    assert audit(run.log.events).ok
    (warned,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "rejected 4 groups" in warned.getMessage()


@pytest.mark.anyio
async def test_a_commit_in_between_starts_the_count_of_filtered_groups_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = MemoryRun(bounded(40), range(1000), group_filter=Rejects(keeps_each=11))
    assert (await run.run()).step == 3
    assert Counter(event.event for event in run.log.events)["dropped"] > 2 * 40
    assert len(caplog.records) == 1  # one warning is enough


@pytest.mark.anyio
async def test_without_a_bound_a_filter_may_reject_all_prompts_and_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = MemoryRun(bounded(None), range(1500), group_filter=Rejects())
    assert (await run.run()).step == 0
    (warned,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "rejected 100 groups" in warned.getMessage()


def test_a_bound_on_filtered_groups_is_at_least_1() -> None:
    with pytest.raises(ConfigError, match="max_consecutive_filtered_groups is 0"):
        bounded(0)
    assert ControllerConfig().async_rl.max_consecutive_filtered_groups == 1000


def test_dynamic_sampling_needs_siblings_to_compare() -> None:
    grpo = {"use_dynamic_sampling": True, "num_generations_per_prompt": 1}
    with pytest.raises(ConfigError, match="none be trained on"):
        decode({"grpo": grpo}, ControllerConfig)
