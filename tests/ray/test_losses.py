from __future__ import annotations

import math

import pytest
import torch

from sc_core.errors import ConfigError
from sc_ray.losses import LossConfig, LossSums, policy_gradient_loss


def loss_of(
    ratio: float, advantage: float, *, drift: float = 0.0, config: LossConfig | None = None
) -> tuple[LossSums, float]:
    """The sums of one token, and the gradient of its log-prob."""
    prev = -1.0
    logprobs = torch.tensor([[prev + math.log(ratio)]], requires_grad=True)
    sums = policy_gradient_loss(
        logprobs=logprobs,
        prev_logprobs=torch.tensor([[prev]]),
        generation_logprobs=torch.tensor([[prev - drift]]),
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 1),
        config=config or LossConfig(clip_low=0.2, clip_high=0.3, importance_cap=2.0),
    )
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return sums, float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.2, 1.0, -1.2, -1.2, 0),
        (1.5, 1.0, -1.3, 0.0, 1),  # further up than clip_high
        (0.5, 1.0, -0.5, -0.5, 0),  # up again is allowed
        (0.5, -1.0, 0.8, 0.0, 1),  # further down than clip_low
        (1.5, -1.0, 1.5, 1.5, 0),
    ],
)
def test_clipping_stops_the_gradient_on_the_far_side_alone(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    sums, found = loss_of(ratio, advantage)
    assert float(sums.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert found == pytest.approx(gradient, rel=1e-5)
    assert int(sums.clipped) == clipped
    assert float(sums.ratio) == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("drift", "weight"), [(0.0, 1.0), (0.5, math.e**0.5), (3.0, 2.0), (-1.0, math.e**-1)]
)
def test_the_importance_weight_is_truncated_above(drift: float, weight: float) -> None:
    sums, gradient = loss_of(1.0, 1.0, drift=drift)
    assert float(sums.importance) == pytest.approx(weight, rel=1e-5)
    assert gradient == pytest.approx(-weight, rel=1e-5)  # the weight itself has no gradient


def test_a_weight_beyond_any_float_is_truncated_too() -> None:
    sums, gradient = loss_of(1.0, 1.0, drift=1e4)
    assert float(sums.importance) == pytest.approx(2.0) and gradient == pytest.approx(-2.0)


def test_tokens_outside_the_mask_have_no_influence_whatever_they_hold() -> None:
    torch.manual_seed(0)
    shape = (3, 4)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]])
    advantages = torch.tensor([1.0, -2.0, 0.5])

    def run(junk: float) -> tuple[LossSums, torch.Tensor]:
        torch.manual_seed(1)
        columns = [torch.rand(shape).masked_fill(mask == 0, junk) for _ in range(3)]
        columns[0].requires_grad_()
        sums = policy_gradient_loss(
            logprobs=columns[0],
            prev_logprobs=columns[1],
            generation_logprobs=columns[2],
            advantages=advantages,
            mask=mask,
            config=LossConfig(),
        )
        sums.loss.backward()  # type: ignore[no-untyped-call]
        assert columns[0].grad is not None
        return sums, columns[0].grad

    clean, clean_gradient = run(0.0)
    assert int(clean.tokens) == 5
    for junk in (-1e9, float("nan"), float("inf")):
        sums, gradient = run(junk)
        assert all(torch.equal(a, b) for a, b in zip(sums, clean, strict=True))
        assert torch.equal(gradient, clean_gradient)


def test_sums_of_the_parts_are_the_sums_of_the_whole() -> None:
    torch.manual_seed(0)
    logprobs, prev, generation = (-torch.rand(6, 5, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(6, dtype=torch.float64)
    mask = torch.rand(6, 5) < 0.7

    def run(rows: slice) -> LossSums:
        return policy_gradient_loss(
            logprobs=logprobs[rows],
            prev_logprobs=prev[rows],
            generation_logprobs=generation[rows],
            advantages=advantages[rows],
            mask=mask[rows],
            config=LossConfig(),
        )

    whole, parts = run(slice(None)), [run(slice(0, 1)), run(slice(1, 4)), run(slice(4, 6))]
    for name, values in zip(LossSums._fields, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(values).sum(), getattr(whole, name), msg=name)


@pytest.mark.parametrize(
    "wrong", [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"importance_cap": 0.0}]
)
def test_bounds_that_leave_nothing_to_learn_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossConfig(**wrong)
