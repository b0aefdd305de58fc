"""Sums over the tokens of a step, whose parts can be put together whatever the parts are.

The loss of a step is a sum divided by a count: of its tokens or of its sequences. Neither is
known before the last chunk came and the other workers have told theirs. So gradients are those
of plain sums, and `finish_step` divides by the step's `denominator` at the end. A mean over
sequences works as one over tokens does, because a sequence is never split: its own mean is whole
in the sum, and it counts as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class LossSums(NamedTuple):
    """What one microbatch adds to a step; scalars, of which only `loss` carries a gradient.

    Of parts that belong together, fields named `max_…` give their maximum, all others their sum.
    None of the maxima is below 0.
    """

    loss: torch.Tensor  #: not divided yet
    denominator: torch.Tensor  #: what it is divided by: tokens or sequences
    tokens: torch.Tensor  #: how many were sampled; what follows is summed over these
    probs_ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor
    sampling_importance_ratio: torch.Tensor
    importance_weight: torch.Tensor
    truncated: torch.Tensor
    gen_kl_k1: torch.Tensor
    gen_kl_k3: torch.Tensor
    entropy: torch.Tensor
    kl_penalty: torch.Tensor
    max_probs_ratio: torch.Tensor
    max_sampling_importance_ratio: torch.Tensor


def step_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, from what the fields of its `LossSums` amount to.

    NeMo RL's names, where it has one. `loss`; `tokens`, how many were sampled; and over these:

    - `probs_ratio`, `probs_ratio_max`: current to previous probability, mean and largest
    - `clip_fraction`, and its parts `clip_fraction_low`, `_high` and `_dual`
    - `sampling_importance_ratio`, `_max`: previous to generation probability, not truncated
    - `importance_weight`: the mean of what was used; `is_oob_ratio`: the share truncated
    - `gen_kl_error`, `gen_kl_error_k1`: KL divergence of the policy that generated from the one
      that the step starts from, by k3 and by k1
    - `approx_entropy`: of the current policy, by these tokens
    - `kl_penalty`: KL divergence from the reference, not times its cost

    All are 0 if there was no sampled token.
    """
    tokens = max(totals["tokens"], 1.0)

    def mean(name: str) -> float:
        return totals[name] / tokens

    low, high, dual = (mean(f"clipped_{which}") for which in ("low", "high", "dual"))
    return {
        "loss": totals["loss"] / max(totals["denominator"], 1.0),
        "tokens": totals["tokens"],
        "probs_ratio": mean("probs_ratio"),
        "probs_ratio_max": totals["max_probs_ratio"],
        "clip_fraction": low + high + dual,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "clip_fraction_dual": dual,
        "sampling_importance_ratio": mean("sampling_importance_ratio"),
        "sampling_importance_ratio_max": totals["max_sampling_importance_ratio"],
        "importance_weight": mean("importance_weight"),
        "is_oob_ratio": mean("truncated"),
        "gen_kl_error": mean("gen_kl_k3"),
        "gen_kl_error_k1": mean("gen_kl_k1"),
        "approx_entropy": mean("entropy"),
        "kl_penalty": mean("kl_penalty"),
    }
