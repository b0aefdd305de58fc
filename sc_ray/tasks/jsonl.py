"""Tasks kept in a file: one JSON object per line."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sc_core import (
    ConfigError,
)
from sc_ray.tasks.environment import EnvironmentMaker
from sc_ray.tasks.rewards import Reward, exact_match
from sc_ray.tasks.task import Task


def load_jsonl(
    path: Path,
    *,
    reward: Reward | None = None,
    environment: EnvironmentMaker | None = None,
    max_new_tokens: int = 16,
) -> Task:
    """A task from lines such as `{"prompt": "2+3=", "answer": "5"}`, in their order.

    In place of `prompt`, a line may have `messages`: a list of objects with `role` and `content`.
    With an environment no `answer` is needed. Other keys are kept; blank lines are skipped.
    Without a reward and an environment, completions are judged by `exact_match`.

    Raises:
        ConfigError: the file is missing, has no prompt, or has a line that is no such object;
            the message names the file and the line.
    """
    return Task(
        name=path.stem,
        prompts=read_prompts(path, answers=environment is None),
        reward=reward if reward or environment else exact_match,
        environment=environment,
        max_new_tokens=max_new_tokens,
    )


def read_prompts(path: Path, *, answers: bool = True) -> tuple[Mapping[str, Any], ...]:
    """The lines alone; `answers` says whether each must have one. Raises as `load_jsonl`."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as exc:
        raise ConfigError(f"the prompt file {path} can't be read: {exc.strerror}") from exc
    prompts = tuple(
        _read_line(line, f"{path}:{number}", answers)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise ConfigError(
            f'{path} has no prompts; it needs lines such as {{"prompt": "2+3=", "answer": "5"}}'
        )
    return prompts


def _read_line(line: bytes, place: str, answers: bool) -> dict[str, Any]:
    try:
        item = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{place}: not a line of JSON: {exc}") from exc
    if not isinstance(item, dict):
        raise ConfigError(f"{place}: an object was expected, not {line.strip().decode()}")
    if "messages" in item:
        _check_messages(item, place)
    asked_for = () if "messages" in item else ("prompt",)
    for key in (*asked_for, "answer") if answers else asked_for:
        if key not in item:
            raise ConfigError(f"{place}: the key {key!r} is missing; found {', '.join(item)}")
    for key in ("prompt", "answer"):
        if key in item and not isinstance(item[key], str):
            raise ConfigError(f"{place}: {key!r} must be text, not {item[key]!r}")
    if item.get("prompt") == "":
        raise ConfigError(f"{place}: the prompt is empty")
    return item


def _check_messages(item: Mapping[str, Any], place: str) -> None:
    if "prompt" in item:
        raise ConfigError(f"{place}: it has both 'prompt' and 'messages', and may have one of them")
    messages = item["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: 'messages' must be a list of messages, not {messages!r}")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ConfigError(
                f"{place}: a message has a 'role' and a 'content', both text; found {message!r}"
            )
