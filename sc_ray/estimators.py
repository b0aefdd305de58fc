"""Advantages of siblings over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sc_core import (
    ConfigError,
    DataPlaneError,
    EstimatorScope,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Baseline = Literal["leave_one_out", "mean"]


class GrpoAdvantages:
    """Reward minus a baseline from the same group, as in GRPO (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2); `AdvantageEstimator` of the controller.

    With `leave_one_out` the baseline is the mean of the *other* siblings and unbiased (Kool et
    al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"); with `mean` it is the mean of
    all. `normalize_by_std` divides by the group's sample standard deviation; a group whose
    rewards are all equal gets zeros either way. Masked siblings get zeros and count for nothing,
    as does the last one that is left in a group of which the others are masked.

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
        if group_size is not None and group_size < self._smallest_group:
            raise ConfigError(self._too_small(group_size))

    def estimate(
        self, columns: Mapping[str, Sequence[Any]], group_sizes: Sequence[int]
    ) -> dict[str, list[Any]]:
        """One `advantage` of shape `[1]` per row, from one `reward` of shape `[1]` per row.

        Rows of a group are neighbours; `group_sizes` says how many each group has, in order.
        `masked`, where it is given, has one bool per row.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
            ConfigError: a group is too small for the baseline.
        """
        rows = columns["reward"]
        if sum(group_sizes) != len(rows):
            raise DataPlaneError(f"{len(rows)} rewards for groups of {sum(group_sizes)} rows")
        if not rows:
            return {"advantage": []}
        rewards = torch.cat([torch.as_tensor(row).reshape(1).double() for row in rows])
        advantages = [self._of_group(group) for group in torch.split(rewards, list(group_sizes))]
        masked = columns.get("masked", ())
        if any(masked):
            trained, first = ~torch.tensor(list(masked), dtype=torch.bool), 0
            for number, size in enumerate(group_sizes):
                group = slice(first, first + size)
                if not trained[group].all():
                    advantages[number] = self._of_some(rewards[group], trained[group])
                first += size
        return {"advantage": list(torch.cat(advantages).float().reshape(-1, 1))}

    def _of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        siblings = len(rewards)
        if siblings < self._smallest_group:
            raise ConfigError(self._too_small(siblings))
        if bool((rewards == rewards[0]).all()):
            return torch.zeros_like(rewards)  # not what rounding leaves, divided by next to nothing
        centred = rewards - rewards.mean()
        if self._baseline == "leave_one_out":
            centred = rewards - (rewards.sum() - rewards) / (siblings - 1)
        return centred / rewards.std() if self._normalize_by_std else centred

    def _of_some(self, rewards: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        advantages = torch.zeros_like(rewards)
        if int(trained.sum()) >= self._smallest_group:
            advantages[trained] = self._of_group(rewards[trained])
        return advantages

    def _too_small(self, siblings: int) -> str:
        which = self._baseline + (" with normalize_by_std" if self._normalize_by_std else "")
        return f"{which} needs groups of at least {self._smallest_group} siblings, not {siblings}"
