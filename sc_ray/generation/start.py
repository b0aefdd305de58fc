"""How a generation worker starts: on the driver at first, beside the controller later on."""

from __future__ import annotations

from typing import Any

import msgspec
import ray

from sc_core import (
    in_thread,
)
from sc_ray.cluster import kill
from sc_ray.generation.engine import GenerationSpec
from sc_ray.generation.port import RayEngine
from sc_ray.generation.worker import GenerationActor
from sc_ray.parcels import Parcels
from sc_ray.placement import Places


class GenerationStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that it takes to start a worker; crosses to the controller's process."""

    spec: GenerationSpec
    gpus: float  #: of Ray, for each
    places: Places

    def start(self, name: str) -> Any:
        """The handle of a new `GenerationActor`, which is not up yet. It ends with this process."""
        options = GenerationActor.options(
            scheduling_strategy=self.places.of(name), num_gpus=self.gpus
        )
        return options.remote(self.spec, name)


class EngineMaker:
    """Starts workers from the controller's process. Works on asyncio, uvloop and trio."""

    def __init__(self, start: GenerationStart, parcels: Parcels) -> None:
        self._start = start
        self._parcels = parcels
        self._made: list[Any] = []

    async def make(self, name: str) -> RayEngine:
        """A worker that is up, and has no weights yet.

        A cancel, and an error, end it.

        Raises:
            ConfigError, WorkerDied: it did not come up.
        """
        actor = await self._begin(name)
        engine = RayEngine(actor, name=name)
        try:
            await engine.ready()
            return await self._placed(actor, engine)
        except BaseException:
            engine.end()
            raise

    async def come(self, name: str) -> RayEngine:
        """A worker whose process is up: Ray has found room for it, however long that took.

        A cancel, and an error, end it; also one that still waits for room.

        Raises:
            WorkerDied: it did not come up.
        """
        actor = await self._begin(name)
        engine = RayEngine(actor, name=name)
        try:
            return await self._placed(actor, engine)
        except BaseException:
            engine.end()
            raise

    async def _begin(self, name: str) -> Any:
        actor = await in_thread(self._start.start, name)
        self._made.append(actor)
        return actor

    async def _placed(self, actor: Any, engine: RayEngine) -> RayEngine:
        node = await engine.node_id()
        far = node != ray.get_runtime_context().get_node_id()
        return RayEngine(actor, name=engine.name, parcels=self._parcels if far else None, node=node)

    def close(self) -> None:
        """End all that were made."""
        for actor in self._made:
            kill(actor)
