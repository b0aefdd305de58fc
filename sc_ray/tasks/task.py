"""The record of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sc_core import (
    ConfigError,
    DataFailure,
)


class Reward(Protocol):
    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        """How good `completion` is, from 0 to 1. Deterministic, and safe to call again."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts with answers, and the reward that judges completions of them."""

    name: str
    prompts: Sequence[Mapping[str, Any]]  #: each has a `prompt` and an `answer`, both text
    reward: Reward
    max_new_tokens: int  #: of a completion, the end-of-text token included
    held_out: Sequence[Mapping[str, Any]] = ()  #: such prompts, for evaluations alone

    def alphabet(self) -> str:
        """Every character of all prompts and answers, sorted: enough for a character tokenizer."""
        items = (*self.prompts, *self.held_out)
        texts = (item[key] for item in items for key in ("prompt", "answer"))
        return "".join(sorted(set().union(*texts)))

    def score(self, item: Mapping[str, Any], completion: str) -> float:
        """The reward of a completion of one of the prompts.

        Raises:
            DataFailure: the reward function answered something other than a number in [0, 1].
        """
        reward = self.reward(item["prompt"], completion, item["answer"])
        if not isinstance(reward, int | float) or not 0 <= reward <= 1:
            raise DataFailure(
                f"the reward of task {self.name} for prompt {item['prompt']!r} and completion"
                f" {completion!r} is {reward!r}; it must be a number from 0 to 1"
            )
        return float(reward)


def hold_out(task: Task, count: int) -> Task:
    """The task with its last `count` prompts held out of training.

    Raises:
        ConfigError: none would be left to train on.
    """
    left = len(task.prompts) - count
    if left < 1:
        raise ConfigError(
            f"task.held_out is {count}, and the task {task.name} has {len(task.prompts)} prompts:"
            " none would be left to train on"
        )
    kept, held_out = task.prompts[:left], task.prompts[left:]
    return msgspec.structs.replace(task, prompts=kept, held_out=held_out)
