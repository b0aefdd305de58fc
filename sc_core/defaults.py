"""Ports for whoever needs nothing special: a list of prompts, advantages in a group, no engines."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio.lowlevel
import msgspec

from sc_core.errors import ConfigError, EndOfPrompts, RestoreError
from sc_core.ports import Columns, EstimatorScope
from sc_core.records import PulledPrompt


class PromptList:
    """A `PromptSource` over prompts in memory. A position is how many were given.

    Each payload is given as it will be after a resume: a tuple has become a list.

    Args:
        prompts: payloads, each what msgpack can hold.
        epochs: passes over them, then `EndOfPrompts`; None: without end.
        seed: shuffles each epoch in an order of its own, the same on every machine; None: they
            come as they are.

    Raises:
        ConfigError: there are no prompts, or one holds what msgpack can't.
    """

    def __init__(
        self, prompts: Iterable[Any], *, epochs: int | None = None, seed: int | None = None
    ) -> None:
        digest = hashlib.sha256(f"prompts.v1 {seed}".encode())
        self._prompts: list[Any] = []
        for number, prompt in enumerate(prompts):
            try:
                encoded = msgspec.msgpack.encode(prompt)
                self._prompts.append(msgspec.msgpack.decode(encoded))
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise ConfigError(f"prompt {number} can't be kept in a bundle: {exc}") from exc
            digest.update(encoded)
        if not self._prompts:
            raise ConfigError("there are no prompts")
        self._fingerprint = digest.hexdigest()[:16]
        self._epochs = epochs
        self._seed = seed
        self._given = 0
        self._epoch = -1  #: that `_order` is of
        self._order: Sequence[int] = ()

    def __repr__(self) -> str:
        return f"<PromptList of {len(self._prompts)} prompts, {self._given} given>"

    async def next_prompt(self) -> PulledPrompt:
        """The next prompt and the position after it; a cancelled pull loses nothing.

        Raises:
            EndOfPrompts: all epochs are over.
        """
        await anyio.lowlevel.checkpoint()
        epoch, at = divmod(self._given, len(self._prompts))
        if self._epochs is not None and epoch >= self._epochs:
            raise EndOfPrompts(f"{self._epochs} epochs of {len(self._prompts)} prompts are over")
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        self._given += 1
        return PulledPrompt(self._prompts[self._order[at]], self._given)

    async def seek(self, position: Any) -> None:
        """Continue after `position` prompts; None is the beginning.

        Raises:
            RestoreError: it is no position of such a list.
        """
        await anyio.lowlevel.checkpoint()
        given = 0 if position is None else position
        if type(given) is not int or given < 0:
            raise RestoreError(f"{position!r} is no position in a list of prompts")
        self._given = given

    def fingerprint(self) -> str:
        """Changes with any prompt, their order, and the seed; not with `epochs`."""
        return self._fingerprint

    def _order_of(self, epoch: int) -> Sequence[int]:
        places = range(len(self._prompts))
        if self._seed is None:
            return places
        return random.Random(f"{self._seed} {epoch}").sample(places, len(places))


class GroupAdvantages:
    """An `AdvantageEstimator`: how much better a sibling did than its group, in plain Python.

    Reads the column `reward`, one number per row, so a `Sample` needs it among its `fields`.
    Writes the column `advantage`, one float per row: the reward less the mean of the group's rows
    that are not masked, and with `normalize` divided by their standard deviation (of a sample,
    n - 1). It is 0 where all rewards are the same, and for a masked row.
    """

    select_fields: Sequence[str] = ("reward", "masked")  #: what it reads
    scope: EstimatorScope = "group"  #: each group on its own
    heavy = False  #: quick enough for the event loop

    def __init__(self, *, normalize: bool = True) -> None:
        self.normalize = normalize

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        """The column `advantage` of groups whose rows stand one group after another."""
        advantages: list[float] = []
        for size in group_sizes:
            rows = slice(len(advantages), len(advantages) + size)
            advantages += self._of_group(columns["reward"][rows], columns["masked"][rows])
        return {"advantage": advantages}

    def _of_group(self, rewards: Sequence[float], masked: Sequence[bool]) -> list[float]:
        trained = [r for r, m in zip(rewards, masked, strict=True) if not m]
        alike = all(reward == trained[0] for reward in trained)  # whatever rounding makes of them
        if alike or len(trained) == 1:  # NaN is not even like itself
            return [0.0] * len(rewards)
        mean = math.fsum(trained) / len(trained)
        spread, rows = 1.0, 1.0
        if self.normalize:  # unlike the sum of squares, hypot neither underflows nor overflows
            spread, rows = math.hypot(*(r - mean for r in trained)), math.sqrt(len(trained) - 1)
        return [
            0.0 if m else (r - mean) / spread * rows for r, m in zip(rewards, masked, strict=True)
        ]


class SharedWeights:
    """A `WeightSync` for a process that generates with the very weights that it trains.

    Nothing moves: a rollout that is under way while a step is finished sees the new weights from
    then on. With `async_rl.weight_sync_mode: drain` no rollout is under way by the time the
    version counts as served.
    """

    async def pause(self) -> None:
        """Nothing to hold."""
        await anyio.lowlevel.checkpoint()

    async def transfer(self, version: int) -> Mapping[str, int]:
        """The one engine, named `trainer`, has that version."""
        await anyio.lowlevel.checkpoint()
        return {"trainer": version}

    async def resume(self) -> None:
        """Nothing was held."""
        await anyio.lowlevel.checkpoint()
