"""Built-in tasks with numbers: the larger of two digits, and sums for a model that can read."""

from __future__ import annotations

import random
import re

from sc_ray.tasks.task import Task

_HELD_OUT_SUMS = 100


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


def two_digit_sums(*, seed: int = 0) -> Task:
    """All 8,100 questions such as `What is 34 + 57?`, for a pretrained model.

    100 of them are held out for evaluations. `seed` settles which, and the order.
    """
    questions = [
        {"prompt": f"What is {left} + {right}?", "answer": str(left + right)}
        for left in range(10, 100)
        for right in range(10, 100)
    ]
    random.Random(seed).shuffle(questions)
    return Task(
        name="two_digit_sums",
        prompts=tuple(questions[:-_HELD_OUT_SUMS]),
        held_out=tuple(questions[-_HELD_OUT_SUMS:]),
        reward=last_number,
        max_new_tokens=16,
    )


def last_number(prompt: str, completion: str, answer: str) -> float:
    """1 if the last number in the completion is the answer, else 0: `34 + 57 = 91.` counts."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
