"""Estimates of the KL divergence from a reference, by the tokens that were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sc_ray.lazy import lazy
from sc_ray.losses.config import KlType
from sc_ray.losses.importance import MOST

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def kl_estimate(log_ratio: torch.Tensor, kind: KlType) -> torch.Tensor:
    """KL(p || q) from tokens sampled from p, with d = log p - log q of each:

        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    Schulman 2020, "Approximating KL Divergence". k1 and k3 have the divergence as their mean; k3,
    which GRPO uses (Shao et al. 2024, arXiv:2402.03300, equation 4), is never negative.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1((-log_ratio).clamp(max=MOST)) + log_ratio  # exp(x) - 1 rounds small x away


def kl_penalty(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: KlType
) -> torch.Tensor:
    """The estimate, with a gradient whose mean is that of the divergence itself.

    The derivative of k1 alone has mean zero, and that of k3 another than the divergence's: the
    tokens are drawn from the policy that moves. So the score-function term, the estimate times g,
    belongs to both (Tang and Munos 2025, arXiv:2506.09477). k2's derivative is right as it is (Hu
    et al. 2025, arXiv:2501.03262v9, section 3.2). With g the gradient of log p, this makes

        k1: (d + 1) g        k2: d g        k3: (1 - exp(-d)) g + (exp(-d) - 1 + d) g = d g

    written as such: for a token far below the reference, the two terms of k3 have no digit left of
    their difference.

    All `[rows, tokens]`, and 0 outside the mask.
    """
    difference = (logprobs - reference_logprobs).detach()
    slope = difference + 1 if kind == "k1" else difference
    return kl_estimate(difference, kind) + slope * (logprobs - logprobs.detach())
