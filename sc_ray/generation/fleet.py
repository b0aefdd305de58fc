"""The engines of a run as one: those that get weights and those that get requests are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from sc_core import (
    ConfigError,
)
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.weights import EngineWeightSync, Keeper

logger = logging.getLogger(__name__)


class FleetKeeper(Keeper, Protocol):
    """Who looks after a fleet; see `FleetHealth`."""

    def was_put_out(self, engine: str, reason: str) -> None:
        """An engine lives and failed a sync: it gets neither weights nor requests any more."""

    def expected(self) -> int:
        """How many engines that don't serve now will, as far as one can tell."""


class RayFleet:
    """An `EngineFleet`. Engines may join and leave at any time, from any thread or event loop."""

    def __init__(self, sync: EngineWeightSync[RayEngine], rollouts: RayRollouts) -> None:
        self._sync = sync
        self._rollouts = rollouts
        self._keeper: FleetKeeper | None = None

    def attach(self, keeper: FleetKeeper) -> None:
        """Have somebody hear of every engine that is lost, and be asked whether others come."""
        self._keeper = self._sync.keeper = self._rollouts.keeper = keeper

    @property
    def syncing(self) -> bool:
        """Whether weights are on their way."""
        return self._sync.syncing

    def look_again(self) -> None:
        """Let syncs and rollouts that wait for an engine see that fewer are expected."""
        self._sync.look_again()
        self._rollouts.look_again()

    async def join(
        self,
        engine: RayEngine,
        *,
        within_s: float = 600.0,
        confirmed: Callable[[int | None], object] = lambda version: None,
    ) -> None:
        """Give an engine the weights of the last sync, then requests.

        `confirmed` is called in between, with the version; None before the first sync.

        Raises: as `EngineWeightSync.join`; the engine then gets neither.
        """
        version = await self._sync.join(engine, within_s=within_s)
        try:
            confirmed(version)
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
        self.quarantine(name, f"{name} has left")

    def quarantine(self, name: str, why: str) -> None:
        """As `leave`, whoever else there is."""
        self._rollouts.leave(name, why)
        self._sync.leave(name)

    def put_out(self, engine: str, reason: str) -> int:
        """Send an engine neither weights nor requests; those it has end in a `RolloutError`."""
        left = self.cut_off(engine, f"{engine} was put out of service: {reason}")
        if self._keeper is None:
            return left
        self._keeper.was_put_out(engine, reason)
        return left + self._keeper.expected()

    def cut_off(self, name: str, why: str) -> int:
        """As `put_out`, for the keeper; returns how many are left."""
        self._rollouts.put_out(name, why)
        return self._sync.leave(name)
