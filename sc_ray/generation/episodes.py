"""What siblings and their environments have said to each other, turn by turn."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sc_core import (
    DataFailure,
)
from sc_ray.generation import Completion
from sc_ray.phrasing import Phrasing
from sc_ray.tasks import Environment, Score, Task
from sc_ray.tasks.task import prompt_text


class Episode:
    """One sibling's: it grows by a completion and a reply in each turn, until it is over.

    Args:
        room: tokens that the model can read and write, the prompt's included.
    """

    def __init__(
        self,
        task: Task,
        item: Mapping[str, Any],
        phrasing: Phrasing,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        room: int,
    ) -> None:
        self.sibling = sibling
        self.over = False
        self._task, self._item, self._phrasing = task, item, phrasing
        self._prompt_ids, self._room = prompt_ids, room
        self._environment: Environment | None = None
        self._turns = 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._replies: list[tuple[int, int]] = []
        self._text = ""
        self._truncated = False
        self._weight_version = 0
        self._reward = 0.0
        self._components: Counter[str] = Counter()

    @property
    def read_ids(self) -> list[int]:
        """What the model reads before its next turn."""
        return [*self._prompt_ids, *self._token_ids]

    async def hear(self, completion: Completion) -> None:
        """Let the environment answer a completion. The last turn, or want of room, ends it all.

        Raises:
            DataFailure: environment, reward function or reply is at fault.
        """
        self._token_ids += completion.token_ids
        self._logprobs += completion.logprobs
        self._text += completion.text
        self._truncated |= completion.finish_reason == "length"
        self._weight_version = completion.weight_version
        self._turns += 1
        text, score = await self._respond(completion.text)
        self._reward += score.reward
        self._components.update(score.components)
        if text is None or self._turns == self._task.max_turns:
            self.over = True
            return
        reply = self._phrasing.reply_ids(text, after_eos=completion.finish_reason == "eos")
        if len(self.read_ids) + len(reply) + self._task.max_new_tokens > self._room:
            self.over = self._truncated = True
            return
        start = len(self._token_ids)
        self._token_ids += reply
        self._logprobs += [0.0] * len(reply)
        self._replies.append((start, start + len(reply)))
        self._text += text

    def completion(self) -> Completion:
        """All of it as one completion; cut off by length if any turn was."""
        return Completion(
            token_ids=array("q", self._token_ids),  # they travel, and become tensors, faster
            logprobs=array("f", self._logprobs),
            text=self._text,
            finish_reason="length" if self._truncated else "eos",
            weight_version=self._weight_version,
            replies=self._replies,
        )

    def score(self) -> Score:
        """The sum over the turns, also of each component."""
        return Score(self._reward, dict(sorted(self._components.items())))

    async def _respond(self, completion: str) -> tuple[str | None, Score]:
        try:
            if self._environment is None:
                self._environment = self._task.episode(self._item)
            return await self._task.respond(self._environment, self._item, completion)
        except (DataFailure, GeneratorExit):
            raise
        except BaseException as exc:  # it is the user's: its exit would end the loop of all others
            raise DataFailure(
                f"the {_name_of(self._task)} failed on prompt {prompt_text(self._item)!r} and"
                f" completion {completion!r}: {type(exc).__name__}: {exc}"
            ) from exc


async def hear_all(episodes: Sequence[Episode], completions: Sequence[Completion]) -> None:
    """Let the environments of siblings answer, side by side where they are async.

    Raises:
        DataFailure: one is at fault; all have answered by then.
    """
    pairs = zip(episodes, completions, strict=True)
    answers = await asyncio.gather(
        *(episode.hear(completion) for episode, completion in pairs), return_exceptions=True
    )
    for answer in answers:
        if answer is not None:
            raise answer


def _name_of(task: Task) -> str:
    kind = "reward function" if task.environment is None else "environment"
    named = task.reward if task.environment is None else task.environment
    if inspect.isfunction(named) or inspect.isclass(named):
        return f"{kind} {named.__module__}:{named.__qualname__}"
    return f"{kind} {named!r}"
