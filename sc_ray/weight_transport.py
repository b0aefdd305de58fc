"""How the bytes of weights get from the trainer to the engines: the seam, and the way by a file.

Who takes part, who is paused, who died and who joins is the matter of `sc_ray.weights`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from sc_core import (
    WeightSyncError,
    in_thread,
)
from sc_ray.memory import MemoryDirectory, remove_leftovers


class Engine(Protocol):
    name: str

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path, version: int) -> int:
        """Generate by these weights from now on; returns the version that was loaded."""


E = TypeVar("E", bound=Engine)
E_contra = TypeVar("E_contra", bound=Engine, contravariant=True)
Each = Callable[[str, Callable[[E], Awaitable[int]]], Awaitable[dict[str, int]]]
"""Ask every engine that takes part, by the rules for those that fail or die."""


class WeightsMoved(WeightSyncError):
    """The trainer has newer weights than those that were asked for, and no copy of these."""


class Transport(Protocol[E_contra]):
    """A way for weights. `send` and `give` never overlap for one engine."""

    async def send(
        self, version: int, engines: tuple[E_contra, ...], each: Each[E_contra]
    ) -> dict[str, int]:
        """Bring the trainer's weights to these engines, those that `each` asks.

        Returns the versions that they confirmed. There may be none: `give` may come next.

        Raises: what `each` does; and what the trainer fails of.
        """

    async def give(self, engine: E_contra, version: int) -> int:
        """Bring the weights of the last `send` to an engine more; returns what it confirmed.

        Raises:
            WeightsMoved: they are not there any more; newer ones will be sent.
        """

    async def confirmed(self) -> None:
        """Hear that every engine confirmed the last `send`: what came before is of no use."""

    def close(self) -> None:
        """Remove all files. Blocks; may be called again."""


class WeightSource(Protocol):
    async def export_weights(self, path: Path) -> object:
        """Write the current weights into a safetensors file, whole or not at all."""


class WeightFiles:
    """A directory of mode 0700 in memory, for safetensors files by version.

    It lies in /dev/shm, or where that is missing, among temporary files. It is removed by
    `close`; if the process dies first, by the next start with the same `run_id` on the node.

    Raises:
        ConfigError: the run's id is not fit for a file name.
    """

    def __init__(self, run_id: str, *, parent: Path | None = None) -> None:
        self._run_id = run_id
        self._memory = MemoryDirectory(run_id, parent=parent)
        remove_leftovers(run_id, parent=parent)
        self.directory = self._memory.path

    def path(self, version: int, copy: int | None = None) -> Path:
        suffix = "" if copy is None else f"-{copy}"
        return self.directory / f"{self._run_id}-v{version}{suffix}.safetensors"

    async def keep_only(self, path: Path | None) -> None:
        await in_thread(self._keep_only, path)

    def close(self) -> None:
        self._memory.close()

    def _keep_only(self, path: Path | None) -> None:
        for old in self.directory.glob("*.safetensors"):
            if old != path:
                old.unlink(missing_ok=True)


class FileTransport:
    """The trainer writes a file, and every engine loads it; see `FileWeightSync`."""

    def __init__(self, trainer: WeightSource, files: WeightFiles) -> None:
        self._trainer = trainer
        self._files = files
        self._newest: Path | None = None

    async def send(
        self, version: int, engines: tuple[Engine, ...], each: Each[Engine]
    ) -> dict[str, int]:
        path = self._files.path(version)
        await self._trainer.export_weights(path)
        self._newest = path
        return await each(
            f"load of version {version}", lambda engine: engine.load_weights(path, version)
        )

    async def give(self, engine: Engine, version: int) -> int:
        return await engine.load_weights(self._files.path(version), version)

    async def confirmed(self) -> None:
        await self._files.keep_only(self._newest)

    def close(self) -> None:
        self._files.close()
