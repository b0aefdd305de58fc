"""Turns rows into better weights."""

from __future__ import annotations

from sc_ray.trainer.policy import OptimizerConfig, Policy, PolicySnapshot, Row

__all__ = ["OptimizerConfig", "Policy", "PolicySnapshot", "Row"]
