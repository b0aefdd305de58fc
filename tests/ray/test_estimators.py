from __future__ import annotations

from typing import Any

import pytest
import torch

from sc_core.errors import ConfigError, DataPlaneError
from sc_ray.estimators import GrpoAdvantages


def estimate(rewards: list[float], group_sizes: list[int], **settings: Any) -> list[float]:
    columns = {"reward": [torch.tensor([reward]) for reward in rewards]}
    found = GrpoAdvantages(**settings).estimate(columns, group_sizes)
    assert list(found) == ["advantage"]
    assert all(row.shape == (1,) and row.dtype == torch.float32 for row in found["advantage"])
    return [float(row) for row in found["advantage"]]


def test_leave_one_out_compares_with_the_others() -> None:
    assert estimate([1, 0, 1, 1], [4]) == pytest.approx([1 / 3, -1, 1 / 3, 1 / 3])


def test_mean_compares_with_all() -> None:
    assert estimate([1, 0, 1, 1], [4], baseline="mean") == pytest.approx([0.25, -0.75, 0.25, 0.25])


def test_each_group_is_compared_within_itself_in_order() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5, 0.2, 1.0, 1.0, 0.0]
    together = estimate(rewards, [2, 3, 3])
    apart = estimate(rewards[:2], [2]) + estimate(rewards[2:5], [3]) + estimate(rewards[5:], [3])
    assert together == apart
    assert together[:2] == [1.0, -1.0]


def test_normalised_by_the_sample_standard_deviation() -> None:
    found = estimate([1, 0, 1, 1], [4], baseline="mean", normalize_by_std=True)
    assert found == pytest.approx([0.5, -1.5, 0.5, 0.5])


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_have_no_advantage_at_all(baseline: str, normalize: bool) -> None:
    settings = {"baseline": baseline, "normalize_by_std": normalize}
    assert estimate([0.1] * 7, [7], **settings) == [0.0] * 7


def test_no_rows_have_no_advantages() -> None:
    assert estimate([], []) == []


def test_a_group_of_one_is_refused_at_construction_or_when_it_comes() -> None:
    with pytest.raises(
        ConfigError, match="leave_one_out needs groups of at least 2 siblings, not 1"
    ):
        GrpoAdvantages(group_size=1)
    with pytest.raises(ConfigError, match="normalize_by_std needs groups of at least 2"):
        GrpoAdvantages(baseline="mean", normalize_by_std=True, group_size=1)
    with pytest.raises(ConfigError, match="at least 2 siblings, not 1"):
        estimate([1, 0, 1], [2, 1])
    assert estimate([1], [1], baseline="mean", group_size=1) == [0.0]


def test_unknown_baselines_and_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="'median'"):
        GrpoAdvantages(baseline="median")  # type: ignore[arg-type]
    with pytest.raises(DataPlaneError, match="3 rewards for groups of 4 rows"):
        estimate([1, 0, 1], [4])


def test_it_says_what_it_reads() -> None:
    estimator = GrpoAdvantages()
    assert (estimator.select_fields, estimator.heavy) == (("reward", "masked"), False)


def with_masks(
    rewards: list[float], masked: list[int], group_sizes: list[int], **settings: Any
) -> list[float]:
    columns = {
        "reward": [torch.tensor([reward]) for reward in rewards],
        "masked": [row in masked for row in range(len(rewards))],
    }
    found = GrpoAdvantages(**settings).estimate(columns, group_sizes)["advantage"]
    assert all(row.shape == (1,) and row.dtype == torch.float32 for row in found)
    return [float(row) for row in found]


def test_masked_siblings_get_nothing_and_count_for_nothing() -> None:
    rewards = [1.0, 0.0, 9.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    found = with_masks(rewards, [2], [4, 4])
    assert found == pytest.approx([0.5, -1, 0, 0.5, 1 / 3, -1, 1 / 3, 1 / 3])
    found = with_masks(rewards, [2], [4, 4], baseline="mean")
    assert found == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3, 0.25, -0.75, 0.25, 0.25])
    for settings in ({}, {"baseline": "mean"}, {"normalize_by_std": True}):
        alone = with_masks([1.0, 0.0, 1.0], [2], [3], **settings)
        assert alone[:2] == estimate([1, 0], [2], **settings) and alone[2] == 0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("masked", [[0, 1, 2], [0, 1], [1, 2]])
def test_a_group_with_nobody_to_compare_has_no_advantage(
    masked: list[int], baseline: str, normalize: bool
) -> None:
    settings = {"baseline": baseline, "normalize_by_std": normalize, "group_size": 3}
    found = with_masks([5.0, 7.0, 9.0, 1.0, 1.0, 1.0], masked, [3, 3], **settings)
    assert found == [0.0] * 6
