"""Weights for engines that share no files with the trainer: through Ray's object store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import ray

from sc_core import (
    in_thread,
)

Content = np.ndarray[Any, np.dtype[np.uint8]]


class Parcels:
    """Puts a file into the object store once, however many engines ask for it.

    The newest one stays there, until the next is put: the store of this node needs room for one,
    and so does that of every node with an engine.
    """

    def __init__(self) -> None:
        self._putting = anyio.Lock()
        self._of: tuple[Path, int, int] | None = None
        self._ref: ray.ObjectRef[Content] | None = None

    async def of(self, path: Path) -> ray.ObjectRef[Content]:
        """The file's content; a task that gets this reference as an argument gets an array.

        Raises:
            OSError: the file can't be read.
            ray.exceptions.ObjectStoreFullError: there is no room for it.
        """
        async with self._putting:
            identity = _identity(path)
            if self._ref is None or self._of != identity:
                self._of = self._ref = None  # makes room, once no engine loads it any more
                self._ref = await in_thread(_put, path)
                self._of = identity
            return self._ref


def _identity(path: Path) -> tuple[Path, int, int]:
    found = path.stat()
    return path, found.st_ino, found.st_mtime_ns


def _put(path: Path) -> ray.ObjectRef[Content]:
    return ray.put(np.fromfile(path, dtype=np.uint8))


@contextmanager
def unpacked(content: Content) -> Iterator[Path]:
    """A parcel as a file, in memory where that is possible, for as long as the context lasts."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else None
    with tempfile.NamedTemporaryFile(prefix="single-controller.", dir=parent) as file:
        content.tofile(file)
        file.flush()
        yield Path(file.name)
