from __future__ import annotations

import math

import pytest

from sc_core.filters import ZeroVarianceFilter
from sc_core.ports import GroupFilter


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
