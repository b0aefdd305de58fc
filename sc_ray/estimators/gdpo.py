"""Several rewards, each normalised by itself before they are added up."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sc_core import (
    Columns,
    ConfigError,
    DataPlaneError,
    EstimatorScope,
)
from sc_ray.estimators.grpo import GrpoAdvantages
from sc_ray.estimators.rows import check_size, normalised, one_per_row, scalars, trained_rows
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

logger = logging.getLogger(__name__)


class GdpoAdvantages:
    """GDPO: group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242, section 3.1;
    weights, section 3.2).

    With the components r_k of a reward, k = 1 … K, and their weights w_k:

        A_k = (r_k - mean_group(r_k)) / std_group(r_k)
        A = sum_k w_k A_k
        advantage = (A - mean(A)) / (std(A) + 1e-8)

    The last two are over all siblings of the batch, each counted once. So a reward that hardly
    varies, or varies on another scale, is not drowned in the sum of all. A component that is the
    same for all of a group says nothing about it. Masked siblings get zeros and count for nothing.

    Args:
        reward_weights: one per component; rows then have a column `rewards` `[K]`. None: there is
            the column `reward` alone, as one component, which is logged.

    Raises:
        ConfigError: a group of `group_size` has nobody to compare with, or there is no weight, or
            one that is not finite.
    """

    scope: EstimatorScope = "chunk"
    heavy: bool = False

    def __init__(
        self, *, reward_weights: Sequence[float] | None = None, group_size: int | None = None
    ) -> None:
        check_size(group_size, 2, "gdpo")
        if reward_weights is not None and not any(reward_weights):
            raise ConfigError(f"reward_weights is {list(reward_weights)}; one must not be 0")
        if not all(map(math.isfinite, reward_weights or ())):
            raise ConfigError(f"reward_weights is {list(reward_weights or ())}; all must be finite")
        if reward_weights is None:
            logger.warning("gdpo has no reward_weights: it takes the reward as its one component")
        self._weights = reward_weights
        self._component = GrpoAdvantages(baseline="mean", normalize_by_std=True)
        self._column = "reward" if reward_weights is None else "rewards"
        self.select_fields: tuple[str, ...] = (self._column, "masked")

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` `[1]` per row.

        Raises:
            DataPlaneError: the sizes do not add up to the rows, or a row has more or fewer rewards
                than there are weights.
        """
        weights, rows = self._weights or (1.0,), columns[self._column]
        for row in rows:
            if torch.as_tensor(row).numel() != len(weights):
                raise DataPlaneError(
                    f"a row has {torch.as_tensor(row).numel()} {self._column} for the"
                    f" {len(weights)} of reward_weights"
                )
        trained = trained_rows(columns, len(rows))
        together = torch.zeros(len(rows), dtype=torch.float64)
        for number, weight in enumerate(weights):
            one = {"reward": [torch.as_tensor(row).reshape(-1)[number] for row in rows]}
            rewards = scalars(one, "reward", group_sizes)
            together += weight * self._component.compare(rewards, trained, group_sizes)
        return one_per_row(normalised(together, trained.double()))
