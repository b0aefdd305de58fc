"""Tasks kept in a file: one JSON object per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sc_core import (
    ConfigError,
)
from sc_ray.tasks.rewards import exact_match
from sc_ray.tasks.task import Reward, Task


def load_jsonl(path: Path, *, reward: Reward = exact_match, max_new_tokens: int = 16) -> Task:
    """A task from lines such as `{"prompt": "2+3=", "answer": "5"}`, in their order.

    Other keys are kept; blank lines are skipped.

    Raises:
        ConfigError: the file is missing, has no prompt, or has a line that is no such object;
            the message names the file and the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as exc:
        raise ConfigError(f"the prompt file {path} can't be read: {exc.strerror}") from exc
    prompts = tuple(
        _read_line(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise ConfigError(
            f'{path} has no prompts; it needs lines such as {{"prompt": "2+3=", "answer": "5"}}'
        )
    return Task(name=path.stem, prompts=prompts, reward=reward, max_new_tokens=max_new_tokens)


def _read_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        item = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{place}: not a line of JSON: {exc}") from exc
    if not isinstance(item, dict):
        raise ConfigError(f"{place}: an object was expected, not {line.strip().decode()}")
    for key in ("prompt", "answer"):
        if key not in item:
            raise ConfigError(f"{place}: the key {key!r} is missing; found {', '.join(item)}")
        if not isinstance(item[key], str):
            raise ConfigError(f"{place}: {key!r} must be text, not {item[key]!r}")
    if not item["prompt"]:
        raise ConfigError(f"{place}: the prompt is empty")
    return item
