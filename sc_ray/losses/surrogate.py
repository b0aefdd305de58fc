"""The part of the loss that has the advantage: what is made likelier, and how far."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sc_ray.lazy import lazy
from sc_ray.losses.config import LossConfig
from sc_ray.losses.importance import bounded_exp, sequence_sum

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class Surrogate(NamedTuple):
    """All are `[rows, tokens]`; only `loss` carries a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor  #: of current to previous probability, before any clip
    low: torch.Tensor  #: bool: clipped below
    high: torch.Tensor  #: bool: clipped above
    dual: torch.Tensor  #: bool: clipped by `ratio_clip_c`


def surrogate(
    logprobs: torch.Tensor,
    difference: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor,
    config: LossConfig,
) -> Surrogate:
    """The loss that `config` names, token by token.

    Args:
        logprobs: `[rows, tokens]`, 0 outside the mask, as `difference` and `advantages`.
        difference: logprobs - prev_logprobs.
        lengths: `[rows, 1]`, sampled tokens of each, at least 1.
    """
    if config.use_cispo:
        return cispo(logprobs, difference, advantages, config)
    if config.sequence_level_importance_ratios:
        difference = sequence_mean(difference, lengths)
    return clipped(bounded_exp(difference), advantages, config)


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> Surrogate:
    """With r the ratio and A the advantage, of each token:

        loss = -min(r A, clip(r, 1 - clip_min, 1 + clip_max) A)

    and, where A < 0 and there is a `ratio_clip_c`, at most -c A. Equation 7 of Schulman et al.
    2017 (arXiv:1707.06347); separate bounds are from DAPO (Yu et al. 2025, arXiv:2503.14476,
    section 3.1); the dual clip is equation 5 of Ye et al. 2020 (arXiv:1912.09729).
    """
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    seen, negative = ratio.detach(), advantages < 0
    dual = torch.zeros_like(negative)
    if config.ratio_clip_c is not None:
        dual = negative & (seen > config.ratio_clip_c)
        gain = torch.where(dual, config.ratio_clip_c * advantages, gain)
    return Surrogate(-gain, seen, negative & (seen < low), (advantages > 0) & (seen > high), dual)


def sequence_mean(difference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The log of GSPO's ratio, the same for every token of a sequence of n:

        log s = (1 / n) sum_t (logprobs_t - prev_logprobs_t)

    Equation 7 of Zheng et al. 2025 (arXiv:2507.18071); its objective, equation 5, is the clipped
    loss of this ratio, averaged over sequences.
    """
    return (sequence_sum(difference) / lengths).expand_as(difference)


def cispo(
    logprobs: torch.Tensor,
    difference: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
) -> Surrogate:
    """With sg() for what carries no gradient:

        loss = -sg(clip(r, 1 - clip_min, 1 + clip_max)) A logprobs

    Equations 4 and 5 of MiniMax 2025 (arXiv:2506.13585), which leave the lower bound out:
    `ratio_clip_min: 1`.
    """
    ratio = bounded_exp(difference.detach())
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    loss = -(ratio.clamp(low, high) * advantages * logprobs)
    return Surrogate(loss, ratio, ratio < low, ratio > high, torch.zeros_like(ratio > high))
