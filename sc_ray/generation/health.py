"""Looks after the engines of a run: probes them, and follows a rule when one dies.

It is a task beside the controller, on the same event loop. An engine is `serving` until probes
fail (`quarantined`, and back once they succeed), or until it dies: then it is `restarting`, or
`out`. None serves before it has confirmed the current weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import anyio

from sc_core import (
    CallTimeout,
    EngineState,
    GenerationFleetHealthConfig,
    ScError,
    WorkerDied,
)
from sc_ray.weight_transport import Engine

logger = logging.getLogger(__name__)
_BACKOFF_S = 1.0  #: before the second restart of an engine; doubles with each further one
_MAX_BACKOFF_S = 60.0


class ProbedEngine(Engine, Protocol):
    async def check(self) -> None:
        """Raises WorkerDied if it is dead; any other error is a failed probe."""

    def end(self) -> None:
        """End its process, if there is one. May block for a moment."""


E = TypeVar("E", bound=ProbedEngine)
E_contra = TypeVar("E_contra", bound=ProbedEngine, contravariant=True)


class Fleet(Protocol[E_contra]):
    """What is done to engines; see `RayFleet`."""

    @property
    def syncing(self) -> bool: ...
    async def join(
        self, engine: E_contra, *, within_s: float, confirmed: Callable[[int | None], object]
    ) -> None: ...
    def quarantine(self, name: str, why: str) -> None: ...
    def cut_off(self, name: str, why: str) -> int: ...
    def look_again(self) -> None: ...


class Run(Protocol):
    """What hears of it; see `SingleController`."""

    def engine_is(
        self, engine: str, now: EngineState, reason: str = "", *, confirmed: int | None = None
    ) -> None: ...
    def fail(self, error: ScError) -> None: ...


class FleetHealth(Generic[E]):
    """Keeps engines serving, for as long as `run` runs. A `FleetKeeper`.

    All of it belongs to one event loop, that of the controller.

    Args:
        make: a new engine of that name, once it is up. It is given the time of `start_s`.
        start_s: from the start of a new engine until it serves; and for one that comes back from
            quarantine.
        in_thread: runs `ProbedEngine.end`.
    """

    def __init__(
        self,
        fleet: Fleet[E],
        engines: Sequence[E],
        settings: GenerationFleetHealthConfig,
        *,
        make: Callable[[str], Awaitable[E]],
        start_s: float,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._make = make
        self._start_s = start_s
        self._in_thread = in_thread
        self._shards = {engine.name: _Shard(engine) for engine in engines}
        self._reports: Run | None = None

    async def run(self, reports: Run) -> None:
        """Look after every engine until cancelled; its errors go to `reports.fail`."""
        self._reports = reports
        async with anyio.create_task_group() as tg:
            for shard in self._shards.values():
                tg.start_soon(self._look_after, shard, name=f"health of {shard.engine.name}")

    # what others see --------------------------------------------------------------------

    def died(self, engine: Engine, reason: str) -> None:
        """Hear that this engine, not one of its name, is dead. Never waits."""
        shard = self._shards.get(engine.name)
        if shard is not None and shard.engine is engine and shard.state in _IN_USE:
            shard.notice(f"{engine.name} died: {reason}")

    def was_put_out(self, engine: str, reason: str) -> None:
        """Hear that this engine failed a sync. Never waits."""
        shard = self._shards.get(engine)
        if shard is not None and shard.state in _IN_USE:
            shard.notice(f"{engine} was put out of service: {reason}")

    def expected(self) -> int:
        return sum(map(self._will_serve, self._shards.values()))

    def expects_more(self) -> bool:
        return self.expected() > 0

    def _will_serve(self, shard: _Shard[E]) -> bool:
        if shard.death is not None:
            return self._restarts and shard.restarts < self._settings.max_restart_attempts_per_shard
        return shard.state in ("quarantined", "restarting")

    @property
    def _restarts(self) -> bool:
        return self._settings.enabled and self._settings.on_dead_shard == "restart"

    # one engine -------------------------------------------------------------------------

    async def _look_after(self, shard: _Shard[E]) -> None:
        interval_s = self._settings.probe_interval_s if self._settings.enabled else math.inf
        while shard.state != "out":
            with anyio.move_on_after(interval_s):
                await shard.noticed.wait()
            if shard.death is None:
                await self._probe(shard)
            if shard.death is not None:
                await self._follow_rule(shard, shard.death)

    async def _probe(self, shard: _Shard[E]) -> None:
        timeout_s = self._settings.probe_timeout_s
        failure = f"no answer within {timeout_s:g} s"
        try:
            with anyio.move_on_after(timeout_s):
                await shard.engine.check()
                failure = ""
        except WorkerDied as death:
            self.died(shard.engine, death.reason)
        except Exception as exc:  # whatever it is, the probe has failed
            failure = f"{type(exc).__name__}: {exc}"
        if shard.death is not None:
            return
        if failure:
            self._failed(shard, failure)
        else:
            await self._passed(shard)

    def _failed(self, shard: _Shard[E], failure: str) -> None:
        shard.passed, shard.failed = 0, shard.failed + 1
        threshold, name = self._settings.unhealthy_threshold, shard.engine.name
        told = f"{shard.failed} probes failed: {failure}"
        if shard.state == "quarantined":
            if shard.failed >= 2 * threshold:
                shard.notice(f"{name} died, as it seems: {told}")
        elif shard.failed >= threshold and not self._fleet.syncing:  # it has its own deadlines
            self._fleet.quarantine(name, f"{name} is quarantined: {told}")
            self._is(shard, "quarantined", told)

    async def _passed(self, shard: _Shard[E]) -> None:
        shard.passed, shard.failed = shard.passed + 1, 0
        if shard.state == "quarantined" and shard.passed >= self._settings.healthy_threshold:
            try:
                await self._join(shard)
            except WorkerDied as death:
                self.died(shard.engine, death.reason)
            except Exception as exc:  # it stays where it is
                shard.passed = 0
                logger.warning("%s stays in quarantine: %s", shard.engine.name, exc)

    async def _join(self, shard: _Shard[E]) -> None:
        def confirmed(version: int | None) -> None:
            self._is(shard, "serving", confirmed=version)

        await self._fleet.join(shard.engine, within_s=self._start_s, confirmed=confirmed)

    # a dead one -------------------------------------------------------------------------

    async def _follow_rule(self, shard: _Shard[E], death: str) -> None:
        name = shard.engine.name
        if self._restarts:
            while shard.restarts < self._settings.max_restart_attempts_per_shard:
                failure = await self._restart(shard, death)
                if failure is None:
                    return
                death = f"{name} could not be restarted: {failure}, after {death}"
        self._fleet.cut_off(name, death)
        self._is(shard, "out", death)
        shard.death = None
        self._fleet.look_again()
        if self._settings.enabled and self._settings.on_dead_shard == "fail":
            self._fail(WorkerDied(name, _reason(name, death)))
        self._count_living()
        await self._in_thread(shard.engine.end)

    async def _restart(self, shard: _Shard[E], death: str) -> str | None:
        """None once a new engine serves; otherwise why it does not."""
        shard.restarts += 1
        number, most = shard.restarts, self._settings.max_restart_attempts_per_shard
        name = shard.engine.name
        self._is(shard, "restarting", f"{death}; restart {number} of {most}")
        shard.death, shard.noticed = None, anyio.Event()
        self._fleet.cut_off(name, death)
        await self._in_thread(shard.engine.end)  # there are no two of one name
        if number > 1:
            await anyio.sleep(min(_BACKOFF_S * 2.0 ** (number - 2), _MAX_BACKOFF_S))
        try:
            with anyio.move_on_after(self._start_s) as in_time:
                shard.engine = await self._make(name)
                await self._join(shard)
                return None
            assert in_time.cancelled_caught
            return str(CallTimeout("its start", self._start_s))
        except Exception as exc:  # the next attempt may do better
            return str(exc)

    def _count_living(self) -> None:
        at_least, shards = self._settings.min_healthy_shards, self._shards.values()
        living = sum(shard.state != "out" for shard in shards)
        if living >= at_least:
            return
        told = "; ".join(shard.reason for shard in shards if shard.state == "out")
        if not living:
            self._fail(WorkerDied("every generation worker", told))
            return
        self._fail(
            WorkerDied(
                "too many generation workers",
                f"{living} of {len(shards)} are left, and"
                f" async_rl.generation_fleet_health.min_healthy_shards is {at_least}: {told}",
            )
        )

    # reports ----------------------------------------------------------------------------

    def _is(
        self, shard: _Shard[E], now: EngineState, reason: str = "", *, confirmed: int | None = None
    ) -> None:
        assert self._reports is not None
        shard.state, shard.reason = now, reason
        shard.passed = 0
        if now == "serving":
            shard.failed = 0
        logger.info("engine %s is %s%s", shard.engine.name, now, f": {reason}" if reason else "")
        self._reports.engine_is(shard.engine.name, now, reason, confirmed=confirmed)

    def _fail(self, error: WorkerDied) -> None:
        assert self._reports is not None
        self._reports.fail(error)


_IN_USE = ("serving", "quarantined")


class _Shard(Generic[E]):
    """One engine by its name, and those that come after it."""

    def __init__(self, engine: E) -> None:
        self.engine = engine
        self.state: EngineState = "serving"
        self.reason = ""  #: for its state
        self.death: str | None = None  #: that the rule was not followed for yet
        self.noticed = anyio.Event()
        self.failed = self.passed = 0  #: probes in a row
        self.restarts = 0

    def notice(self, death: str) -> None:
        if self.death is None:
            self.death = death
            self.noticed.set()


def _reason(name: str, death: str) -> str:
    return death.removeprefix(f"{name} died: ")
