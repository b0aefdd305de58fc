"""The settings of the loss."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from sc_core import (
    ConfigError,
)

Level = Literal["token", "sequence"]
KlType = Literal["k1", "k2", "k3"]


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one step may move the policy, and how much an off-policy token may count.

    The names are NeMo RL's, but for `rollout_is` and `loss_scale_factor`, which are verl's. As
    they are, it is PPO's clipped loss over tokens, with truncated importance weights. Others are:

    - DAPO's asymmetric clip: `ratio_clip_max: 0.28`
    - dual clip: `ratio_clip_c: 3`
    - GSPO: `sequence_level_importance_ratios: true`, `token_level_loss: false`,
      `ratio_clip_min: 3e-4`, `ratio_clip_max: 4e-4`
    - CISPO: `use_cispo: true`, `ratio_clip_min: 1`
    - Dr. GRPO: `token_level_loss: false`, `loss_scale_factor` the most tokens of a completion

    Raises:
        ConfigError: a value that leaves nothing to learn from, or two that exclude each other.
    """

    ratio_clip_min: float = 0.2
    """The ratio of current to previous probability is clipped below at 1 less this. 1: not at
    all."""
    ratio_clip_max: float = 0.2  #: and above at 1 plus this
    ratio_clip_c: float | None = None
    """Dual clip: where the advantage is negative, no ratio counts as more than this. Above 1;
    None: off."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio for all tokens of a sequence, their geometric mean."""
    use_cispo: bool = False
    """CISPO: the clipped ratio is a weight without gradient, so no token loses its gradient."""
    token_level_loss: bool = True
    """Mean over all tokens of a step. False: mean over its sequences of each one's own mean, or,
    with `loss_scale_factor`, of each one's sum divided by that."""
    loss_scale_factor: float | None = None
    """Dr. GRPO: what the sum over a sequence's tokens is divided by, instead of its length."""
    use_importance_sampling_correction: bool = True
    """Weigh tokens by how much likelier they are under the weights that the step starts from than
    under those that generated them."""
    truncated_importance_sampling_ratio: float | None = 2.0
    """No weight is more than this. None: no bound."""
    rollout_is: Level = "token"
    """Whether each token has a weight of its own, or all of a sequence have the product of
    theirs."""
    reference_policy_kl_penalty: float = 0.0
    """What the KL divergence from the reference policy costs. 0: there is no reference."""
    reference_policy_kl_type: KlType = "k3"  #: the estimate of that divergence
    use_kl_in_reward: bool = False
    """Take the penalty, by k1, off the reward rather than into the loss: REINFORCE++."""

    def __post_init__(self) -> None:
        for name in ("ratio_clip_min", "ratio_clip_max"):
            self._above(0, name)
        if self.ratio_clip_min > 1:
            raise ConfigError(f"{self._told('ratio_clip_min')}; it must be at most 1")
        self._above(1, "ratio_clip_c")
        self._above(0, "loss_scale_factor", finite=True)
        self._above(0, "truncated_importance_sampling_ratio")
        if not 0 <= self.reference_policy_kl_penalty < math.inf:
            told = self._told("reference_policy_kl_penalty")
            raise ConfigError(f"{told}; it must be at least 0, and finite")
        self._one_of("rollout_is", Level)
        self._one_of("reference_policy_kl_type", KlType)
        sequence_level = "sequence_level_importance_ratios"
        if self.sequence_level_importance_ratios:
            self._excludes(sequence_level, "token_level_loss", self.token_level_loss)
            self._excludes(sequence_level, "loss_scale_factor", self.loss_scale_factor is not None)
        if self.use_cispo:
            self._excludes("use_cispo", sequence_level, self.sequence_level_importance_ratios)
            self._excludes("use_cispo", "ratio_clip_c", self.ratio_clip_c is not None)
            self._excludes("use_cispo", "token_level_loss", not self.token_level_loss)
        if self.loss_scale_factor is not None:
            self._excludes("loss_scale_factor", "token_level_loss", self.token_level_loss)
        if self.use_kl_in_reward and not self.reference_policy_kl_penalty:
            raise ConfigError(
                f"{self._told('use_kl_in_reward')}, and"
                f" {self._told('reference_policy_kl_penalty')}: there is nothing to take off"
            )

    @property
    def kl_in_loss(self) -> float:
        """The penalty that the loss itself has."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def needs_reference(self) -> bool:
        """Whether rows need the column `reference_logprobs` before their advantages are made."""
        return self.reference_policy_kl_penalty > 0

    @property
    def columns(self) -> tuple[str, ...]:
        """What the loss reads of each row, besides its tokens and their mask."""
        names = ("generation_logprobs", "prev_logprobs", "advantage")
        return (*names, "reference_logprobs") if self.kl_in_loss else names

    def _told(self, name: str) -> str:
        value = getattr(self, name)
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"policy.loss.{name} is {shown}"

    def _above(self, least: float, name: str, *, finite: bool = False) -> None:
        value = getattr(self, name)
        if value is None or (value > least and not (finite and value == math.inf)):
            return  # it is no NaN either
        raise ConfigError(
            f"{self._told(name)}; it must be above {least}" + (", and finite" if finite else "")
        )

    def _one_of(self, name: str, kind: Any) -> None:
        if getattr(self, name) not in get_args(kind):
            raise ConfigError(f"{self._told(name)}; it is one of {', '.join(get_args(kind))}")

    def _excludes(self, name: str, other: str, wrong: bool) -> None:
        if wrong:
            raise ConfigError(f"{self._told(name)} does not go with {self._told(other)[12:]}")
