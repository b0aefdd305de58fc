"""The record of a task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sc_core import (
    ConfigError,
    DataFailure,
)
from sc_ray.tasks.environment import Environment, EnvironmentMaker, Reply
from sc_ray.tasks.rewards import Reward, Score, score_of


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, and what judges completions of them: a reward function or an environment.

    Raises:
        ConfigError: it has neither of the two, or both; or no turn.
    """

    name: str
    prompts: Sequence[Mapping[str, Any]]
    """Each has a `prompt`, which is text, or `messages`: mappings with a `role` and its `content`.
    For a reward function it also has an `answer`, which is text."""
    reward: Reward | None = None
    environment: EnvironmentMaker | None = None
    max_turns: int = 1  #: completions of one episode
    max_new_tokens: int  #: of a completion, the end-of-text token included
    held_out: Sequence[Mapping[str, Any]] = ()  #: such prompts, for evaluations alone
    characters: str = ""  #: that prompts and answers lack and replies or completions may have

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.environment is None):
            raise ConfigError(
                f"task {self.name} needs a reward function or an environment, and not both"
            )
        if self.max_turns < 1:
            raise ConfigError(f"task.max_turns is {self.max_turns}; it must be at least 1")

    def alphabet(self) -> str:
        """Every character of all texts, sorted: enough for a character tokenizer."""
        texts = [self.characters]
        for item in (*self.prompts, *self.held_out):
            texts += [item.get("prompt", ""), item.get("answer", "")]
            texts += [message["content"] for message in item.get("messages", ())]
        return "".join(sorted(set().union(*texts)))

    def score(self, item: Mapping[str, Any], completion: str) -> float:
        """The reward of a completion, by a reward function that is not async.

        Raises:
            DataFailure: the function answered something else than a `Judgement`.
        """
        assert self.reward is not None
        given = self.reward(prompt_text(item), completion, item["answer"])
        return score_of(given, _place(self, item, completion)).reward

    def episode(self, item: Mapping[str, Any]) -> Environment:
        """The environment of one sibling; a reward function makes one of a single turn."""
        if self.environment is not None:
            return self.environment(item)
        assert self.reward is not None
        return _OneTurn(self.reward, prompt_text(item), item["answer"])

    async def respond(
        self, environment: Environment, item: Mapping[str, Any], completion: str
    ) -> tuple[str | None, Score]:
        """What an environment says to a completion, checked.

        Raises:
            DataFailure: it is no reply, or its reward is none.
        """
        reply = environment.respond(completion)
        if inspect.isawaitable(reply):
            reply = await reply
        if not isinstance(reply, Reply) or not isinstance(reply.text, str | None):
            raise DataFailure(
                f"the environment of task {self.name} answered {reply!r} to {completion!r}; it"
                " must answer with a Reply"
            )
        return reply.text, score_of(reply.reward, _place(self, item, completion))


class _OneTurn:
    """A reward function as an environment."""

    def __init__(self, reward: Reward, prompt: str, answer: str) -> None:
        self._reward, self._prompt, self._answer = reward, prompt, answer

    async def respond(self, completion: str) -> Reply:
        given = self._reward(self._prompt, completion, self._answer)
        return Reply(None, await given if inspect.isawaitable(given) else given)


def prompt_text(item: Mapping[str, Any]) -> str:
    """What a reward function is told of a prompt: its text, or that of its last message."""
    text: str = item["messages"][-1]["content"] if "messages" in item else item["prompt"]
    return text


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


def _place(task: Task, item: Mapping[str, Any], completion: str) -> str:
    return (
        f"the reward of task {task.name} for prompt {prompt_text(item)!r} and completion"
        f" {completion!r}"
    )
