"""Reward functions: what they may answer, and how a configuration names one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from typing import Protocol, SupportsFloat, cast

import msgspec

from sc_core import (
    DataFailure,
)
from sc_ray.tasks.named import load_named

Judgement = float | Mapping[str, float]
"""One finite number; or several by name, whose total is the one named `reward`, or else their sum.
A function names the same components each time. A scalar of NumPy or torch is a number, too."""

_MOST = 3.4e38  #: in a row it is a float32


class Reward(Protocol):
    def __call__(
        self, prompt: str, completion: str, answer: str
    ) -> Judgement | Awaitable[Judgement]:
        """How good `completion` is. Deterministic, and safe to call again.

        An `async` one runs on an asyncio loop that lives as long as its process; siblings are
        judged side by side. Another is called one completion at a time.
        """


class Score(msgspec.Struct, frozen=True):
    """A reward, and what it is made of."""

    reward: float
    components: Mapping[str, float] = {}  #: by name, in the order of names; may be empty


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1 for the answer, apart from space around it, else 0."""
    return float(completion.strip() == answer.strip())


def score_of(judgement: object, of: str) -> Score:
    """The score that a judgement amounts to; `of` says in errors what was judged.

    Raises:
        DataFailure: it is no finite number, nor several by name.
    """
    if isinstance(judgement, Mapping):
        return _sum_of(judgement, of)
    number = _number(judgement)
    if number is None or not abs(number) < _MOST:
        if inspect.iscoroutine(judgement):
            judgement.close()  # else Python complains, much later, that nobody waited for it
        raise DataFailure(
            f"{of} is {judgement!r}; it must be a finite number, or a mapping of such numbers"
            " by name"
        )
    return Score(number)


def _sum_of(judgement: Mapping[object, object], of: str) -> Score:
    numbers: dict[str, float] = {}
    for name, value in judgement.items():
        number = _number(value)
        if not isinstance(name, str) or number is None or not abs(number) < _MOST:
            raise DataFailure(f"{of} has {value!r} under {name!r}; it must be a finite number")
        numbers[name] = number
    total = numbers.pop("reward", None)
    if not numbers:
        raise DataFailure(f"{of} is {dict(judgement)!r}, which names no component")
    components = dict(sorted(numbers.items()))
    return Score(sum(components.values()) if total is None else total, components)


def _number(value: object) -> float | None:
    """Any kind of number as a float; None of what is none, or several."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def load_reward(spec: str) -> Reward:
    """The function that `module:function` names; the module is imported.

    Raises:
        ConfigError: the name is malformed, or the module or the function is not there.
    """
    return cast("Reward", load_named("reward", "function", spec))
