"""Looks after the engines of a run: probes them, and follows a rule when one dies.

It is a task beside the controller, on the same event loop. An engine is `serving` until probes
fail (`quarantined`, and back once they succeed), or until it dies: then it is `restarting`, or
`out`. None serves before it has confirmed the current weights.

A run may have engines that it can do without: each is `awaited` until there is room for it, and
again when its node is lost.
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
_NO_ROOM = "it joins once there is room for it"


class ProbedEngine(Engine, Protocol):
    async def check(self) -> None:
        """Raises WorkerDied if it is dead; any other error is a failed probe."""

    async def ready(self) -> None:
        """Return once it can take weights. Raises if it never will."""

    async def node_is_gone(self) -> bool:
        """Whether it has died with the node that it was on, as far as one can tell."""

    def end(self) -> None:
        """End its process, if there is one. May block for a moment."""


E = TypeVar("E", bound=ProbedEngine)
E_contra = TypeVar("E_contra", bound=ProbedEngine, contravariant=True)


class Fleet(Protocol[E_contra]):
    """What is done to engines; see `RayFleet`."""

    @property
    def syncing(self) -> bool: ...
    async def join(
        self,
        engine: E_contra,
        *,
        within_s: float,
        confirmed: Callable[[int | None], object],
        overtaken: Callable[[int], object],
    ) -> None: ...
    def quarantine(self, name: str, why: str) -> None: ...
    def cut_off(self, name: str, why: str) -> int: ...
    def look_again(self) -> None: ...
    def stop_waiting(self) -> None: ...


class Run(Protocol):
    """What hears of it; see `SingleController`."""

    def engine_is(
        self, engine: str, now: EngineState, reason: str = "", *, confirmed: int | None = None
    ) -> None: ...
    def fail(self, error: ScError) -> None: ...
    async def stop_requested(self) -> str: ...


class FleetHealth(Generic[E]):
    """Keeps engines serving, for as long as `run` runs. A `FleetKeeper`.

    All of it belongs to one event loop, that of the controller.

    Args:
        make: a new engine of that name, once it is up. It is given the time of `start_s`.
        optional: names of engines that the run can do without, and that need not come.
        come: the process of a new one of them, once there is room for it. It is given all time.
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
        optional: Sequence[str] = (),
        come: Callable[[str], Awaitable[E]] | None = None,
        start_s: float,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._make = make
        self._come = come or make
        self._start_s = start_s
        self._in_thread = in_thread
        self._shards = {engine.name: _Shard(engine.name, engine) for engine in engines}
        self._shards |= {name: _Shard[E](name) for name in optional}
        self._reports: Run | None = None

    async def run(self, reports: Run) -> None:
        """Look after every engine until cancelled; its errors go to `reports.fail`."""
        self._reports = reports
        async with anyio.create_task_group() as tg:
            for shard in self._shards.values():
                tg.start_soon(self._look_after, shard, name=f"health of {shard.name}")
            await reports.stop_requested()
            self._fleet.stop_waiting()

    # what others see --------------------------------------------------------------------

    def died(self, engine: Engine, reason: str) -> None:
        """Hear that this engine, not one of its name, is dead. Never waits."""
        shard = self._shards.get(engine.name)
        if shard is not None and shard.engine is engine and shard.in_use:
            shard.notice(f"{engine.name} died: {reason}")

    def was_put_out(self, engine: str, reason: str) -> None:
        """Hear that this engine failed a sync. Never waits."""
        shard = self._shards.get(engine)
        if shard is not None and shard.in_use:
            shard.notice(f"{engine} was put out of service: {reason}")

    def has_left(self, engine: str) -> None:
        """Hear that this engine was taken out, and belongs to others now. Never waits."""
        shard = self._shards.get(engine)
        if shard is not None and shard.in_use:
            shard.state, shard.death = "out", None
            shard.noticed.set()
            if self._reports is not None:
                self._is(shard, "out", "it has left")

    def expected(self) -> int:
        return sum(map(self._will_serve, self._shards.values()))

    def expects_more(self) -> bool:
        return self.expected() > 0

    def _will_serve(self, shard: _Shard[E]) -> bool:
        if shard.optional:
            return shard.state == "quarantined" and shard.death is None
        if shard.death is not None:
            return self._restarts and shard.restarts < self._settings.max_restart_attempts_per_shard
        return shard.state in ("quarantined", "restarting")

    @property
    def _restarts(self) -> bool:
        return self._settings.enabled and self._settings.on_dead_shard == "restart"

    # one engine -------------------------------------------------------------------------

    async def _look_after(self, shard: _Shard[E]) -> None:
        interval_s = self._settings.probe_interval_s if self._settings.enabled else math.inf
        if shard.optional:
            await self._follow_rule(shard, _NO_ROOM)
        while shard.state != "out":
            with anyio.move_on_after(interval_s):
                await shard.noticed.wait()
            if shard.death is not None:
                await self._follow_rule(shard, shard.death)
            else:
                await self._probe(shard, shard.alive)

    async def _probe(self, shard: _Shard[E], engine: E) -> None:
        timeout_s = self._settings.probe_timeout_s
        failure = f"no answer within {timeout_s:g} s"
        try:
            with anyio.move_on_after(timeout_s):
                await engine.check()
                failure = ""
        except WorkerDied as death:
            self.died(engine, death.reason)
        except Exception as exc:  # whatever it is, the probe has failed
            failure = f"{type(exc).__name__}: {exc}"
        if shard.death is not None or not shard.in_use:
            return
        if failure:
            self._failed(shard, failure)
        else:
            await self._passed(shard)

    def _failed(self, shard: _Shard[E], failure: str) -> None:
        if shard.state == "serving" and self._fleet.syncing:
            shard.failed = 0  # it has its own deadlines, and an engine that loads is busy
            return
        shard.passed, shard.failed = 0, shard.failed + 1
        threshold, name = self._settings.unhealthy_threshold, shard.name
        told = f"{shard.failed} probes failed: {failure}"
        if shard.state == "quarantined":
            if shard.failed >= 2 * threshold:
                shard.notice(f"{name} died, as it seems: {told}")
        elif shard.failed >= threshold:
            self._fleet.quarantine(name, f"{name} is quarantined: {told}")
            self._is(shard, "quarantined", told)

    async def _passed(self, shard: _Shard[E]) -> None:
        shard.passed, shard.failed = shard.passed + 1, 0
        if shard.state == "quarantined" and shard.passed >= self._settings.healthy_threshold:
            try:
                await self._join(shard)
            except WorkerDied as death:
                self.died(shard.alive, death.reason)
            except Exception as exc:  # it stays where it is
                shard.passed = 0
                logger.warning("%s stays in quarantine: %s", shard.name, exc)

    async def _join(self, shard: _Shard[E]) -> None:
        def confirmed(version: int | None) -> None:
            self._is(shard, "serving", confirmed=version)

        def overtaken(version: int) -> None:
            if shard.state == "quarantined":  # requests that it still has may end by these weights
                self._is(shard, "quarantined", shard.reason, confirmed=version)

        await self._fleet.join(
            shard.alive, within_s=self._start_s, confirmed=confirmed, overtaken=overtaken
        )

    # a dead one -------------------------------------------------------------------------

    async def _follow_rule(self, shard: _Shard[E], death: str) -> None:
        name, settings = shard.name, self._settings
        what = "started" if death == _NO_ROOM else "restarted"
        while (number := await self._next_attempt(shard, death)) is not None:
            if shard.state == "out":
                return  # it has left meanwhile
            failure = await self._start_anew(shard, death, number)
            if failure is None:
                return
            after = f", after {death}" if number else ""  # a node may be lost any number of times
            death = f"{name} could not be {what}: {failure}{after}"
        if shard.state == "out":
            return
        self._fleet.cut_off(name, death)
        self._is(shard, "out", death)
        shard.death = None
        self._fleet.look_again()
        if settings.enabled and settings.on_dead_shard == "fail" and not shard.optional:
            self._fail(WorkerDied(name, _reason(name, death)))
        self._count_living()
        await self._end(shard)

    async def _next_attempt(self, shard: _Shard[E], death: str) -> int | None:
        """The number of the attempt at a new engine; 0: it counts as none; None: there is none."""
        if shard.optional and (death == _NO_ROOM or await shard.lost_its_node()):
            return 0
        if not self._restarts or shard.restarts >= self._settings.max_restart_attempts_per_shard:
            return None
        shard.restarts += 1
        return shard.restarts

    async def _start_anew(self, shard: _Shard[E], death: str, number: int) -> str | None:
        """None once a new engine serves; otherwise why it does not."""
        name, most = shard.name, self._settings.max_restart_attempts_per_shard
        told = f"{death}; restart {number} of {most}" if number else death
        served = shard.in_use
        self._is(shard, "awaited" if shard.optional else "restarting", told)
        shard.death, shard.noticed = None, anyio.Event()
        self._fleet.cut_off(name, death)
        if shard.optional and served:  # it may never come back
            self._fleet.look_again()
            self._count_living()
        await self._end(shard)  # there are no two of one name
        if number > 1:
            await anyio.sleep(min(_BACKOFF_S * 2.0 ** (number - 2), _MAX_BACKOFF_S))
        try:
            if shard.optional:
                shard.engine = await self._come(name)
            with anyio.move_on_after(self._start_s) as in_time:
                if shard.optional:
                    await shard.alive.ready()
                else:
                    shard.engine = await self._make(name)
                await self._join(shard)
                return None
            assert in_time.cancelled_caught
            return str(CallTimeout("its start", self._start_s))
        except Exception as exc:  # the next attempt may do better
            return str(exc)

    async def _end(self, shard: _Shard[E]) -> None:
        engine, shard.engine = shard.engine, None
        if engine is not None:
            await self._in_thread(engine.end)

    def _count_living(self) -> None:
        at_least = self._settings.min_healthy_shards
        shards = [shard for shard in self._shards.values() if shard.reason != _NO_ROOM]
        gone = [shard for shard in shards if shard.state in ("out", "awaited")]
        living = len(shards) - len(gone)
        if living >= at_least:
            return
        told = "; ".join(shard.reason for shard in gone)
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
        logger.info("engine %s is %s%s", shard.name, now, f": {reason}" if reason else "")
        self._reports.engine_is(shard.name, now, reason, confirmed=confirmed)

    def _fail(self, error: WorkerDied) -> None:
        assert self._reports is not None
        self._reports.fail(error)


class _Shard(Generic[E]):
    """One engine by its name, and those that come after it."""

    def __init__(self, name: str, engine: E | None = None) -> None:
        self.name = name
        self.engine = engine  #: None: there is none, or it was ended
        self.optional = engine is None
        self.state: EngineState = "awaited" if self.optional else "serving"
        self.reason = _NO_ROOM if self.optional else ""  #: for its state
        self.death: str | None = None  #: that the rule was not followed for yet
        self.noticed = anyio.Event()
        self.failed = self.passed = 0  #: probes in a row
        self.restarts = 0

    @property
    def alive(self) -> E:
        """The engine, where there is one."""
        assert self.engine is not None
        return self.engine

    async def lost_its_node(self) -> bool:
        """Whether the engine went down with its node."""
        try:
            return self.engine is not None and await self.engine.node_is_gone()
        except Exception as exc:  # whatever it is, one can't tell
            logger.warning("the node of %s can't be looked up: %s", self.name, exc)
            return False

    @property
    def in_use(self) -> bool:
        return self.state in ("serving", "quarantined")

    def notice(self, death: str) -> None:
        if self.death is None:
            self.death = death
            self.noticed.set()


def _reason(name: str, death: str) -> str:
    return death.removeprefix(f"{name} died: ")
