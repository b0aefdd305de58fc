from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sc_core.errors import ConfigError, DataPlaneError
from sc_core.ports import AdvantageEstimator
from sc_ray.estimators import (
    AdvantagesConfig,
    DrGrpoAdvantages,
    GaeAdvantages,
    GdpoAdvantages,
    GrpoAdvantages,
    OpoAdvantages,
    RawRewards,
    ReinforcePlusPlusAdvantages,
    ReinforcePlusPlusBaselineAdvantages,
    RlooAdvantages,
)


def estimate(rewards: list[float], group_sizes: list[int], **settings: Any) -> list[float]:
    columns = {"reward": [torch.tensor([reward]) for reward in rewards]}
    found = GrpoAdvantages(**settings).estimate(columns, group_sizes)
    assert list(found) == ["advantage"]
    assert all(row.shape == (1,) and row.dtype == torch.float32 for row in found["advantage"])
    return [float(row) for row in found["advantage"]]


def test_leave_one_out_compares_with_the_others() -> None:
    assert estimate([1, 0, 1, 1], [4]) == pytest.approx([1 / 3, -1, 1 / 3, 1 / 3])


def test_mean_compares_with_all() -> None:
    assert estimate([1, 0, 1, 1], [4], baseline="mean") == pytest.approx([0.25, -0.75, 0.25, 0.25])


def test_each_group_is_compared_within_itself_in_order() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5, 0.2, 1.0, 1.0, 0.0]
    together = estimate(rewards, [2, 3, 3])
    apart = estimate(rewards[:2], [2]) + estimate(rewards[2:5], [3]) + estimate(rewards[5:], [3])
    assert together == apart
    assert together[:2] == [1.0, -1.0]


def test_normalised_by_the_sample_standard_deviation() -> None:
    found = estimate([1, 0, 1, 1], [4], baseline="mean", normalize_by_std=True)
    assert found == pytest.approx([0.5, -1.5, 0.5, 0.5])


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_have_no_advantage_at_all(baseline: str, normalize: bool) -> None:
    settings = {"baseline": baseline, "normalize_by_std": normalize}
    assert estimate([0.1] * 7, [7], **settings) == [0.0] * 7


def test_no_rows_have_no_advantages() -> None:
    assert estimate([], []) == []


def test_a_group_of_one_is_refused_at_construction_or_when_it_comes() -> None:
    with pytest.raises(
        ConfigError, match="leave_one_out needs groups of at least 2 siblings, not 1"
    ):
        GrpoAdvantages(group_size=1)
    with pytest.raises(ConfigError, match="normalize_by_std needs groups of at least 2"):
        GrpoAdvantages(baseline="mean", normalize_by_std=True, group_size=1)
    with pytest.raises(ConfigError, match="at least 2 siblings, not 1"):
        estimate([1, 0, 1], [2, 1])
    assert estimate([1], [1], baseline="mean", group_size=1) == [0.0]


def test_unknown_baselines_and_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="'median'"):
        GrpoAdvantages(baseline="median")  # type: ignore[arg-type]
    with pytest.raises(DataPlaneError, match="3 rewards for groups of 4 rows"):
        estimate([1, 0, 1], [4])


def test_it_says_what_it_reads() -> None:
    estimator = GrpoAdvantages()
    assert (estimator.select_fields, estimator.heavy) == (("reward", "masked"), False)


def with_masks(
    rewards: list[float], masked: list[int], group_sizes: list[int], **settings: Any
) -> list[float]:
    columns = {
        "reward": [torch.tensor([reward]) for reward in rewards],
        "masked": [row in masked for row in range(len(rewards))],
    }
    found = GrpoAdvantages(**settings).estimate(columns, group_sizes)["advantage"]
    assert all(row.shape == (1,) and row.dtype == torch.float32 for row in found)
    return [float(row) for row in found]


def test_masked_siblings_get_nothing_and_count_for_nothing() -> None:
    rewards = [1.0, 0.0, 9.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    found = with_masks(rewards, [2], [4, 4])
    assert found == pytest.approx([0.5, -1, 0, 0.5, 1 / 3, -1, 1 / 3, 1 / 3])
    found = with_masks(rewards, [2], [4, 4], baseline="mean")
    assert found == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3, 0.25, -0.75, 0.25, 0.25])
    for settings in ({}, {"baseline": "mean"}, {"normalize_by_std": True}):
        alone = with_masks([1.0, 0.0, 1.0], [2], [3], **settings)
        assert alone[:2] == estimate([1, 0], [2], **settings) and alone[2] == 0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("masked", [[0, 1, 2], [0, 1], [1, 2]])
def test_a_group_with_nobody_to_compare_has_no_advantage(
    masked: list[int], baseline: str, normalize: bool
) -> None:
    settings = {"baseline": baseline, "normalize_by_std": normalize, "group_size": 3}
    found = with_masks([5.0, 7.0, 9.0, 1.0, 1.0, 1.0], masked, [3, 3], **settings)
    assert found == [0.0] * 6


# others, each by hand ----------------------------------------------------------------------


def columns_of(
    rewards: list[float], tokens: list[int] | None = None, masked: Sequence[int] = ()
) -> dict[str, Any]:
    """Rows with a token of prompt and so many that were sampled."""
    tokens = tokens or [1] * len(rewards)
    return {
        "reward": [torch.tensor([reward]) for reward in rewards],
        "rewards": [torch.tensor([reward]) for reward in rewards],
        "masked": [row in masked for row in range(len(rewards))],
        "completion_mask": [torch.tensor([0] + [1] * count) for count in tokens],
    }


def made(estimator: AdvantageEstimator, columns: Any, sizes: list[int]) -> list[float]:
    given = {name: columns[name] for name in estimator.select_fields}
    found = estimator.estimate(given, sizes)["advantage"]
    assert all(row.shape == (1,) and row.dtype == torch.float32 for row in found)
    return [float(row) for row in found]


ESTIMATORS: dict[str, Callable[[], AdvantageEstimator]] = {
    "grpo": GrpoAdvantages,
    "dr_grpo": DrGrpoAdvantages,
    "rloo": RlooAdvantages,
    "opo": OpoAdvantages,
    "raw_reward": RawRewards,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantages,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaselineAdvantages,
    "gdpo": lambda: GdpoAdvantages(reward_weights=[1.0]),
}
ROOT3 = 3**0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [0.25, -0.75, 0.25, 0.25, 2, -2]),
        ("rloo", [1 / 3, -1, 1 / 3, 1 / 3, 4, -4]),
        # by length: (1*1 + 3*0 + 2*1 + 2*1) / 8 = 0.625 and (1*5 + 3*1) / 4 = 2
        ("opo", [0.375, -0.625, 0.375, 0.375, 3, -1]),
        ("raw_reward", [1, 0, 1, 1, 5, 1]),
        # 12 tokens: mean 13/12, mean of squares (1 + 2 + 2 + 25 + 3)/12 = 33/12
        (
            "reinforce_plus_plus",
            [(r - 13 / 12) / (33 / 12 - (13 / 12) ** 2) ** 0.5 for r in (1, 0, 1, 1, 5, 1)],
        ),
        # over the group 0.25 (5 tokens), -0.75 (3), 2 (1), -2 (3): mean -5/12
        (
            "reinforce_plus_plus_baseline",
            [
                (a + 5 / 12) / ((5 / 16 + 27 / 16 + 4 + 12) / 12 - 25 / 144) ** 0.5
                for a in (0.25, -0.75, 0.25, 0.25, 2, -2)
            ],
        ),
        # over the group 1/2, -3/2, 1/2, 1/2 and 1/sqrt(2), -1/sqrt(2): mean 0, squares 3 + 1
        ("gdpo", [a / (4 / 6) ** 0.5 for a in (0.5, -1.5, 0.5, 0.5, 0.5**0.5, -(0.5**0.5))]),
    ],
)
def test_two_groups_by_hand(name: str, expected: list[float]) -> None:
    columns = columns_of([1, 0, 1, 1, 5, 1], [1, 3, 2, 2, 1, 3])
    assert made(ESTIMATORS[name](), columns, [4, 2]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_siblings_move_nothing_whatever_the_estimator(name: str) -> None:
    rewards, tokens = [1.0, 0.0, 99.0, 1.0, 5.0, -7.0, 1.0, 3.0], [1, 3, 9, 2, 1, 9, 3, 2]
    kept = [0, 1, 3, 4, 6, 7]
    whole = made(ESTIMATORS[name](), columns_of(rewards, tokens, [2, 5]), [4, 4])
    alone = columns_of([rewards[row] for row in kept], [tokens[row] for row in kept])
    expected = made(ESTIMATORS[name](), alone, [3, 3])
    assert [whole[row] for row in kept] == pytest.approx(expected, abs=1e-6)
    assert whole[2] == whole[5] == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_to_compare_gives_nothing(name: str) -> None:
    if name == "raw_reward":
        return
    estimator = ESTIMATORS[name]()
    assert made(estimator, columns_of([0.1] * 6), [3, 3]) == pytest.approx([0] * 6, abs=1e-6)
    everyone = columns_of([1.0, 2.0, 3.0], masked=[0, 1, 2])
    assert made(estimator, everyone, [3]) == [0] * 3
    assert made(estimator, columns_of([]), []) == []


@pytest.mark.parametrize(
    "estimator",
    [ReinforcePlusPlusAdvantages(kl_penalty=0.1), GaeAdvantages(normalize_advantages=True)],
)
def test_no_rows_have_no_tokens_either(estimator: AdvantageEstimator) -> None:
    found = estimator.estimate({name: [] for name in estimator.select_fields}, [])
    assert found["advantage"] == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sizes_that_do_not_add_up_are_refused(name: str) -> None:
    with pytest.raises(DataPlaneError, match="3 rewards for groups of 4 rows"):
        made(ESTIMATORS[name](), columns_of([1, 0, 1]), [2, 2])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_those_that_look_at_the_batch_ask_for_all_of_it(name: str) -> None:
    rewards = [1.0, 0.0, 1.0, 5.0, 1.0, 0.5]
    estimator = ESTIMATORS[name]()
    together = made(estimator, columns_of(rewards), [3, 3])
    apart = [a for at in (0, 3) for a in made(estimator, columns_of(rewards[at : at + 3]), [3])]
    over_batch = name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    assert estimator.scope == ("chunk" if over_batch or name == "gdpo" else "group")
    if over_batch:
        assert together != pytest.approx(apart, rel=1e-3)
    elif estimator.scope == "group":
        assert together == apart


def test_opo_without_a_token_has_nothing_to_weigh() -> None:
    assert made(OpoAdvantages(), columns_of([1.0, 0.0], [0, 0]), [2]) == [0, 0]


def test_gdpo_normalises_each_reward_before_it_adds_them() -> None:
    rewards = [[1.0, 0.0], [0.0, 100.0], [1.0, 0.0], [0.0, 0.0]]
    columns = {"rewards": [torch.tensor(row) for row in rewards], "masked": [False] * 4}
    first = [a / (1 / ROOT3) for a in (0.5, -0.5, 0.5, -0.5)]  # std sqrt(1/3)
    second = [-0.5, 1.5, -0.5, -0.5]  # of mean 25, std 50
    added = [2 * a + b for a, b in zip(first, second, strict=True)]
    deviation = (sum(a * a for a in added) / 4) ** 0.5
    found = made(GdpoAdvantages(reward_weights=[2.0, 1.0]), columns, [4])
    assert found == pytest.approx([a / deviation for a in added], abs=1e-6)
    with pytest.raises(DataPlaneError, match="a row has 2 rewards for the 3 of reward_weights"):
        made(GdpoAdvantages(reward_weights=[1.0, 1.0, 1.0]), columns, [4])
    with pytest.raises(ConfigError, match="one must not be 0"):
        GdpoAdvantages(reward_weights=[0.0])
    for weight in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="all must be finite"):
            GdpoAdvantages(reward_weights=[1.0, weight])


def test_rewards_that_cancel_are_not_blown_up_by_rounding() -> None:
    rows = [torch.tensor([0.1 * n, -0.1 * n], dtype=torch.float64) for n in (1, 2, 7)]
    columns = {"rewards": rows, "masked": [False] * 3}
    found = made(GdpoAdvantages(reward_weights=[1.0, 1.0]), columns, [3])
    assert found == pytest.approx([0, 0, 0], abs=1e-6)


def test_gdpo_without_components_takes_the_reward(caplog: pytest.LogCaptureFixture) -> None:
    estimator = GdpoAdvantages()
    assert "takes the reward as its one component" in caplog.text
    assert made(estimator, columns_of([1, 0]), [2]) == pytest.approx([1, -1])


def test_reinforce_plus_plus_takes_the_divergence_to_come_off_the_reward() -> None:
    estimator = ReinforcePlusPlusAdvantages(kl_penalty=0.5)
    columns = {
        "reward": [torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([50.0])],
        "masked": [False, False, True],
        "completion_mask": [torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1]), torch.tensor([1])],
        "prev_logprobs": [
            torch.tensor([9.0, -1.0, 9.0, -2.0]), torch.tensor([9.0, -1.0]), torch.ones(1),
        ],
        "reference_logprobs": [
            torch.tensor([7.0, -3.0, 5.0, -3.0]), torch.tensor([7.0, -1.0]), torch.zeros(1),
        ],
    }  # fmt: skip
    found = estimator.estimate({name: columns[name] for name in estimator.select_fields}, [2, 1])
    # to go: 2 + 1 and 1, so 1 - 1.5 and 1 - 0.5; and 3: mean 1, variance (2.25 + 0.25 + 4) / 3
    scale = (6.5 / 3) ** -0.5
    first, second, third = found["advantage"]
    assert first.tolist() == pytest.approx([0, -1.5 * scale, 0, -0.5 * scale], abs=1e-6)
    assert second.tolist() == pytest.approx([0, 2 * scale], abs=1e-6)
    assert third.tolist() == [0]
    assert all(row.dtype == torch.float32 for row in found["advantage"])


# with a critic -----------------------------------------------------------------------------


def gae(**settings: Any) -> dict[str, list[list[float]]]:
    """A row with an environment's token in its middle, a masked one, and a short one."""
    estimator = GaeAdvantages(gae_gamma=0.5, gae_lambda=0.8, **settings)
    junk = 99.0
    columns = {
        "reward": [torch.tensor([reward]) for reward in (1.0, 7.0, 2.0)],
        "masked": [False, True, False],
        "completion_mask": [
            torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 1]), torch.tensor([0, 1]),
        ],
        "values": [
            torch.tensor([junk, 0.2, junk, 0.4, 0.6]), torch.ones(2), torch.tensor([junk, 0.5]),
        ],
        "next_value": [torch.tensor([value]) for value in (0.0, 0.0, 3.0)],
    }  # fmt: skip
    found = estimator.estimate({name: columns[name] for name in estimator.select_fields}, [2, 1])
    assert all(row.dtype == torch.float32 for column in found.values() for row in column)
    return {name: [row.tolist() for row in column] for name, column in found.items()}


def test_gae_by_hand() -> None:
    found = gae()
    # last: 1 - 0.6; then 0.5 * 0.6 - 0.4 + 0.4 * 0.4; then 0.5 * 0.4 - 0.2 + 0.4 * 0.06
    assert found["advantage"][0] == pytest.approx([0, 0.024, 0, 0.06, 0.4], abs=1e-6)
    assert found["returns"][0] == pytest.approx([0, 0.224, 0, 0.46, 1.0], abs=1e-6)
    assert found["advantage"][1] == found["returns"][1] == [0, 0]
    assert found["advantage"][2] == pytest.approx([0, 1.5])


def test_gae_goes_on_behind_a_cut_off_completion() -> None:
    found = gae(bootstrap=True)
    assert found["advantage"][0] == pytest.approx([0, 0.024, 0, 0.06, 0.4], abs=1e-6)
    assert found["advantage"][2] == pytest.approx([0, 2 + 0.5 * 3 - 0.5])
    assert found["returns"][2] == pytest.approx([0, 3.5])


def test_gae_normalises_over_the_tokens_of_the_batch() -> None:
    plain, found = gae(), gae(normalize_advantages=True)
    tokens = torch.tensor([0.024, 0.06, 0.4, 1.5], dtype=torch.float64)
    expected = (tokens - tokens.mean()) / tokens.std(correction=0)
    first, masked, last = found["advantage"]
    assert [first[1], first[3], first[4], last[1]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert first[0] == first[2] == last[0] == 0 and masked == [0, 0]
    assert found["returns"] == plain["returns"]
    assert GaeAdvantages(normalize_advantages=True).scope == "chunk"
    assert (GaeAdvantages().scope, GaeAdvantages().heavy) == ("group", True)


@pytest.mark.parametrize("wrong", [{"gae_gamma": 1.1}, {"gae_lambda": -0.1}])
def test_gae_refuses_what_does_not_fade(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GaeAdvantages(**wrong)  # type: ignore[arg-type]


# settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("grpo", "gdpo")])
def test_each_name_builds_its_own(name: str) -> None:
    built = AdvantagesConfig(estimator=name).build(group_size=4)  # type: ignore[arg-type]
    assert type(built) is type(ESTIMATORS[name]())
    needs_two = name not in ("raw_reward", "reinforce_plus_plus")
    if needs_two:
        with pytest.raises(ConfigError, match="at least 2 siblings, not 1"):
            AdvantagesConfig(estimator=name).build(group_size=1)  # type: ignore[arg-type]
    else:
        AdvantagesConfig(estimator=name).build(group_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "same_as"),
    [
        ({}, {}),
        ({"baseline": "mean"}, {"baseline": "mean"}),
        ({"use_leave_one_out_baseline": False}, {"baseline": "mean"}),
        ({"use_leave_one_out_baseline": True, "baseline": "leave_one_out"}, {}),
        ({"normalize": True}, {"normalize_by_std": True}),
        ({"normalize_rewards": True}, {"normalize_by_std": True}),
    ],
)
def test_the_settings_of_grpo(settings: dict[str, Any], same_as: dict[str, Any]) -> None:
    built = AdvantagesConfig(**settings).build(group_size=4)
    columns = columns_of([1, 0, 1, 3])
    assert made(built, columns, [4]) == made(GrpoAdvantages(**same_as), columns, [4])


def test_gdpo_gets_its_weights_and_reinforce_its_penalty() -> None:
    gdpo = AdvantagesConfig(estimator="gdpo", reward_weights=(1.0, 2.0)).build(group_size=2)
    assert gdpo.select_fields == ("rewards", "masked")
    built = AdvantagesConfig(estimator="reinforce_plus_plus").build(group_size=1, kl_in_reward=0.1)
    assert built.select_fields[-2:] == ("prev_logprobs", "reference_logprobs")
    with pytest.raises(ConfigError, match="only reinforce_plus_plus takes it off the reward"):
        AdvantagesConfig().build(group_size=4, kl_in_reward=0.1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"estimator": "gae"}, "a critic, and this trainer has none"),
        ({"estimator": "best"}, "advantages.estimator is best; it is one of grpo, dr_grpo"),
        ({"estimator": "rloo", "baseline": "mean"}, "advantages.baseline is mean, and advantages"),
        ({"estimator": "opo", "normalize_rewards": True}, "normalize_rewards is True, and"),
        ({"reward_weights": (1.0,)}, "only gdpo has it"),
        ({"use_leave_one_out_baseline": True, "baseline": "mean"}, "baseline is mean: set one"),
        ({"normalize_rewards": False, "normalize": True}, "normalize is True: set one"),
    ],
)
def test_settings_that_contradict_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AdvantagesConfig(**wrong)
    assert told in str(refused.value)
