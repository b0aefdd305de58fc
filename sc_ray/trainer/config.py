"""The settings of a trainer that its own modules read."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sc_core import (
    ConfigError,
)

Sharding = Literal["fsdp2", "replicated"]


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW; `SchedulerConfig` says how its learning rate goes.

    Raises:
        ConfigError: a value that can't train.
    """

    lr: float = 5e-4  #: learning rate, the highest that the scheduler gives
    beta1: float = 0.9  #: decay of the mean of gradients, per step
    beta2: float = 0.999  #: decay of the mean of their squares, per step
    eps: float = 1e-8  #: added to the root of the latter, so that nothing is divided by 0
    weight_decay: float = 0.0  #: of all weights, times the learning rate, per step
    max_grad_norm: float = 1.0  #: a longer gradient is scaled down to this
    microbatch_rows: int = 64  #: rows in one forward and backward; bounds memory

    def __post_init__(self) -> None:
        for name, fits, must in (
            ("lr", 0 < self.lr < math.inf, "above 0, and finite"),
            ("beta1", 0 <= self.beta1 < 1, "at least 0, and below 1"),
            ("beta2", 0 <= self.beta2 < 1, "at least 0, and below 1"),
            ("eps", 0 <= self.eps < math.inf, "at least 0, and finite"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0, and finite"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            ("microbatch_rows", self.microbatch_rows >= 1, "at least 1"),
        ):
            if not fits:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}; it must be {must}")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learning rate goes from `optimizer.lr` down, after a warm-up to it.

    Raises:
        ConfigError: a value that can't be.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"  #: its course after the warm-up
    warmup_steps: int = 0
    """So many steps come first, at a rate that rises evenly and is `optimizer.lr` after them."""
    decay_steps: int | None = None
    """The step at which `linear` and `cosine` reach their lowest rate, and stay there; None:
    `grpo.max_num_steps`. With None, a resume with more steps goes on along a longer course."""
    min_lr_ratio: float = 0.0  #: that lowest rate, as a share of `optimizer.lr`

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"scheduler.warmup_steps is {self.warmup_steps}; it must be >= 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(
                f"scheduler.min_lr_ratio is {self.min_lr_ratio:g}; it must be in 0 … 1"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"scheduler.decay_steps = {self.decay_steps} must be more than warmup_steps ="
                f" {self.warmup_steps}"
            )

    def over(self, steps: int) -> SchedulerConfig:
        """The same, with its lowest rate at that step if it names none.

        Raises:
            ConfigError: there are no steps after the warm-up.
        """
        if self.name == "constant" or self.decay_steps is not None:
            return self
        if steps <= self.warmup_steps:
            raise ConfigError(
                f"scheduler.warmup_steps is {self.warmup_steps}, and the last step, where the rate"
                f" of {self.name} is lowest unless decay_steps is set, is {steps}; it must be more"
            )
        return msgspec.structs.replace(self, decay_steps=steps)

    def factor(self, steps: int) -> float:
        """What `optimizer.lr` is multiplied by in the step that has so many before it."""
        if steps < self.warmup_steps:
            return (steps + 1) / (self.warmup_steps + 1)
        if self.name == "constant":
            return 1.0
        if self.decay_steps is None:
            raise ConfigError(f"scheduler.decay_steps is needed for {self.name}")
        gone = min(1.0, (steps - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - gone if self.name == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left
