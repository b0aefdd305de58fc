"""A baseline that longer answers have more say in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sc_core import (
    Columns,
    EstimatorScope,
)
from sc_ray.estimators.rows import (
    check_size,
    one_per_row,
    sampled_tokens,
    scalars,
    trained_rows,
    within_groups,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class OpoAdvantages:
    """Reward minus the baseline of least variance, if a token's gradient is as long as any other's
    and they are orthogonal: the group's mean reward, weighted by sampled tokens n (Hao et al.
    2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585).

        A_i = r_i - sum_j n_j r_j / sum_j n_j

    Masked siblings get zeros and count for nothing.

    Raises:
        ConfigError: a group of `group_size` has nobody to compare with.
    """

    select_fields: tuple[str, ...] = ("reward", "masked", "completion_mask")
    scope: EstimatorScope = "group"
    heavy: bool = False

    def __init__(self, *, group_size: int | None = None) -> None:
        check_size(group_size, 2, "opo")

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` `[1]` per row, from `reward` `[1]` and `completion_mask` `[T]`.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
        """
        rewards, tokens = scalars(columns, "reward", group_sizes), sampled_tokens(columns)

        def compare(group: slice, kept: torch.Tensor) -> torch.Tensor:
            mine, weights = rewards[group][kept], tokens[group][kept]
            if not weights.any():
                return torch.zeros_like(mine)  # there is no token to learn from
            return mine - (weights * mine).sum() / weights.sum()

        trained = trained_rows(columns, len(rewards))
        return one_per_row(within_groups(rewards, trained, group_sizes, compare))
