"""The learning rate over the steps of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from sc_core import (
    ConfigError,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


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
        """The same, with its lowest rate at that step if it names none."""
        if self.name == "constant" or self.decay_steps is not None:
            return self
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


def schedule(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig, *, steps: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """A scheduler for an optimizer that has so many steps behind it; sets its rate."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, config.factor, last_epoch=steps - 1)
