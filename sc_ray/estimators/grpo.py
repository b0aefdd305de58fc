"""Advantages of siblings over each other, by their rewards alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from sc_core import (
    Columns,
    ConfigError,
    EstimatorScope,
)
from sc_ray.estimators.rows import check_size, one_per_row, scalars, trained_rows, within_groups
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Baseline = Literal["leave_one_out", "mean"]


class GrpoAdvantages:
    """Reward minus a baseline from the same group, as in GRPO (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2).

    With `mean` the baseline is the mean of all siblings, and with `normalize_by_std` the rest is
    divided by their sample standard deviation, which is the paper's:

        A_i = (r_i - mean(r)) / std(r)

    With `leave_one_out` the baseline is the mean of the *other* siblings and unbiased (Kool et
    al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"). A group whose rewards are all
    equal gets zeros either way. Masked siblings get zeros and count for nothing, as does the last
    one that is left in a group of which the others are masked.

    Raises:
        ConfigError: a group of `group_size` has nobody to compare with.
    """

    select_fields: tuple[str, ...] = ("reward", "masked")
    scope: EstimatorScope = "group"
    heavy: bool = False

    def __init__(
        self,
        *,
        baseline: Baseline = "leave_one_out",
        normalize_by_std: bool = False,
        group_size: int | None = None,
    ) -> None:
        if baseline not in ("leave_one_out", "mean"):
            raise ConfigError(f"baseline {baseline!r} is not one of leave_one_out, mean")
        self._baseline = baseline
        self._normalize_by_std = normalize_by_std
        self._smallest_group = 2 if baseline == "leave_one_out" or normalize_by_std else 1
        self._check(group_size)

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """One `advantage` of shape `[1]` per row, from one `reward` of shape `[1]` per row.

        Rows of a group are neighbours; `group_sizes` says how many each group has, in order.
        `masked`, where it is given, has one bool per row.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
            ConfigError: a group is too small for the baseline.
        """
        rewards = scalars(columns, "reward", group_sizes)
        return one_per_row(self.compare(rewards, trained_rows(columns, len(rewards)), group_sizes))

    def compare(
        self, rewards: torch.Tensor, trained: torch.Tensor, group_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Float64 `[rows]`, from rewards `[rows]` and which of them count."""
        for size in group_sizes:
            self._check(size)
        return within_groups(
            rewards,
            trained,
            group_sizes,
            lambda group, kept: self._of_group(rewards[group][kept]),
            smallest=self._smallest_group,
        )

    def _of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        if bool((rewards == rewards[0]).all()):
            return torch.zeros_like(rewards)  # not what rounding leaves, divided by next to nothing
        centred = rewards - rewards.mean()
        if self._baseline == "leave_one_out":
            centred = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
        return centred / rewards.std() if self._normalize_by_std else centred

    def _check(self, siblings: int | None) -> None:
        which = self._baseline + (" with normalize_by_std" if self._normalize_by_std else "")
        check_size(siblings, self._smallest_group, which)


class DrGrpoAdvantages(GrpoAdvantages):
    """Reward minus the group's mean, not divided by anything (Liu et al. 2025, arXiv:2503.20783,
    section 3.2):

        A_i = r_i - mean(r)

    The paper's loss also divides by a constant instead of each answer's length:
    `policy.loss.loss_scale_factor`.
    """

    def __init__(self, *, group_size: int | None = None) -> None:
        check_size(group_size, 2, "dr_grpo")
        super().__init__(baseline="mean", group_size=group_size)


class RlooAdvantages(GrpoAdvantages):
    """Reward minus the mean of the other k - 1 siblings (Ahmadian et al. 2024, arXiv:2402.14740,
    on RLOO; Kool et al. 2019):

        A_i = r_i - (1 / (k - 1)) sum_{j != i} r_j
    """

    def __init__(self, *, group_size: int | None = None) -> None:
        super().__init__(baseline="leave_one_out", group_size=group_size)
