"""The controller's way to the trainer workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import ray

from sc_core import (
    Batch,
    ScError,
    WorkerDied,
)
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.trainer.seat import PeerFailed
from sc_ray.workers import answer

_GRACE_S = 5.0
"""How long the other workers may take to answer a call that has failed on one of them. Most fail
with it, at once; who does not is waiting for it in an exchange between them."""

logger = logging.getLogger(__name__)


class RayTrainer:
    """A `Trainer` on one or several `TrainerActor`s; works on asyncio, uvloop and trio.

    Every call goes to all of them before any answer is awaited, so that they get the same calls
    in the same order. A cancel ends the wait; the workers go on, and take the next call after it.
    Errors are those that a worker raised. If some of several have answered a failed call and
    others have not, or one has died, they can't act as one any more: every later call raises at
    once, and waits for none of them.

    Args:
        workers: handles by name, in the order of ranks.

    Raises:
        WorkerDied: from every method, once the process of a worker is gone; it names it.
    """

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self._workers = dict(workers)
        self._apart: ScError | None = None  #: why they are not one any more

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers, by rank."""
        return tuple(self._workers)

    async def prepare(self, batch: Batch) -> None:
        await self._all("prepare", lambda worker: worker.prepare.remote(batch))

    async def begin_step(self, step: int) -> None:
        await self._all("begin_step", lambda worker: worker.begin_step.remote(step))

    async def train_microbatches(self, batch: Batch) -> None:
        await self._all(
            "train_microbatches", lambda worker: worker.train_microbatches.remote(batch)
        )

    async def finish_step(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = await self._all(
            "finish_step", lambda worker: worker.finish_step.remote()
        )
        return metrics

    async def abandon_step(self) -> None:
        await self._all("abandon_step", lambda worker: worker.abandon_step.remote())

    async def save(self, directory: Path) -> None:
        await self._all("save", lambda worker: worker.save.remote(_absolute(directory)))

    async def finalize_save(self) -> None:
        await self._all("finalize_save", lambda worker: worker.finalize_save.remote())

    async def load(self, directory: Path) -> None:
        await self._all("load", lambda worker: worker.load.remote(_absolute(directory)))

    async def export_weights(self, path: Path) -> int:
        """Write the current weights into a safetensors file, whole or not at all.

        Returns how many steps they have behind them.
        """
        steps: int = await self._all(
            "export_weights", lambda worker: worker.export_weights.remote(_absolute(path))
        )
        return steps

    async def send_weights(self, plan: SendPlan) -> Sent:
        """Broadcast the current weights to engines; see `TrainerWorker.send_weights`."""
        sent: Sent = await self._all(
            "send_weights", lambda worker: worker.send_weights.remote(plan)
        )
        return sent

    async def ping(self) -> int:
        """Wait until all workers are up; returns the steps their weights have behind them."""
        steps: int = await self._all("ping", lambda worker: worker.ping.remote())
        return steps

    async def _all(self, call: str, send: Callable[[Any], ray.ObjectRef[Any]]) -> Any:
        """What the first worker answers, once all have. The rest of the class, but for names."""
        if self._apart is not None:
            raise self._apart
        refs = {name: send(worker) for name, worker in self._workers.items()}
        answers: dict[str, Any] = {}
        failures: dict[str, Exception] = {}

        async def one(name: str, ref: ray.ObjectRef[Any], waiting: anyio.CancelScope) -> None:
            try:
                answers[name] = await answer(name, ref)
            except Exception as exc:  # chosen from below
                failures[name] = exc
                died = isinstance(exc, WorkerDied)
                give_up = anyio.current_time() + (0 if died else _GRACE_S)
                waiting.deadline = min(waiting.deadline, give_up)

        async with anyio.create_task_group() as tg:
            for name, ref in refs.items():
                tg.start_soon(one, name, ref, tg.cancel_scope)
        if failures:
            name = min(failures, key=lambda name: _rank_of(failures[name]))
            raise self._failed(call, name, failures[name], answered={*answers, *failures})
        return answers[self.names[0]]

    def _failed(self, call: str, name: str, error: Exception, *, answered: set[str]) -> Exception:
        """The error to raise; notes whether the workers can still act as one."""
        if len(self._workers) == 1:
            return error
        silent = [other for other in self._workers if other not in answered]
        if isinstance(error, WorkerDied):
            self._apart = error
        elif silent:
            self._apart = ScError(
                f"{call} failed on {name} ({type(error).__name__}: {error}) while"
                f" {', '.join(silent)} waited for it: they have not answered, and can't act as"
                " one any more"
            )
            logger.error("%s", self._apart)
        error.add_note(f"raised by {name}")
        return error


def _rank_of(error: Exception) -> int:
    """How well an error tells what happened: a death first, echoes of others' errors last."""
    return 0 if isinstance(error, WorkerDied) else 2 if isinstance(error, PeerFailed) else 1


def _absolute(path: Path) -> Path:
    return path.absolute()  # the worker has a working directory of its own
