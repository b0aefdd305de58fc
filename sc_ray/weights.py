"""Weights from the trainer to the engines, through a file in memory."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import anyio

from sc_core import (
    ConfigError,
    WeightSyncError,
    WorkerDied,
    in_thread,
)

R = TypeVar("R")
logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    async def export_weights(self, path: Path) -> None:
        """Write the current weights into a safetensors file, whole or not at all."""


class Engine(Protocol):
    name: str

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path, version: int) -> int:
        """Generate by these weights from now on; returns the version that was loaded."""


class FileWeightSync:
    """A `WeightSync` for a trainer and engines on one node, which share its files.

    The file of the current version stays until the next one is confirmed by every engine: make
    room for two. They lie in a directory of mode 0700 in /dev/shm, or where that is missing, in
    the directory for temporary files. It is removed by `close`; if the process dies first, by
    the next run of the same `run_id` on the node.

    Args:
        run_id: letters, digits, `-` and `_`.
        parent: where to make the directory instead.

    Raises:
        ConfigError: the run's id is not fit for a file name, or there are no engines.
    """

    def __init__(
        self,
        trainer: WeightSource,
        engines: Sequence[Engine],
        *,
        run_id: str,
        parent: Path | None = None,
    ) -> None:
        if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
            raise ConfigError(f"run id {run_id!r} has more than letters, digits, - and _")
        if not engines:
            raise ConfigError("weights need at least one engine to go to")
        self._trainer = trainer
        self._engines = tuple(engines)
        self._run_id = run_id
        parent = parent or _memory()
        remove_leftovers(run_id, parent=parent)
        self.directory = Path(tempfile.mkdtemp(prefix=_prefix(run_id), dir=parent))
        self._lock = _lock(self.directory)  # tells other runs that this one lives

    def __enter__(self) -> FileWeightSync:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def pause(self) -> None:
        """Every engine that lives holds its requests, or this raises; some may then be paused."""
        await self._each("pause", lambda engine: engine.pause())

    async def transfer(self, version: int) -> Mapping[str, int]:
        """Have the trainer write its weights and every engine that lives load them.

        Raises:
            WeightSyncError: some engine failed; the others have loaded. The message names it.
            WorkerDied: no engine is left.
        """
        path = self.directory / f"{self._run_id}-v{version}.safetensors"
        await self._trainer.export_weights(path)
        confirmed = await self._each(
            f"load of version {version}", lambda engine: engine.load_weights(path, version)
        )
        if all(at == version for at in confirmed.values()):
            await in_thread(self._keep_only, path)
        return confirmed

    async def resume(self) -> None:
        """Every engine that lives goes on, also when another one fails to; then this raises."""
        await self._each("resume", lambda engine: engine.resume())

    def close(self) -> None:
        """Remove the files. Blocks; may be called again."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _each(self, what: str, work: Callable[[Engine], Awaitable[R]]) -> dict[str, R]:
        """Call all engines at once; one that fails doesn't stop the others.

        One that died is left out from now on, as it is by whoever sends it requests.
        """
        results: dict[str, R] = {}
        failures: dict[str, Exception] = {}
        deaths: dict[str, WorkerDied] = {}

        async def one(engine: Engine) -> None:
            try:
                results[engine.name] = await work(engine)
            except WorkerDied as exc:
                deaths[engine.name] = exc
            except Exception as exc:  # raised below, with the others
                failures[engine.name] = exc

        async with anyio.create_task_group() as tg:
            for engine in self._engines:
                tg.start_soon(one, engine)
        if deaths:
            self._engines = tuple(each for each in self._engines if each.name not in deaths)
            told = "; ".join(str(deaths[name]) for name in sorted(deaths))
            if not self._engines:
                raise WorkerDied("every engine that was left", told)
            logger.warning("weights no longer go to those that died: %s", told)
        if failures:
            reasons = (f"{name}: {failures[name]}" for name in sorted(failures))
            cause = failures[min(failures)]
            raise WeightSyncError(f"{what} failed on {'; '.join(reasons)}") from cause
        return {engine.name: results[engine.name] for engine in self._engines}

    def _keep_only(self, path: Path) -> None:
        for old in self.directory.glob("*.safetensors"):
            if old != path:
                old.unlink(missing_ok=True)


_LOCK = "lock"


def _memory() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _prefix(run_id: str) -> str:
    return f"single-controller.{run_id}."


def _lock(directory: Path) -> int | None:
    """Hold the directory's lock until the descriptor is closed or the process ends."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(run_id: str, *, parent: Path | None = None) -> None:
    """Remove what earlier processes of this run left in memory; one that lives keeps its own."""
    for found in (parent or _memory()).glob(f"{_prefix(run_id)}*"):
        try:
            owned = found.lstat()
            if not stat.S_ISDIR(owned.st_mode) or owned.st_uid != os.getuid():
                continue  # not made by us: a file or link of that name, or another user's
            lock = _lock(found)
        except OSError:  # went away meanwhile
            continue
        if lock is not None:
            shutil.rmtree(found, ignore_errors=True)
            os.close(lock)
