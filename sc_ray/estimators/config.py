"""Which advantages a run uses."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from sc_core import (
    AdvantageEstimator,
    ConfigError,
)
from sc_ray.estimators.gdpo import GdpoAdvantages
from sc_ray.estimators.grpo import Baseline, DrGrpoAdvantages, GrpoAdvantages, RlooAdvantages
from sc_ray.estimators.opo import OpoAdvantages
from sc_ray.estimators.reinforce import (
    RawRewards,
    ReinforcePlusPlusAdvantages,
    ReinforcePlusPlusBaselineAdvantages,
)

EstimatorName = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "opo",
    "raw_reward", "gae",
]  # fmt: skip
_OF_GROUPS: dict[str, Any] = {
    "dr_grpo": DrGrpoAdvantages,
    "rloo": RlooAdvantages,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaselineAdvantages,
    "opo": OpoAdvantages,
}


class AdvantagesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become advantages. Names are those of NeMo RL's `grpo.adv_estimator`, or
    verl's where it has none.

    Raises:
        ConfigError: an estimator that this trainer can't feed, or a setting that it doesn't have.
    """

    estimator: EstimatorName = "grpo"
    """Each is a class of `sc_ray.estimators`. Those that normalise over the batch
    (`reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`) need whole steps:
    `async_rl.min_groups_for_streaming_train` unset. `gae` needs a critic, which is for trainers
    that embed `sc_core`."""
    use_leave_one_out_baseline: bool | None = None
    """`grpo`: the baseline is the mean of the other siblings (true, and None), or of all."""
    normalize_rewards: bool | None = None
    """`grpo`: divide by the group's standard deviation (None: don't)."""
    baseline: Baseline | None = None  #: the same as `use_leave_one_out_baseline`, spelt out
    normalize: bool | None = None  #: the same as `normalize_rewards`
    reward_weights: tuple[float, ...] | None = None
    """`gdpo`: of each component of the reward, in the order of their names: rows need the column
    `rewards`, so the reward function gives several. None: the reward is its one component."""

    def __post_init__(self) -> None:
        if self.estimator not in get_args(EstimatorName):
            raise ConfigError(
                f"advantages.estimator is {self.estimator}; it is one of"
                f" {', '.join(get_args(EstimatorName))}"
            )
        if self.estimator == "gae":
            raise ConfigError(
                "advantages.estimator is gae, which needs the values of a critic, and this trainer"
                " has none; a trainer of your own can use sc_ray.estimators.GaeAdvantages"
            )
        of_grpo = ("use_leave_one_out_baseline", "normalize_rewards", "baseline", "normalize")
        for names, estimator in ((of_grpo, "grpo"), (("reward_weights",), "gdpo")):
            for name in names:
                value = getattr(self, name)
                if value is not None and self.estimator != estimator:
                    raise ConfigError(
                        f"advantages.{name} is {value}, and advantages.estimator is"
                        f" {self.estimator}; only {estimator} has it"
                    )
        self._agree("use_leave_one_out_baseline", "baseline", leave_one_out=True, mean=False)
        self._agree("normalize_rewards", "normalize")

    def build(self, *, group_size: int, kl_in_reward: float = 0.0) -> AdvantageEstimator:
        """The estimator, for groups of so many siblings.

        Args:
            kl_in_reward: cost of the divergence from a reference that is taken off the reward.

        Raises:
            ConfigError: a group is too small for it, or it takes nothing off the reward.
        """
        if kl_in_reward and self.estimator != "reinforce_plus_plus":
            raise ConfigError(
                "policy.loss.use_kl_in_reward is true, and advantages.estimator is"
                f" {self.estimator}; only reinforce_plus_plus takes it off the reward"
            )
        if self.estimator == "grpo":
            others = self.baseline != "mean" and self.use_leave_one_out_baseline is not False
            return GrpoAdvantages(
                baseline="leave_one_out" if others else "mean",
                normalize_by_std=bool(self.normalize or self.normalize_rewards),
                group_size=group_size,
            )
        if self.estimator == "reinforce_plus_plus":
            return ReinforcePlusPlusAdvantages(kl_penalty=kl_in_reward)
        if self.estimator == "gdpo":
            return GdpoAdvantages(reward_weights=self.reward_weights, group_size=group_size)
        if self.estimator == "raw_reward":
            return RawRewards()
        made: AdvantageEstimator = _OF_GROUPS[self.estimator](group_size=group_size)
        return made

    def _agree(self, name: str, other: str, **means: bool) -> None:
        one, two = getattr(self, name), getattr(self, other)
        if one is not None and two is not None and means.get(str(two), two) is not one:
            raise ConfigError(
                f"advantages.{name} is {one}, and advantages.{other} is {two}: set one of them"
            )
