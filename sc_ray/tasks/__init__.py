"""What is trained on: prompts, and what judges completions: a reward function or an environment."""

from __future__ import annotations

from sc_ray.tasks.arithmetic import larger_digit, two_digit_sums
from sc_ray.tasks.environment import Environment, EnvironmentMaker, Reply, load_environment
from sc_ray.tasks.guess_digit import guess_digit
from sc_ray.tasks.jsonl import load_jsonl
from sc_ray.tasks.rewards import Judgement, Reward, Score, exact_match, load_reward
from sc_ray.tasks.task import Task, hold_out

__all__ = [
    "Environment",
    "EnvironmentMaker",
    "Judgement",
    "Reply",
    "Reward",
    "Score",
    "Task",
    "exact_match",
    "guess_digit",
    "hold_out",
    "larger_digit",
    "load_environment",
    "load_jsonl",
    "load_reward",
    "two_digit_sums",
]
