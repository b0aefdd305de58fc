"""What every engine takes and gives, whichever library computes it."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from sc_core import (
    ConfigError,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to be sampled.

    Raises:
        ConfigError: it asks for no token, or for a negative temperature.
    """

    prompt_ids: Sequence[int]
    seed: int  #: of this request's own random numbers; see `request_seed`
    max_new_tokens: int  #: the end-of-text token included
    temperature: float = 1.0  #: 0 takes the likeliest token each time

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens = {self.max_new_tokens} must be at least 1")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature = {self.temperature:g} must not be negative")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine sampled for one request, by the weights of one version."""

    token_ids: Sequence[int]  #: with the end-of-text token, if it came
    logprobs: Sequence[float]
    """Of each token under the distribution it was drawn from; 0 at temperature 0."""
    text: str  #: without the end-of-text token
    finish_reason: Literal["eos", "length"]
    weight_version: int  #: that sampled the last token
    replies: Sequence[tuple[int, int]] = ()
    """Ranges of `token_ids`, start and end, that an environment wrote: with log-prob 0. No engine
    makes them; see `episodes`."""


def request_seed(
    run_seed: int, ordinal: int, sibling: int, weight_version: int, turn: int = 0
) -> int:
    """A seed that is the same in every process and differs between any two requests of a run.

    It is 63 bits of BLAKE2b over the numbers; the first turn, 0, is left out.
    """
    numbers = struct.pack(">4q", run_seed, ordinal, sibling, weight_version)
    if turn:
        numbers += struct.pack(">q", turn)
    digest = hashlib.blake2b(numbers, digest_size=8, person=b"sc request").digest()
    return int.from_bytes(digest, "big") >> 1


def rollout_row(
    prompt_ids: Sequence[int],
    completion: Completion,
    *,
    reward: float,
    components: Sequence[float] = (),
) -> dict[str, torch.Tensor]:
    """The columns of one sibling's row, as a trainer reads them.

    With T tokens in prompt and completion together: `input_ids` int64 `[T]`; `completion_mask`
    int64 `[T]`, 1 where a token was sampled, 0 in the prompt and in replies;
    `generation_logprobs` float32 `[T]`, zero elsewhere; `reward` float32 `[1]`; and, where the
    reward has K components, `rewards` float32 `[K]`.
    """
    before = len(prompt_ids)
    token_ids = array("q", prompt_ids)  # arrays become tensors in a tenth of the time of lists
    token_ids.extend(completion.token_ids)
    logprobs = array("f", bytes(4 * before))
    logprobs.extend(completion.logprobs)
    mask = torch.zeros(len(token_ids), dtype=torch.int64)
    mask[before:] = 1
    for start, end in completion.replies:
        mask[before + start : before + end] = 0
    row = {
        "input_ids": torch.frombuffer(token_ids, dtype=torch.int64),
        "completion_mask": mask,
        "generation_logprobs": torch.frombuffer(logprobs, dtype=torch.float32),
        "reward": torch.tensor([reward], dtype=torch.float32),
    }
    if components:
        row["rewards"] = torch.tensor(components, dtype=torch.float32)
    return row
