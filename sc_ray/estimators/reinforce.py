"""REINFORCE with advantages normalised over the whole batch, or with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sc_core import (
    Columns,
    EstimatorScope,
)
from sc_ray.estimators.grpo import GrpoAdvantages
from sc_ray.estimators.rows import (
    check_size,
    normalised,
    one_per_row,
    sampled_tokens,
    scalars,
    trained_rows,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class ReinforcePlusPlusAdvantages:
    """The reward, normalised over all sampled tokens of the batch: REINFORCE++ (Hu et al. 2025,
    arXiv:2501.03262v9, section 3.1, equations 4 and 5).

        A_t = r - kl_penalty * sum_{s >= t} (prev_logprobs_s - reference_logprobs_s)
        advantage_t = (A_t - mean(A)) / (std(A) + 1e-8)

    Both sums and statistics are over sampled tokens, so a longer answer counts for more. Masked
    siblings get zeros and are not counted. Without a penalty, all tokens of a row have the same
    advantage, and it is written as one.
    """

    scope: EstimatorScope = "chunk"
    heavy: bool = False

    def __init__(self, *, kl_penalty: float = 0.0) -> None:
        self._kl_penalty = kl_penalty
        fields = ("reward", "masked", "completion_mask")
        divergence = ("prev_logprobs", "reference_logprobs") if kl_penalty else ()
        self.select_fields: tuple[str, ...] = fields + divergence

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` per row: `[1]`, or with a penalty `[T]`, 0 where nothing was sampled.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
        """
        rewards = scalars(columns, "reward", group_sizes)
        trained = trained_rows(columns, len(rewards))
        if not self._kl_penalty:
            return one_per_row(normalised(rewards, sampled_tokens(columns) * trained))
        masks = [torch.as_tensor(row).bool() for row in columns["completion_mask"]]
        each = [
            torch.where(mask, reward - self._kl_penalty * _to_go(prev, reference, mask), 0.0)
            for reward, prev, reference, mask in zip(
                rewards,
                columns["prev_logprobs"],
                columns["reference_logprobs"],
                masks,
                strict=True,
            )
        ]
        if not each:
            return {"advantage": []}
        counted = [mask & keep for mask, keep in zip(masks, trained, strict=True)]
        tokens = normalised(torch.cat(each), torch.cat(counted).double())
        return {"advantage": list(torch.split(tokens.float(), [len(mask) for mask in masks]))}


def _to_go(prev: Any, reference: Any, mask: torch.Tensor) -> torch.Tensor:
    """What the divergence amounts to from each token to the last: float64 `[T]`."""
    divergence = torch.as_tensor(prev).double() - torch.as_tensor(reference).double()
    return torch.where(mask, divergence, 0.0).flip(0).cumsum(0).flip(0)


class ReinforcePlusPlusBaselineAdvantages:
    """Reward minus the mean of its group, normalised over all sampled tokens of the batch:
    REINFORCE++ with a baseline (Hu et al. 2025, arXiv:2501.03262v9, section 3.2, equations 6, 7).

        A_i = r_i - mean_group(r)
        advantage_i = (A_i - mean(A)) / (std(A) + 1e-8)

    Masked siblings get zeros, move no baseline and are not counted.

    Raises:
        ConfigError: a group of `group_size` has nobody to compare with.
    """

    select_fields: tuple[str, ...] = ("reward", "masked", "completion_mask")
    scope: EstimatorScope = "chunk"
    heavy: bool = False

    def __init__(self, *, group_size: int | None = None) -> None:
        check_size(group_size, 2, "reinforce_plus_plus_baseline")
        self._baseline = GrpoAdvantages(baseline="mean")

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` `[1]` per row, from `reward` `[1]` and `completion_mask` `[T]`.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
        """
        rewards = scalars(columns, "reward", group_sizes)
        trained = trained_rows(columns, len(rewards))
        over_group = self._baseline.compare(rewards, trained, group_sizes)
        return one_per_row(normalised(over_group, sampled_tokens(columns) * trained))


class RawRewards:
    """The reward itself: A_i = r_i, as in REINFORCE (Williams 1992, section 4, with b = 0)."""

    select_fields: tuple[str, ...] = ("reward", "masked")
    scope: EstimatorScope = "group"
    heavy: bool = False

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` `[1]` per row; masked siblings get zeros.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
        """
        rewards = scalars(columns, "reward", group_sizes)
        return one_per_row(rewards * trained_rows(columns, len(rewards)))
