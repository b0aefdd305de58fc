"""Weights by broadcast: the trainer's first worker sends them straight into the engines.

It is vLLM's own weight transfer. Here is the controller's part of it; the trainer's is in
`sc_ray.trainer.sender`, the engine's in `sc_ray.generation.vllm_engine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sc_core import (
    WeightSyncError,
    WorkerDied,
)
from sc_ray.weight_transport import Each, Engine, WeightFiles, WeightsMoved

NOT_SENT = -1


class SendPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One broadcast; it crosses to the trainer workers."""

    version: int
    group: int  #: a number: with another one than the last, trainer and engines meet anew
    engines: Mapping[str, Any]  #: handles of generation workers, by name
    far: bool  #: whether some are on another node than the trainer
    deadline_s: float | None  #: of all calls to engines together


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a broadcast: all engines confirmed it, or some are to blame."""

    steps: int  #: that the weights have behind them
    confirmed: Mapping[str, int] = {}  #: versions
    failed: Mapping[str, str] = {}  #: engines that did something wrong, and what
    dead: Mapping[str, str] = {}

    async def of(self, engine: Engine) -> int:
        """The version that an engine confirmed; `NOT_SENT` if others are to blame that it did not.

        Raises:
            WorkerDied: it is dead.
            WeightSyncError: it failed.
        """
        name = engine.name
        if name in self.dead:
            raise WorkerDied(name, self.dead[name])
        if name in self.failed:
            raise WeightSyncError(self.failed[name])
        return self.confirmed.get(name, NOT_SENT)


class BroadcastTrainer(Protocol):
    async def export_weights(self, path: Path) -> int:
        """Write the current weights into a file; returns the steps that they have behind them."""

    async def send_weights(self, plan: SendPlan) -> Sent:
        """Send the current weights to these engines, which are paused."""


class BroadcastEngine(Engine, Protocol):
    @property
    def handle(self) -> Any:
        """By which the trainer's process calls it."""

    @property
    def far(self) -> bool:
        """Whether it is on another node than the trainer."""


class VllmTransport:
    """A `Transport` by vLLM's weight transfer. It needs GPUs, and engines that are vLLM's.

    Trainer and engines form a group, at the first broadcast and whenever other engines take part
    than before, or a broadcast failed. If an engine dies, it is made anew without it, and the
    broadcast repeated. If it died within one, the others may hang in that, or have weights that
    nobody knows: then they are dead too, by their own word or at the deadline.

    An engine that joins between two broadcasts gets a file, which the trainer writes for it when
    it comes: a group made anew for it would stop all the others. The trainer may have made a step
    since the broadcast; then the engine waits for the next one.

    Args:
        send_s: how long all calls to the engines in one broadcast may take together.
    """

    def __init__(
        self, trainer: BroadcastTrainer, files: WeightFiles, *, send_s: float | None = None
    ) -> None:
        self._trainer = trainer
        self._files = files
        self._send_s = send_s
        self._group: tuple[BroadcastEngine, ...] | None = None  #: None: the last broadcast failed
        self._number = 0
        self._steps: int | None = None  #: that the weights of the last broadcast have behind them
        self._copy: Path | None = None  #: of those weights, if one was needed
        self._copies = itertools.count()

    async def send(
        self, version: int, engines: tuple[BroadcastEngine, ...], each: Each[BroadcastEngine]
    ) -> dict[str, int]:
        self._copy = None
        while engines:
            sent = await self._broadcast(version, engines)
            answers = await each(f"broadcast of version {version}", sent.of)
            if NOT_SENT not in answers.values():
                return answers
            if not (sent.dead or sent.failed):
                raise WeightSyncError(f"version {version} was not sent, and nobody said why")
            engines = tuple(engine for engine in engines if engine.name in answers)
        path = self._files.path(version, next(self._copies))
        self._steps = await self._trainer.export_weights(path)
        self._copy = path
        return {}

    async def _broadcast(self, version: int, engines: tuple[BroadcastEngine, ...]) -> Sent:
        if engines != self._group:
            self._number += 1
        self._group = None
        sent = await self._trainer.send_weights(
            SendPlan(
                version=version,
                group=self._number,
                engines={engine.name: engine.handle for engine in engines},
                far=any(engine.far for engine in engines),
                deadline_s=self._send_s,
            )
        )
        self._steps = sent.steps
        if len(sent.confirmed) == len(engines):
            self._group = engines
        return sent

    async def give(self, engine: BroadcastEngine, version: int) -> int:
        path = self._copy
        if path is None:
            wanted = self._steps
            path = self._files.path(version, next(self._copies))
            steps = await self._trainer.export_weights(path)
            if not wanted == steps == self._steps:
                raise WeightsMoved(f"the trainer has no weights of version {version} any more")
            self._copy = path
        return await engine.load_weights(path, version)

    async def confirmed(self) -> None:
        await self._files.keep_only(self._copy)

    def close(self) -> None:
        self._files.close()
