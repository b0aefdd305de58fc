"""Ratios of probabilities, of tokens and of whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sc_ray.lazy import lazy
from sc_ray.losses.config import LossConfig

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

MOST = 20.0
"""No log-ratio counts as more, either way: its exponential, 5e8, still squares and sums in
float32. There it has no gradient."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp` of a log-ratio of probabilities, without overflow."""
    return log_ratio.clamp(-MOST, MOST).exp()


def sequence_sum(values: torch.Tensor) -> torch.Tensor:
    """`[rows, 1]` from `[rows, tokens]` that are 0 outside the mask."""
    return values.sum(-1, keepdim=True)


class Weights(NamedTuple):
    used: torch.Tensor  #: `[rows, tokens]`, after truncation
    truncated: torch.Tensor  #: `[rows, tokens]`, bool: those that were more


def importance_weights(drift: torch.Tensor, config: LossConfig) -> Weights:
    """What tokens count for that other weights generated than those the step starts from.

    With d = prev_logprobs - generation_logprobs of a token, and C the bound:

        min(exp(d_t), C)          by token
        min(exp(sum_t d_t), C)    by sequence, for all of its tokens

    The first is the truncated weight of V-trace (Espeholt et al. 2018, arXiv:1802.01561, section
    4.1), between engine and trainer as in Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"; the second is that of the whole sequence, unbiased but for
    the truncation. A loss with both a ratio to the step's start and such a weight is the decoupled
    objective of Hilton et al. 2022 (arXiv:2110.00641, section 2).

    Args:
        drift: `[rows, tokens]`, 0 outside the mask. Carries no gradient.
    """
    if not config.use_importance_sampling_correction:
        return Weights(torch.ones_like(drift), torch.zeros_like(drift, dtype=torch.bool))
    if config.rollout_is == "sequence":
        drift = sequence_sum(drift).expand_as(drift)
    weights = bounded_exp(drift)
    bound = config.truncated_importance_sampling_ratio
    if bound is None:
        return Weights(weights, torch.zeros_like(drift, dtype=torch.bool))
    return Weights(weights.clamp(max=bound), weights > bound)
