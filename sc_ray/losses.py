"""The loss of a policy on tokens that a slightly different policy generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sc_core import (
    ConfigError,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one step may move the policy, and how much an off-policy token may count.

    Raises:
        ConfigError: a bound that would leave nothing to learn from.
    """

    clip_low: float = 0.2  #: the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.2  #: and above at 1 + clip_high
    importance_cap: float = 2.0
    """Upper bound of the weight a token gets for being likelier now than when it was generated."""

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise ConfigError(
                f"loss.clip_low = {self.clip_low:g} must be between 0 and 1, and"
                f" loss.clip_high = {self.clip_high:g} above 0"
            )
        if self.importance_cap <= 0:
            raise ConfigError(f"loss.importance_cap = {self.importance_cap:g} must be above 0")


class LossSums(NamedTuple):
    """Sums over tokens, so that the parts of a step can be added; all are scalars.

    Only `loss` carries a gradient.
    """

    loss: torch.Tensor
    tokens: torch.Tensor  #: how many were summed
    ratio: torch.Tensor  #: of current to previous probability
    clipped: torch.Tensor  #: tokens whose gradient the clip removed
    importance: torch.Tensor  #: the truncated weights


def policy_gradient_loss(
    *,
    logprobs: torch.Tensor,
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
) -> LossSums:
    """Clipped policy gradient with a truncated importance weight, *summed* over masked tokens.

    Per token, with r = exp(logprobs - prev_logprobs) and A its row's advantage:

        loss = -min(exp(prev_logprobs - generation_logprobs), cap) * min(r A, clip(r) A)

    The clipped surrogate is equation 7 of Schulman et al. 2017 (arXiv:1707.06347); separate
    bounds are from DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1). The weight corrects for
    weights that generated the tokens and are not those the step starts from: a decoupled
    objective as in Hilton et al. 2022 (arXiv:2110.00641), truncated as in V-trace (Espeholt et
    al. 2018, arXiv:1802.01561, section 4.1). Summing, and dividing by the tokens of the whole
    step at its end, makes the gradient independent of how a step is split (DAPO, section 3.3).

    Args:
        logprobs: `[rows, tokens]` under the weights being trained; carries the gradient.
        prev_logprobs: `[rows, tokens]` under the weights the step starts from.
        generation_logprobs: `[rows, tokens]` under the distribution they were sampled from.
        advantages: `[rows]`.
        mask: `[rows, tokens]`, true where a token was sampled. What the other tensors hold
            elsewhere has no influence.
    """
    mask = mask.bool()
    difference = (logprobs - prev_logprobs).masked_fill(~mask, 0.0)
    drift = (prev_logprobs - generation_logprobs).masked_fill(~mask, 0.0)
    ratio = difference.exp()
    importance = drift.exp().clamp(max=config.importance_cap)
    advantage = advantages[:, None]
    free = ratio * advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    loss = -(importance * torch.minimum(free, clipped))
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    return LossSums(
        loss=torch.where(mask, loss, zero).sum(),
        tokens=mask.sum(),
        ratio=torch.where(mask, ratio.detach(), zero).sum(),
        clipped=(mask & (clipped < free)).sum(),
        importance=torch.where(mask, importance, zero).sum(),
    )
