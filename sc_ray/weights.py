"""Weights from the trainer to the engines: who takes part, pauses, confirms, joins and dies."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import anyio

from sc_core import (
    CallCancelled,
    CallTimeout,
    ConfigError,
    EnginesFailed,
    WeightSyncError,
    WorkerDied,
)
from sc_ray.bridge import await_future
from sc_ray.weight_transport import (
    E,
    Engine,
    FileTransport,
    Transport,
    WeightFiles,
    WeightsMoved,
    WeightSource,
)

R = TypeVar("R")
logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """Who looks after engines: it hears of their deaths, and knows whether one will come (back)."""

    def died(self, engine: Engine, reason: str) -> None: ...

    def expects_more(self) -> bool: ...


class Nobody:
    """Looks after no engine: none comes in place of one that died."""

    def died(self, engine: Engine, reason: str) -> None:
        pass

    def expects_more(self) -> bool:
        return False


class EngineWeightSync(Generic[E]):
    """A `WeightSync` over engines, whichever way the bytes go.

    Engines may join and leave at any time, from any thread or event loop. While there are none
    and the `keeper` expects one, a transfer waits for the first that joins.

    Args:
        transport: closed with this.
        engine_s: how long one engine may take for one call before it counts as failed; None:
            for ever, so that whoever calls this has to give up on all of them.

    Raises:
        ConfigError: there are no engines.
    """

    def __init__(
        self, transport: Transport[E], engines: Sequence[E], *, engine_s: float | None = None
    ) -> None:
        if not engines:
            transport.close()
            raise ConfigError("weights need at least one engine to go to")
        self._transport = transport
        self._engine_s = engine_s
        self._lock = threading.Lock()  #: over what follows; never held over an await
        self._engines = tuple(engines)
        self._version: int | None = None  #: of the last transfer
        self._syncing = False
        self._awaits_one = False  #: the sync under way has weights, and no engine to give them to
        self._news: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Of the next change of all this; then there is another one."""
        self._closed = False
        self.keeper: Keeper = Nobody()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of those that take part in syncs."""
        return tuple(engine.name for engine in self._engines)

    @property
    def syncing(self) -> bool:
        """Whether a sync is under way: between its pause and the end of its resume."""
        return self._syncing

    def look_again(self) -> None:
        """Let those who wait see that the keeper expects others than before."""
        with self._lock:
            news, self._news = self._news, concurrent.futures.Future()
        news.set_result(None)

    async def join(self, engine: E, *, within_s: float) -> int | None:
        """Let an engine take part in syncs, as soon as it has the weights of the last one.

        Returns the version that it confirmed; before the first sync there is none to give. A
        sync under way is waited for, unless it is that sync which waits for an engine; and so is
        the next one, if nobody has the weights of the last one any more.

        Raises:
            ConfigError: there is an engine of that name.
            CallTimeout: it did not come to that; the engine takes no part.
            WeightSyncError: it did not confirm the weights, or there will be no more syncs.
            WorkerDied: the engine's process is gone.
        """
        with anyio.move_on_after(within_s):
            while True:
                with self._lock:
                    if self._closed:
                        raise WeightSyncError(f"{engine.name} can't join: the run is over")
                    if engine.name in self.engines:
                        raise ConfigError(f"there is an engine {engine.name} already")
                    version, news, may_join = self._version, self._news, self._may_join()
                    if may_join and version is None:
                        self._engines += (engine,)
                        return None
                if not may_join:
                    await await_future(news)
                    continue
                assert version is not None
                failure: Exception | None = None
                try:
                    loaded = await self._transport.give(engine, version)
                    problem = f"it has version {loaded}" if loaded != version else ""
                except WorkerDied:
                    raise
                except WeightsMoved:
                    await await_future(news)
                    continue
                except Exception as exc:  # the file may have gone meanwhile
                    failure, problem = exc, str(exc)
                with self._lock:
                    if self._version != version or not self._may_join():
                        continue  # there are newer weights, or will be soon
                    if problem:
                        raise WeightSyncError(
                            f"{engine.name} can't join: it did not confirm version {version}:"
                            f" {problem}"
                        ) from failure
                    if engine.name in self.engines or self._closed:
                        continue
                    self._engines += (engine,)
                self.look_again()
                return version
        raise CallTimeout(f"join of engine {engine.name}", within_s)

    def _may_join(self) -> bool:
        return not self._syncing or self._awaits_one

    def leave(self, name: str) -> int:
        """Leave an engine out from now on; returns how many are left."""
        with self._lock:
            self._engines = tuple(each for each in self._engines if each.name != name)
            return len(self._engines)

    async def pause(self) -> None:
        """Every engine that lives holds its requests, or this raises; some may then be paused."""
        self._sync_begins()
        await self._each("pause", lambda engine: engine.pause())

    async def transfer(self, version: int) -> Mapping[str, int]:
        """Have the trainer give its weights to every engine that lives.

        Raises:
            EnginesFailed: these engines failed; the others have confirmed.
            WorkerDied: no engine is left, and none is expected.
        """
        self._sync_begins()
        confirmed = await self._transport.send(version, self._engines, self._each)
        with self._lock:
            self._version = version
        if not confirmed:
            confirmed = await self._of_the_first(version)
        if all(at == version for at in confirmed.values()):
            await self._transport.confirmed()
        return confirmed

    async def resume(self) -> None:
        """Every engine that lives goes on, also when another one fails to; then this raises."""
        await self._each("resume", lambda engine: engine.resume())
        self._sync_ends()

    def close(self) -> None:
        """Remove the files. Blocks; may be called again. Who waits to join learns of it."""
        self._closed = True
        self._sync_ends()  # wakes those who wait
        self._transport.close()

    def _sync_begins(self) -> None:
        with self._lock:
            self._syncing = True

    def _sync_ends(self) -> None:
        self._syncing = False
        self.look_again()

    async def _of_the_first(self, version: int) -> dict[str, int]:
        """Wait for an engine to join with the weights of the sync under way."""
        self._awaits_one = True
        self.look_again()  # who waits to join may do so now
        try:
            while True:
                news = self._news
                if self._engines:
                    return dict.fromkeys(self.engines, version)
                if not self.keeper.expects_more():
                    raise WorkerDied("every engine", "none is left to take the weights")
                await await_future(news)
        finally:
            self._awaits_one = False

    async def _each(self, what: str, work: Callable[[E], Awaitable[R]]) -> dict[str, R]:
        """Call all engines at once; one that fails doesn't stop the others.

        One that died is left out from now on, as it is by whoever sends it requests.
        """
        engines = self._engines
        results: dict[str, R] = {}
        failures: dict[str, Exception] = {}
        deaths: dict[str, WorkerDied] = {}

        async def one(engine: E) -> None:
            deadline_s = math.inf if self._engine_s is None else self._engine_s
            try:
                with anyio.move_on_after(deadline_s):
                    results[engine.name] = await work(engine)
                    return
                failures[engine.name] = CallTimeout(what, deadline_s)
            except WorkerDied as exc:
                deaths[engine.name] = exc
            except Exception as exc:  # raised below, with the others
                failures[engine.name] = exc

        async with anyio.create_task_group() as tg:
            for engine in engines:
                tg.start_soon(one, engine)
        for name in {each.name for each in engines} - {*results, *failures, *deaths}:
            failures[name] = CallCancelled(f"{what} was cancelled by something outside this run")
        if deaths:
            dead = [engine for engine in engines if engine.name in deaths]
            with self._lock:
                self._engines = tuple(each for each in self._engines if each not in dead)
            for engine in dead:
                self.keeper.died(engine, deaths[engine.name].reason)
            told = "; ".join(str(deaths[name]) for name in sorted(deaths))
            if not self._engines and not self.keeper.expects_more():
                raise WorkerDied("every engine that was left", told)
            logger.info("weights no longer go to those that died: %s", told)
        if failures:
            cause = failures[min(failures)]
            raise EnginesFailed(what, {name: str(exc) for name, exc in failures.items()}) from cause
        return {engine.name: results[engine.name] for engine in engines if engine.name in results}


class FileWeightSync(EngineWeightSync[E]):
    """For a trainer and engines on one node, which share its files; others get them by Ray.

    The file of the current version stays until the next one is confirmed by every engine: make
    room for two. Where they lie: see `WeightFiles`.

    Args:
        run_id: letters, digits, `-` and `_`.
        parent: where to make the directory instead.
        engine_s: as for `EngineWeightSync`.

    Raises:
        ConfigError: the run's id is not fit for a file name, or there are no engines.
    """

    def __init__(
        self,
        trainer: WeightSource,
        engines: Sequence[E],
        *,
        run_id: str,
        parent: Path | None = None,
        engine_s: float | None = None,
    ) -> None:
        files = WeightFiles(run_id, parent=parent)
        self.directory = files.directory
        super().__init__(FileTransport(trainer, files), engines, engine_s=engine_s)
