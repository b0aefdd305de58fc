"""The built-in task of several turns: guess a digit, told each time whether it is higher."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from sc_ray.tasks.environment import Reply
from sc_ray.tasks.task import Task

TURNS = 4
_COST = 0.2  #: of a turn more


def guess_digit(*, seed: int = 0) -> Task:
    """Find the digit between two bounds: `2-7:` may go on as `4>6<5`, with `5` to be found.

    After each guess that is wrong the environment says `>` if the digit is higher, `<` if it is
    lower, and `?` to what is no digit alone. The reward is 1 for the first guess, 0.2 less for
    each turn more, and 0 if four did not find it. There is one prompt for each pair of different
    bounds and each digit from one to the other, 210 in all; `seed` settles their order.
    """
    games = [
        {"prompt": f"{low}-{high}:", "answer": str(digit)}
        for low in range(10)
        for high in range(low + 1, 10)
        for digit in range(low, high + 1)
    ]
    random.Random(seed).shuffle(games)
    return Task(
        name="guess_digit",
        prompts=tuple(games),
        environment=HigherOrLower,
        max_turns=TURNS,
        max_new_tokens=2,
        characters="0123456789<>?",
    )


class HigherOrLower:
    """An `Environment` that knows the digit."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self._digit = int(item["answer"])
        self._turn = 0

    def respond(self, completion: str) -> Reply:
        self._turn += 1
        if len(completion) != 1 or completion not in "0123456789":
            return Reply("?")
        guess = int(completion)
        if guess == self._digit:
            return Reply(None, 1 - _COST * (self._turn - 1))
        return Reply(">" if self._digit > guess else "<")
