"""The learning rate over the steps of a run."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from sc_ray.trainer.config import SchedulerConfig


def schedule(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig, *, steps: int = 0
) -> LambdaLR:
    """A scheduler for an optimizer that has so many steps behind it; sets its rate."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return LambdaLR(optimizer, config.factor, last_epoch=steps - 1)
