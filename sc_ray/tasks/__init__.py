"""What is trained on: prompts with answers, and a reward computed from text alone."""

from __future__ import annotations

from sc_ray.tasks.arithmetic import larger_digit
from sc_ray.tasks.jsonl import load_jsonl
from sc_ray.tasks.rewards import exact_match, load_reward
from sc_ray.tasks.task import Reward, Task, hold_out

__all__ = [
    "Reward",
    "Task",
    "exact_match",
    "hold_out",
    "larger_digit",
    "load_jsonl",
    "load_reward",
]
