"""Advantages of single tokens, by a critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sc_core import (
    Columns,
    ConfigError,
    EstimatorScope,
)
from sc_ray.estimators.rows import normalised, scalars, trained_rows
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class GaeAdvantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    Over the n sampled tokens of a row, with the critic's value V_t of the state before token t,
    and the reward r, which comes with the last one:

        d_t = r_t + gamma V_{t+1} - V_t         r_t = r for t = n, else 0
        A_t = d_t + gamma lambda A_{t+1}        A_{n+1} = 0
        returns_t = A_t + V_t

    V_{n+1} is 0: the text has ended. With `bootstrap` it is the column `next_value` `[1]`, which
    holds the value of the state that a completion was cut off in, and 0 where it ended by itself.
    Tokens that were not sampled, such as an environment's, are no steps of this: the state after
    one sampled token is the one before the next.

    For trainers with a critic: their `prepare` writes the column `values` `[T]`. It writes
    `advantage` and `returns`, both `[T]`, and 0 where nothing was sampled. Masked siblings get
    zeros.

    Args:
        normalize_advantages: over all sampled tokens of the batch, to mean 0 and deviation 1;
            `returns` stay as they are.

    Raises:
        ConfigError: gamma or lambda is not in [0, 1].
    """

    heavy: bool = True  # it goes from token to token

    def __init__(
        self,
        *,
        gae_gamma: float = 1.0,
        gae_lambda: float = 0.95,
        bootstrap: bool = False,
        normalize_advantages: bool = False,
    ) -> None:
        for name, value in (("gae_gamma", gae_gamma), ("gae_lambda", gae_lambda)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; it must be between 0 and 1")
        self._gamma, self._lambda = gae_gamma, gae_lambda
        self._bootstrap, self._normalize = bootstrap, normalize_advantages
        self.scope: EstimatorScope = "chunk" if normalize_advantages else "group"
        fields = ("reward", "masked", "completion_mask", "values")
        self.select_fields: tuple[str, ...] = (*fields, "next_value") if bootstrap else fields

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """`advantage` and `returns`, float32 `[T]` per row.

        Raises:
            DataPlaneError: the sizes do not add up to the rows.
        """
        rewards = scalars(columns, "reward", group_sizes)
        after = torch.zeros_like(rewards)
        if self._bootstrap:
            after = scalars(columns, "next_value", group_sizes)
        masks = [torch.as_tensor(row).bool() for row in columns["completion_mask"]]
        trained = trained_rows(columns, len(rewards))
        masks = [mask & keep for mask, keep in zip(masks, trained, strict=True)]
        advantages: list[torch.Tensor] = []
        returns: list[torch.Tensor] = []
        for reward, end, mask, row in zip(
            rewards.tolist(), after.tolist(), masks, columns["values"], strict=True
        ):
            values = torch.as_tensor(row).double()[mask]
            made = self._of_row(reward, end, values.tolist())
            for each, sampled in ((advantages, made), (returns, made + values)):
                each.append(
                    torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, sampled)
                )
        if self._normalize and advantages:
            together = normalised(torch.cat(advantages), torch.cat(masks).double())
            advantages = list(torch.split(together, [len(mask) for mask in masks]))
        return {
            "advantage": [row.float() for row in advantages],
            "returns": [row.float() for row in returns],
        }

    def _of_row(self, reward: float, end: float, values: Sequence[float]) -> torch.Tensor:
        found, following, advantage = [], end, 0.0
        for value in reversed(values):
            delta = reward + self._gamma * following - value
            advantage = delta + self._gamma * self._lambda * advantage
            found.append(advantage)
            reward, following = 0.0, value
        return torch.tensor(found[::-1], dtype=torch.float64)
