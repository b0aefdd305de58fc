"""The loss of a policy, put together and summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sc_ray.lazy import lazy
from sc_ray.losses.config import LossConfig
from sc_ray.losses.importance import bounded_exp, importance_weights
from sc_ray.losses.kl import kl_estimate, kl_penalty
from sc_ray.losses.sums import LossSums
from sc_ray.losses.surrogate import surrogate

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def policy_gradient_loss(
    *,
    logprobs: torch.Tensor,
    prev_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    reference_logprobs: torch.Tensor | None = None,
) -> LossSums:
    """Policy gradient of these rows, *summed*; `denominator` is what it is divided by in the end.

    Per token, with its importance weight w (`importance.py`), the loss s of ratio and advantage
    (`surrogate.py`), and the cost b of the divergence k from a reference (`kl.py`):

        loss = w s + b k

    These are summed over tokens, each times 1; or, in a sequence of n, 1 / n or
    1 / loss_scale_factor, where the loss is a mean over sequences. The mean over all tokens of a
    step is DAPO's (Yu et al. 2025, arXiv:2503.14476, section 3.3), the mean over sequences of
    their means GRPO's (Shao et al. 2024, arXiv:2402.03300, equation 3), the constant Dr. GRPO's
    (Liu et al. 2025, arXiv:2503.20783, section 3.2).

    Args:
        logprobs: `[rows, tokens]` under the weights being trained; alone carries a gradient.
        prev_logprobs: `[rows, tokens]` under the weights the step starts from.
        generation_logprobs: `[rows, tokens]` under the distribution they were sampled from.
        advantages: `[rows]`, or `[rows, tokens]` where each token has its own.
        mask: `[rows, tokens]`, true where a token was sampled. What the other tensors hold
            elsewhere has no influence.
        reference_logprobs: `[rows, tokens]`; needed if `config.kl_in_loss` is above 0.
    """
    mask = mask.bool()

    def sampled(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(~mask, 0.0)

    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    advantages = sampled(advantages.expand_as(logprobs))
    current, prev = sampled(logprobs), sampled(prev_logprobs.detach())
    generation = sampled(generation_logprobs.detach())
    counts = mask.sum(-1, keepdim=True)
    lengths = counts.clamp(min=1)
    made = surrogate(current, current - prev, advantages, lengths, config)
    drift = prev - generation
    weights = importance_weights(drift, config)
    loss = weights.used * made.loss
    penalty = torch.zeros_like(loss)
    if config.kl_in_loss:
        assert reference_logprobs is not None, "the loss has a penalty and no reference"
        reference = sampled(reference_logprobs)
        penalty = kl_penalty(current, reference, config.reference_policy_kl_type)
        loss = loss + config.kl_in_loss * penalty
    denominator = mask.sum() if config.token_level_loss else (counts > 0).sum()
    if not config.token_level_loss:
        loss = loss / (config.loss_scale_factor or lengths)
    total = loss.sum()  # all is 0 outside the mask
    with torch.no_grad():
        probs_ratio, importance = sampled(made.ratio), sampled(bounded_exp(drift))
        drawn = bounded_exp(current - generation)

        def summed(values: torch.Tensor) -> torch.Tensor:
            return sampled(values.double()).sum()

        return LossSums(
            loss=total,
            denominator=denominator,
            tokens=mask.sum(),
            probs_ratio=summed(probs_ratio),
            clipped_low=summed(made.low),
            clipped_high=summed(made.high),
            clipped_dual=summed(made.dual),
            sampling_importance_ratio=summed(importance),
            importance_weight=summed(weights.used),
            truncated=summed(weights.truncated),
            gen_kl_k1=summed(-drift),
            gen_kl_k3=summed(kl_estimate(-drift.double(), "k3")),
            entropy=summed(-drawn * current),
            kl_penalty=summed(penalty),
            max_probs_ratio=largest(probs_ratio),
            max_sampling_importance_ratio=largest(importance),
        )


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest of some that are not below 0; 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())
