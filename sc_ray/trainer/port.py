"""The controller's way to the trainer worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sc_core import (
    Batch,
)
from sc_ray.workers import answer


class RayTrainer:
    """A `Trainer` on a `TrainerActor`; works on asyncio, uvloop and trio.

    A cancel ends the wait; the worker goes on, and takes the next call after it. Errors are
    those that the worker raised.

    Raises:
        WorkerDied: from every method, once the worker's process is gone.
    """

    def __init__(self, actor: Any, *, name: str = "trainer-0") -> None:
        self.name = name
        self._actor = actor

    async def prepare(self, batch: Batch) -> None:
        await answer(self.name, self._actor.prepare.remote(batch))

    async def begin_step(self, step: int) -> None:
        await answer(self.name, self._actor.begin_step.remote(step))

    async def train_microbatches(self, batch: Batch) -> None:
        await answer(self.name, self._actor.train_microbatches.remote(batch))

    async def finish_step(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = await answer(self.name, self._actor.finish_step.remote())
        return metrics

    async def abandon_step(self) -> None:
        await answer(self.name, self._actor.abandon_step.remote())

    async def save(self, directory: Path) -> None:
        await answer(self.name, self._actor.save.remote(_absolute(directory)))

    async def finalize_save(self) -> None:
        await answer(self.name, self._actor.finalize_save.remote())

    async def load(self, directory: Path) -> None:
        await answer(self.name, self._actor.load.remote(_absolute(directory)))

    async def export_weights(self, path: Path) -> None:
        """Write the current weights into a safetensors file, whole or not at all."""
        await answer(self.name, self._actor.export_weights.remote(_absolute(path)))

    async def ping(self) -> int:
        """Wait until the worker is up; returns the steps its weights have behind them."""
        steps: int = await answer(self.name, self._actor.ping.remote())
        return steps


def _absolute(path: Path) -> Path:
    return path.absolute()  # the worker has a working directory of its own
