"""Losses against hand-computed values, and against the formulas written out token by token."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from sc_core.errors import ConfigError
from sc_ray.losses import LossConfig, LossSums, policy_gradient_loss, step_metrics
from sc_ray.losses.kl import kl_estimate, kl_penalty

LOGPROBS = ("logprobs", "prev_logprobs", "generation_logprobs", "reference_logprobs")
E = math.e

GSPO = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.15,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "asymmetric clip": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "dual clip": {"ratio_clip_c": 1.5},
    "cispo": {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.3},
    "cispo with both bounds": {"use_cispo": True, "ratio_clip_min": 0.2},
    "gspo": GSPO,
    "gspo, truncated by token": {**GSPO, "truncated_importance_sampling_ratio": 1.1},
    "gspo, truncated by sequence": {**GSPO, "rollout_is": "sequence"},
    "by sequence": {"rollout_is": "sequence", "truncated_importance_sampling_ratio": 1.2},
    "not truncated": {"truncated_importance_sampling_ratio": None},
    "not corrected": {"use_importance_sampling_correction": False},
    "mean over sequences": {"token_level_loss": False},
    "dr. grpo": {"token_level_loss": False, "loss_scale_factor": 7.0},
    "k1": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.3, "token_level_loss": False},
    "in the reward": {"reference_policy_kl_penalty": 0.3, "use_kl_in_reward": True},
}


def numbers(sums: LossSums) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in sums._asdict().items()}


class Case(NamedTuple):
    """Rows in float64; what they hold outside the mask is `junk`."""

    columns: dict[str, torch.Tensor]
    mask: torch.Tensor
    advantages: torch.Tensor

    def part(self, rows: slice) -> Case:
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Case(columns, self.mask[rows], self.advantages[rows])

    def sums(self, config: LossConfig, logprobs: torch.Tensor | None = None) -> LossSums:
        columns = self.columns if logprobs is None else {**self.columns, "logprobs": logprobs}
        return policy_gradient_loss(
            **columns,  # type: ignore[arg-type]
            advantages=self.advantages,
            mask=self.mask,
            config=config,
        )

    def gradient(self, config: LossConfig) -> tuple[LossSums, torch.Tensor]:
        logprobs = self.columns["logprobs"].clone().requires_grad_()
        sums = self.sums(config, logprobs)
        (gradient,) = torch.autograd.grad(sums.loss, logprobs)
        return sums, gradient


def case(*, per_token: bool = False, junk: float = 0.0, rows: int = 6, seed: int = 0) -> Case:
    """Some ratios are beyond every bound, one row has no token at all."""
    own = torch.Generator().manual_seed(seed)
    shape = (rows, 5)

    def random() -> torch.Tensor:
        return torch.rand(shape, generator=own, dtype=torch.float64)

    mask = random() < 0.7
    mask[1], mask[2, 1:3] = False, True
    generation = -3 * random()
    prev = generation + (random() - 0.4)
    columns = {
        "logprobs": prev + 1.2 * (random() - 0.5),
        "prev_logprobs": prev,
        "generation_logprobs": generation,
        "reference_logprobs": prev + (random() - 0.5),
    }
    columns = {name: column.masked_fill(~mask, junk) for name, column in columns.items()}
    advantages = torch.randn(shape, generator=own, dtype=torch.float64)
    advantages = advantages.masked_fill(~mask, junk) if per_token else advantages[:, 0]
    return Case(columns, mask, advantages)


def by_hand(case: Case, config: LossConfig, logprobs: torch.Tensor) -> torch.Tensor:
    """The step's loss, from the formulas: one token after another, with Python's own branches."""
    rows, denominator = [], 0
    for row in range(len(case.mask)):
        at = [t for t in range(case.mask.shape[1]) if case.mask[row, t]]
        if not at:
            continue
        column = {n: [float(c[row, t]) for t in at] for n, c in case.columns.items()}
        now = [logprobs[row, t] for t in at]
        prev, gen = column["prev_logprobs"], column["generation_logprobs"]
        terms = []
        for i, t in enumerate(at):
            given = case.advantages[row]
            advantage = float(given if given.dim() == 0 else given[t])
            ratio = torch.exp(now[i] - prev[i])
            if config.sequence_level_importance_ratios:
                product = torch.ones((), dtype=torch.float64)
                for j in range(len(at)):
                    product = product * torch.exp(now[j] - prev[j])
                ratio = product ** (1 / len(at))
            low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
            if config.use_cispo:
                gain = min(max(float(ratio.detach()), low), high) * advantage * now[i]
            elif advantage > 0:
                gain = (
                    ratio if ratio < high else torch.tensor(high, dtype=torch.float64)
                ) * advantage
            else:
                gain = (
                    ratio if ratio > low else torch.tensor(low, dtype=torch.float64)
                ) * advantage
                if config.ratio_clip_c is not None and ratio > config.ratio_clip_c:
                    gain = torch.tensor(config.ratio_clip_c * advantage, dtype=torch.float64)
            weight = math.exp(prev[i] - gen[i])
            if config.rollout_is == "sequence":
                weight = math.prod(math.exp(prev[j] - gen[j]) for j in range(len(at)))
            if config.truncated_importance_sampling_ratio is not None:
                weight = min(weight, config.truncated_importance_sampling_ratio)
            if not config.use_importance_sampling_correction:
                weight = 1.0
            term = -weight * gain
            if config.reference_policy_kl_penalty and not config.use_kl_in_reward:
                d = float(now[i].detach()) - column["reference_logprobs"][i]
                value, slope = {
                    "k1": (d, d + 1),
                    "k2": (d * d / 2, d),
                    "k3": (math.exp(-d) + d - 1, d),
                }[config.reference_policy_kl_type]
                penalty = value + slope * (now[i] - float(now[i].detach()))
                term = term + config.reference_policy_kl_penalty * penalty
            terms.append(term)
        total = torch.stack([term.to(torch.float64) for term in terms]).sum()
        if config.token_level_loss:
            denominator += len(at)
        else:
            total = total / (config.loss_scale_factor or len(at))
            denominator += 1
        rows.append(total)
    return torch.stack(rows).sum() / denominator


# against the formulas ----------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradient_are_those_of_the_formula(name: str, per_token: bool) -> None:
    config, rows = LossConfig(**SETTINGS[name]), case(per_token=per_token)
    sums, gradient = rows.gradient(config)
    logprobs = rows.columns["logprobs"].clone().requires_grad_()
    expected = by_hand(rows, config, logprobs)
    (slope,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(sums.loss / sums.denominator, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient / sums.denominator, slope, atol=1e-12, rtol=1e-12)
    assert bool(slope.any())


SMOOTH = [name for name in SETTINGS if name[:2] not in ("ci", "k1", "k3")]
"""Without a part that is a constant for the gradient alone: a finite difference sees it move."""


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_finite_differences(name: str) -> None:
    config, rows = LossConfig(**SETTINGS[name]), case()
    assert torch.autograd.gradcheck(
        lambda logprobs: rows.sums(config, logprobs).loss,
        rows.columns["logprobs"].clone().requires_grad_(),
    )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_outside_the_mask_have_no_influence_whatever_they_hold(
    name: str, per_token: bool
) -> None:
    config = LossConfig(**SETTINGS[name])
    clean, clean_gradient = case(per_token=per_token).gradient(config)
    for junk in (-1e9, 1e9, math.nan, math.inf, -math.inf):
        sums, gradient = case(per_token=per_token, junk=junk).gradient(config)
        for field, found, expected in zip(sums._fields, sums, clean, strict=True):
            assert torch.equal(found, expected), (field, junk)
        assert torch.equal(gradient, clean_gradient)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_parts_of_a_step_amount_to_the_whole(name: str) -> None:
    config, rows = LossConfig(**SETTINGS[name]), case()
    whole, gradient = rows.gradient(config)
    cuts = (slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 6))
    parts = [rows.part(cut).gradient(config) for cut in cuts]
    torch.testing.assert_close(torch.cat([part for _, part in parts]), gradient)
    each_field = zip(*(sums for sums, _ in parts), strict=True)
    for field, values in zip(LossSums._fields, each_field, strict=True):
        each = torch.stack(values)
        amount = each.amax() if field.startswith("max_") else each.sum()
        torch.testing.assert_close(amount, getattr(whole, field), msg=field)


def test_no_row_and_no_token_add_nothing() -> None:
    for rows in (case().part(slice(0, 0)), case().part(slice(1, 2))):
        sums, gradient = rows.gradient(LossConfig())
        assert not gradient.any() and not any(numbers(sums).values())
        assert not any(step_metrics(numbers(sums)).values())


# by hand -----------------------------------------------------------------------------------


def loss_of(
    ratio: float, advantage: float, *, drift: float = 0.0, **settings: Any
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
        config=LossConfig(**{"ratio_clip_max": 0.3, **settings}),
    )
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return sums, float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.25, 1.0, -1.25, -1.25, ""),
        (1.5, 1.0, -1.3, 0.0, "high"),
        (0.5, 1.0, -0.5, -0.5, ""),  # up again is allowed
        (0.5, -1.0, 0.8, 0.0, "low"),
        (1.5, -1.0, 1.5, 1.5, ""),
        (4.0, -1.0, 3.0, 0.0, "dual"),  # by c = 3
        (4.0, 1.0, -1.3, 0.0, "high"),
    ],
)
def test_clipping_stops_the_gradient_on_the_far_side_alone(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: str
) -> None:
    sums, found = loss_of(ratio, advantage, ratio_clip_c=3.0)
    assert float(sums.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert found == pytest.approx(gradient, rel=1e-5)
    for which in ("low", "high", "dual"):
        assert float(getattr(sums, f"clipped_{which}")) == (which == clipped), which
    assert float(sums.probs_ratio) == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.5, 1.0, 1.3), (1.5, -1.0, 1.3), (0.5, 2.0, 0.5)]
)
def test_cispo_keeps_the_gradient_of_what_it_clips(
    ratio: float, advantage: float, weight: float
) -> None:
    sums, gradient = loss_of(ratio, advantage, use_cispo=True, ratio_clip_min=1.0)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
    logprob = -1 + math.log(ratio)
    assert float(sums.loss.detach()) == pytest.approx(-weight * advantage * logprob, rel=1e-5)
    assert (float(sums.clipped_low), float(sums.clipped_high)) == (0, ratio > 1.3)


@pytest.mark.parametrize(
    ("drift", "weight"), [(0.0, 1.0), (0.5, E**0.5), (3.0, 2.0), (-1.0, 1 / E), (1e4, 2.0)]
)
def test_the_importance_weight_is_truncated_above(drift: float, weight: float) -> None:
    sums, gradient = loss_of(1.0, 1.0, drift=drift)
    assert float(sums.importance_weight) == pytest.approx(weight, rel=1e-5)
    assert float(sums.truncated) == (drift > math.log(2))
    assert gradient == pytest.approx(-weight, rel=1e-5)  # the weight itself has no gradient
    assert math.isfinite(float(sums.sampling_importance_ratio))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_ratio_is_beyond_a_float(advantage: float) -> None:
    for ratio in (1e200, 1e-200):
        sums, gradient = loss_of(ratio, advantage)
        assert math.isfinite(gradient) and all(map(math.isfinite, numbers(sums).values()))


def two_rows(**settings: Any) -> tuple[LossSums, torch.Tensor]:
    """Log-ratios (0.3, 0.1) and 0.05; drifts (0.2, 0.4) and -0.1; advantages 2 and -1."""
    logprobs = torch.tensor([[-0.7, -0.9], [-0.95, 9.0]], dtype=torch.float64, requires_grad=True)
    sums = policy_gradient_loss(
        logprobs=logprobs,
        prev_logprobs=torch.tensor([[-1.0, -1.0], [-1.0, 9.0]]).double(),
        generation_logprobs=torch.tensor([[-1.2, -1.4], [-0.9, 9.0]]).double(),
        advantages=torch.tensor([2.0, -1.0]).double(),
        mask=torch.tensor([[1, 1], [1, 0]]),
        config=LossConfig(ratio_clip_min=0.5, ratio_clip_max=0.5, **settings),
        reference_logprobs=torch.tensor([[-0.8, -0.9], [-1.0, 9.0]]).double(),
    )
    (gradient,) = torch.autograd.grad(sums.loss, logprobs)
    return sums, gradient / sums.denominator


PLAIN = {"use_importance_sampling_correction": False}


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (PLAIN, (-2 * E**0.3 - 2 * E**0.1 + E**0.05) / 3),
        ({**PLAIN, "token_level_loss": False}, (-(E**0.3) - E**0.1 + E**0.05) / 2),
        (
            {**PLAIN, "token_level_loss": False, "loss_scale_factor": 4},
            (-2 * E**0.3 - 2 * E**0.1 + E**0.05) / 4 / 2,
        ),
        (
            {**PLAIN, "token_level_loss": False, "sequence_level_importance_ratios": True},
            (-2 * E**0.2 + E**0.05) / 2,
        ),
        ({}, (-2 * E**0.5 - 2 * E**0.5 + E**-0.05) / 3),
        (
            {"truncated_importance_sampling_ratio": 1.3},
            (-2 * E**0.5 - 2 * 1.3 * E**0.1 + E**-0.05) / 3,
        ),
        ({"rollout_is": "sequence"}, (E**0.6 * (-2 * E**0.3 - 2 * E**0.1) + E**-0.05) / 3),
        (
            {"rollout_is": "sequence", "truncated_importance_sampling_ratio": 1.5},
            (1.5 * (-2 * E**0.3 - 2 * E**0.1) + E**-0.05) / 3,
        ),
        (
            {**PLAIN, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"},
            (-2 * E**0.3 - 2 * E**0.1 + E**0.05 + 0.5 * (0.1 + 0 + 0.05)) / 3,
        ),
        (
            {**PLAIN, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k2"},
            (-2 * E**0.3 - 2 * E**0.1 + E**0.05 + 0.25 * (0.01 + 0 + 0.0025)) / 3,
        ),
        (
            {**PLAIN, "reference_policy_kl_penalty": 0.5},
            (-2 * E**0.3 - 2 * E**0.1 + E**0.05 + 0.5 * (E**-0.1 + E**-0.05 + 0.15 - 2)) / 3,
        ),
    ],
)
def test_two_rows_by_hand(settings: dict[str, Any], loss: float) -> None:
    sums, _ = two_rows(**settings)
    # the columns were written in float32
    assert float(sums.loss.detach() / sums.denominator) == pytest.approx(loss, rel=1e-6)


def test_a_sequence_moves_as_one_under_gspo() -> None:
    _, gradient = two_rows(**PLAIN, token_level_loss=False, sequence_level_importance_ratios=True)
    expected = torch.tensor([[-(E**0.2) / 2] * 2, [E**0.05 / 2, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


def test_the_metrics_of_a_step() -> None:
    sums, _ = two_rows(
        reference_policy_kl_penalty=0.5,
        reference_policy_kl_type="k1",
        truncated_importance_sampling_ratio=1.3,
    )
    found = step_metrics(numbers(sums))
    drawn = [E**0.5 * 0.7, E**0.5 * 0.9, E**-0.05 * 0.95]
    assert found == pytest.approx(
        {
            "loss": float(sums.loss.detach()) / 3,
            "tokens": 3,
            "probs_ratio": (E**0.3 + E**0.1 + E**0.05) / 3,
            "probs_ratio_max": E**0.3,
            "clip_fraction": 0,
            "clip_fraction_low": 0,
            "clip_fraction_high": 0,
            "clip_fraction_dual": 0,
            "sampling_importance_ratio": (E**0.2 + E**0.4 + E**-0.1) / 3,
            "sampling_importance_ratio_max": E**0.4,
            "importance_weight": (E**0.2 + 1.3 + E**-0.1) / 3,
            "is_oob_ratio": 1 / 3,
            "gen_kl_error": (E**0.2 + E**0.4 + E**-0.1 - 3 - 0.5) / 3,
            "gen_kl_error_k1": -0.5 / 3,
            "approx_entropy": sum(drawn) / 3,
            "kl_penalty": 0.05,
        },
        rel=1e-5,
        abs=1e-12,
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_only_the_loss_carries_a_gradient(corrected: bool) -> None:
    """Not even where the step starts from the very tensor that is being trained."""
    logprobs = case().columns["logprobs"].clone().requires_grad_()
    rows = case()._replace(columns=dict.fromkeys(LOGPROBS, logprobs))
    config = LossConfig(
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k1",
        use_importance_sampling_correction=corrected,
    )
    sums = rows.sums(config)
    assert [field for field in sums._fields if getattr(sums, field).requires_grad] == ["loss"]
    (gradient,) = torch.autograd.grad(sums.loss, logprobs)
    expected = (0.1 - rows.advantages[:, None]) * rows.mask  # all ratios are 1, and KL is 0
    torch.testing.assert_close(gradient, expected)


# the divergence ----------------------------------------------------------------------------


def categorical() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    return logits, torch.log_softmax(torch.randn(6, dtype=torch.float64), -1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_penaltys_mean_gradient_is_that_of_the_divergence(kind: Any) -> None:
    logits, reference = categorical()
    logprobs = torch.log_softmax(logits, -1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    drawn = logprobs.detach().exp()  # how often each token comes
    (found,) = torch.autograd.grad((drawn * kl_penalty(logprobs, reference, kind)).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(kind: Any) -> None:
    logits, reference = categorical()
    logprobs = torch.log_softmax(logits.detach(), -1)
    difference = logprobs - reference
    exact = (logprobs.exp() * difference).sum()
    torch.testing.assert_close((logprobs.exp() * kl_estimate(difference, kind)).sum(), exact)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [1e-5, -1e-5, -10.0, -19.9, -20.1, -100.0, 19.9, 100.0])
def test_the_penalty_pulls_back_by_the_difference_however_far(kind: Any, difference: float) -> None:
    logprobs = torch.tensor([difference - 3], dtype=torch.float32, requires_grad=True)
    reference = torch.tensor([-3.0])
    penalty = kl_penalty(logprobs, reference, kind)
    (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
    seen = logprobs.detach() - reference
    assert float(gradient) == float(seen + 1 if kind == "k1" else seen)
    assert math.isfinite(float(penalty.detach()))


def test_k3_is_never_negative_also_where_float32_has_few_digits_left() -> None:
    small = torch.linspace(-1e-4, 1e-4, 4001)
    exact = kl_estimate(small.double(), "k3")
    assert float(exact.min()) >= 0
    torch.testing.assert_close(kl_estimate(small, "k3"), exact.float(), atol=1e-11, rtol=0)


def test_the_mismatch_of_two_engines_that_round_otherwise_is_no_noise() -> None:
    """As two engines in float32 differ: the mean of d^2 / 2, not what rounding leaves."""
    own = torch.Generator().manual_seed(0)
    generation = -3 * torch.rand((8, 100), generator=own)
    prev = generation + 1e-6 * torch.randn((8, 100), generator=own)
    rows = Case(
        dict.fromkeys(LOGPROBS, prev) | {"generation_logprobs": generation},
        torch.ones((8, 100), dtype=torch.bool),
        torch.ones(8),
    )
    found = step_metrics(numbers(rows.sums(LossConfig())))["gen_kl_error"]
    expected = float((prev - generation).double().square().mean() / 2)
    assert found == pytest.approx(expected, rel=1e-3, abs=0)


# settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ratio_clip_min": 0.0}, "policy.loss.ratio_clip_min is 0.0; it must be above 0"),
        ({"ratio_clip_min": 1.1}, "ratio_clip_min is 1.1; it must be at most 1"),
        ({"ratio_clip_max": math.nan}, "ratio_clip_max is nan; it must be above 0"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c is 1.0; it must be above 1"),
        ({"truncated_importance_sampling_ratio": 0.0}, "sampling_ratio is 0.0; it must be above 0"),
        (
            {"token_level_loss": False, "loss_scale_factor": -1.0},
            "loss_scale_factor is -1.0; it must be above 0",
        ),
        (
            {"reference_policy_kl_penalty": -0.1},
            "reference_policy_kl_penalty is -0.1; it must be at least 0, and finite",
        ),
        (
            {"reference_policy_kl_penalty": math.inf},
            "kl_penalty is inf; it must be at least 0",
        ),
        (
            {"token_level_loss": False, "loss_scale_factor": math.inf},
            "loss_scale_factor is inf; it must be above 0, and finite",
        ),
        ({"reference_policy_kl_type": "k4"}, "kl_type is k4; it is one of k1, k2, k3"),
        ({"rollout_is": "group"}, "rollout_is is group; it is one of token, sequence"),
        ({"use_kl_in_reward": True}, "kl_penalty is 0.0: there is nothing to take off"),
        (
            {"sequence_level_importance_ratios": True},
            "policy.loss.sequence_level_importance_ratios is true does not go with"
            " token_level_loss is true",
        ),
        ({**GSPO, "loss_scale_factor": 8.0}, "does not go with loss_scale_factor is 8.0"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "does not go with ratio_clip_c is 3.0"),
        ({"use_cispo": True, "token_level_loss": False}, "with token_level_loss is false"),
        ({**GSPO, "use_cispo": True}, "with sequence_level_importance_ratios is true"),
        ({"loss_scale_factor": 8.0}, "does not go with token_level_loss is true"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LossConfig(**wrong)
    assert told in str(refused.value)


def test_what_the_loss_reads() -> None:
    plain = ("generation_logprobs", "prev_logprobs", "advantage")
    assert LossConfig().columns == plain and not LossConfig().needs_reference
    paid = LossConfig(reference_policy_kl_penalty=0.1)
    assert paid.columns == (*plain, "reference_logprobs") and paid.needs_reference
    taken_off = LossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    assert taken_off.columns == plain and taken_off.needs_reference
