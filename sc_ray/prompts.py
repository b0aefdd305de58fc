"""A task's prompts as a stream that can be left and found again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import anyio.lowlevel
import msgspec

from sc_core import (
    ConfigError,
    EndOfPrompts,
    PulledPrompt,
    RestoreError,
)


class _Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int  #: counted from 0
    index: int  #: prompts of that epoch given so far


class TaskPrompts:
    """A `PromptSource`: every prompt once per epoch, each epoch in an order of its own.

    The order follows from the seed, the epoch and the number of prompts, on any machine. A
    position is `{"epoch": e, "index": i}`: i prompts of epoch e have been given.

    Args:
        shuffle: false keeps the prompts in their given order.
        max_epochs: `EndOfPrompts` after so many; None: never.
        batch: each epoch ends with its last whole batch; what would be left over in its order
            is left out, as by a loader that drops its last batch.

    Raises:
        ConfigError: there are no prompts, too few for one batch, or one holds what msgpack can't.
    """

    def __init__(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        shuffle: bool = True,
        max_epochs: int | None = None,
        batch: int = 1,
    ) -> None:
        if not prompts:
            raise ConfigError("the task has no prompts")
        if len(prompts) < batch:
            raise ConfigError(
                f"the task has {len(prompts)} prompts, too few for one batch of {batch}, and short"
                " batches are dropped"
            )
        self._prompts = [dict(item) for item in prompts]
        self._seed = seed
        self._shuffle = shuffle
        self._max_epochs = max_epochs
        self._per_epoch = len(prompts) // batch * batch
        self._fingerprint = _hash(f"prompts.v1 {seed} {shuffle}", self._prompts)
        self._at = _Position(0, 0)
        self._order = self._order_of(0)

    async def next_prompt(self) -> PulledPrompt:
        """The next prompt and the position after it; a cancelled pull loses nothing."""
        await anyio.lowlevel.checkpoint()
        at = self._at
        if at.index >= self._per_epoch:
            at = _Position(at.epoch + 1, 0)
        if self._max_epochs is not None and at.epoch >= self._max_epochs:
            raise EndOfPrompts(f"{self._max_epochs} epochs of {len(self._prompts)} prompts")
        self._move(_Position(at.epoch, at.index + 1))
        return PulledPrompt(
            payload=dict(self._prompts[self._order[at.index]]),
            position=msgspec.structs.asdict(self._at),
        )

    async def seek(self, position: Any) -> None:
        """Continue after the prompt that came with `position`; None is the very beginning.

        Raises:
            RestoreError: it is no position in these prompts.
        """
        await anyio.lowlevel.checkpoint()
        try:
            at = _Position(0, 0) if position is None else msgspec.convert(position, _Position)
        except msgspec.ValidationError as exc:
            raise RestoreError(f"{position!r} is no position of a prompt: {exc}") from exc
        if at.epoch < 0 or not 0 <= at.index <= len(self._prompts):
            raise RestoreError(
                f"{position!r} is no position in a list of {len(self._prompts)} prompts"
            )
        self._move(at)

    def fingerprint(self) -> str:
        """A hash over prompts, seed and shuffling."""
        return self._fingerprint

    def _move(self, at: _Position) -> None:
        if at.epoch != self._at.epoch:
            self._order = self._order_of(at.epoch)
        self._at = at

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = range(len(self._prompts))
        if not self._shuffle:
            return order
        # Sorting by random(), the one method whose numbers Python promises never to change.
        drawn = random.Random(f"{self._seed} {epoch}")
        keys = [drawn.random() for _ in order]
        return sorted(order, key=keys.__getitem__)


class HeldOutPrompts:
    """`ValidationPrompts`: those of a task that evaluations alone see, in their order."""

    def __init__(self, prompts: Sequence[Mapping[str, Any]]) -> None:
        self._prompts = [dict(item) for item in prompts]
        self._fingerprint = _hash("held out.v1", self._prompts)

    def prompts(self) -> Sequence[Mapping[str, Any]]:
        return self._prompts

    def fingerprint(self) -> str:
        return self._fingerprint


def _hash(kind: str, prompts: Sequence[Mapping[str, Any]]) -> str:
    """Raises ConfigError where a prompt holds what msgpack can't."""
    digest = hashlib.sha256(kind.encode())
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    for number, item in enumerate(prompts):
        try:
            digest.update(encoder.encode(item))
        except TypeError as exc:
            raise ConfigError(f"prompt {number} can't be kept in a checkpoint: {exc}") from exc
    return digest.hexdigest()
