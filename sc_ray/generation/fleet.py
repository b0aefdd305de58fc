"""The engines of a run as one: those that get weights and those that get requests are the same."""

from __future__ import annotations

import logging

from sc_core import (
    ConfigError,
)
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.weights import FileWeightSync

logger = logging.getLogger(__name__)


class RayFleet:
    """An `EngineFleet`. Engines may join and leave at any time, from any thread or event loop."""

    def __init__(self, sync: FileWeightSync, rollouts: RayRollouts) -> None:
        self._sync = sync
        self._rollouts = rollouts

    async def join(self, engine: RayEngine, *, within_s: float = 600.0) -> None:
        """Give an engine the weights of the last sync, then requests.

        Raises: as `FileWeightSync.join`; the engine then gets neither.
        """
        await self._sync.join(engine, within_s=within_s)
        try:
            self._rollouts.join(engine)
        except ConfigError:
            self._sync.leave(engine.name)
            raise
        logger.info("engine %s has joined", engine.name)

    def leave(self, name: str) -> None:
        """Send an engine no more weights, nor requests. Those that it has go on.

        Raises:
            ConfigError: there is none of that name, or it is the last one.
        """
        if name not in self._sync.engines or self._sync.engines == (name,):
            raise ConfigError(f"engine {name} can't leave; there are {self._sync.engines}")
        self._rollouts.leave(name)
        self._sync.leave(name)

    def put_out(self, engine: str, reason: str) -> int:
        self._rollouts.put_out(engine, reason)
        return self._sync.leave(engine)
