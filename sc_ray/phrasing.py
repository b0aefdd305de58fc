"""How prompts and replies are put to a model: as they are, or in its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sc_core import (
    ConfigError,
    DataFailure,
)
from sc_ray.tasks import Task
from sc_ray.tokenizer import Tokenizer


class Phrasing(msgspec.Struct, frozen=True, kw_only=True):
    """Text to the tokens that a model reads."""

    tokenizer: Tokenizer
    chat: bool = False
    """Whether a `prompt` becomes a user's message in the chat template, a reply another one, and
    the model is asked to speak after each. Otherwise both are read as they are."""
    system_prompt: str | None = None
    """First message of a conversation that has none of the role `system`; None: the template's."""

    def prompt_ids(self, item: Mapping[str, Any]) -> list[int]:
        """The ids of a prompt.

        Raises:
            DataFailure: it can't be encoded.
        """
        if not self.chat:
            if "messages" in item:
                raise DataFailure("a prompt of messages needs a chat template")
            return self.tokenizer.encode(item["prompt"])
        messages = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self.tokenizer.encode_chat(messages)

    def reply_ids(self, text: str, *, after_eos: bool) -> list[int]:
        """The ids of an environment's reply, and of all that comes before the next turn.

        Args:
            after_eos: whether the model ended its turn, rather than being cut off.

        Raises:
            DataFailure: it can't be encoded.
        """
        if not self.chat:
            try:
                return self.tokenizer.encode(text, first=False)
            except DataFailure as exc:
                raise DataFailure(
                    f"the environment's reply can't be put to the model: {exc}; a model from random"
                    " weights learns to read the characters that task.characters names"
                ) from exc
        return self.tokenizer.encode_reply(text, after_eos=after_eos)

    def _shows_system_prompt(self) -> bool:
        item = {"prompt": "1"}
        other = msgspec.structs.replace(self, system_prompt=f"{self.system_prompt}.")
        return self.prompt_ids(item) != other.prompt_ids(item)

    def check(self, task: Task) -> None:
        """Refuse a task that can't be put to the model this way.

        Raises:
            ConfigError: it has conversations and there is no chat template, or it has several
                turns and the template allows for one alone; or nothing takes the system prompt.
        """
        if not self.chat:
            if any("messages" in item for item in (*task.prompts, *task.held_out)):
                raise ConfigError(
                    f"prompts of task {task.name} are messages; they need a pretrained model with a"
                    " chat template, and task.chat_template not false"
                )
            if self.system_prompt is not None:
                raise ConfigError("task.system_prompt is set, and no chat template is used")
            return
        try:
            self.prompt_ids(task.prompts[0])
            if self.system_prompt and not self._shows_system_prompt():
                raise ConfigError(
                    "task.system_prompt is set, and the chat template leaves it out of what the"
                    " model reads"
                )
            if task.max_turns > 1:
                self.reply_ids("1", after_eos=True)
        except DataFailure as exc:
            raise ConfigError(f"task.chat_template: {exc}") from exc
