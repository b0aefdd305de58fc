"""Turns rows into better weights."""

from __future__ import annotations

from sc_ray.trainer.microbatch import Row
from sc_ray.trainer.policy import OptimizerConfig, Policy
from sc_ray.trainer.schedule import SchedulerConfig
from sc_ray.trainer.snapshot import PolicySnapshot

__all__ = ["OptimizerConfig", "Policy", "PolicySnapshot", "Row", "SchedulerConfig"]
