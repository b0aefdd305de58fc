from __future__ import annotations

import math
from collections import Counter

import pytest

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError
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


def test_dynamic_sampling_needs_siblings_to_compare() -> None:
    grpo = {"use_dynamic_sampling": True, "num_generations_per_prompt": 1}
    with pytest.raises(ConfigError, match="none be trained on"):
        decode({"grpo": grpo}, ControllerConfig)
