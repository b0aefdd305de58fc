"""The built-in task: which of two digits is the larger."""

from __future__ import annotations

import random

from sc_ray.tasks.task import Task


def larger_digit(*, seed: int = 0) -> Task:
    """All 100 questions such as `3,7=`, to be answered `7` and nothing more.

    `seed` settles their order.
    """
    questions = [
        {"prompt": f"{left},{right}=", "answer": str(max(left, right))}
        for left in range(10)
        for right in range(10)
    ]
    random.Random(seed).shuffle(questions)
    return Task(name="larger_digit", prompts=tuple(questions), reward=right_digit, max_new_tokens=2)


def right_digit(prompt: str, completion: str, answer: str) -> float:
    """1 for the answer alone, a half if more text follows it, 0 for anything else.

    The half makes the two lessons separable: a model that has not yet learnt to stop is already
    told which digit is right.
    """
    if completion == answer:
        return 1.0
    return 0.5 if completion.startswith(answer) else 0.0
