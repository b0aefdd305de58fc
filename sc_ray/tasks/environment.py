"""Environments: what answers a model, turn by turn, and rewards it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, cast

import msgspec

from sc_ray.tasks.named import load_named
from sc_ray.tasks.rewards import Judgement


class Reply(msgspec.Struct, frozen=True):
    """What an environment has to say to one completion."""

    text: str | None  #: what the model reads next; None: the episode is over
    reward: Judgement = 0.0
    """Of this turn alone; the reward of an episode is the sum over its turns."""


class Environment(Protocol):
    """The other side of one episode; of each sibling its own, and never used again.

    It must follow from the prompt and what it was told, and from nothing else: an attempt that
    failed is made again from the first turn.
    """

    def respond(self, completion: str) -> Reply | Awaitable[Reply]:
        """Answer what the model said in this turn, without its end-of-text token.

        After `task.max_turns` turns the episode is over, whatever the last reply says. As a
        reward function, it may be `async`.
        """


class EnvironmentMaker(Protocol):
    def __call__(self, item: Mapping[str, Any]) -> Environment:
        """The environment of one episode on a prompt, from all keys of its item."""


def load_environment(spec: str) -> EnvironmentMaker:
    """The class or function that `module:Class` names; the module is imported.

    Raises:
        ConfigError: the name is malformed, or the module or the class is not there.
    """
    return cast("EnvironmentMaker", load_named("task.environment", "Class", spec))
