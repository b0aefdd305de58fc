"""Directories in memory that a run shares on its node, and that outlive no run for long."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from sc_core import (
    ConfigError,
)

_LOCK = "lock"


class MemoryDirectory:
    """A directory of mode 0700 in /dev/shm, or where that is missing, among temporary files.

    `close` removes it. If its process dies first, `remove_leftovers` of the same run does.

    Args:
        run_id: letters, digits, `-` and `_`.
        parent: where to make it instead.

    Raises:
        ConfigError: the run's id is not fit for a file name.
    """

    def __init__(self, run_id: str, *, parent: Path | None = None) -> None:
        if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
            raise ConfigError(f"run id {run_id!r} has more than letters, digits, - and _")
        self._lock: int | None = None  #: tells others that this process lives
        while self._lock is None:  # else it was taken for a leftover, before it had the lock
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(run_id), dir=parent or in_memory()))
            with suppress(FileNotFoundError):
                self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove it with all that it holds. Blocks; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def in_memory() -> Path:
    """The directory for files in memory, or, where there is none, for temporary ones."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def remove_leftovers(run_id: str, *, parent: Path | None = None) -> None:
    """Remove what earlier processes of this run left in memory; one that lives keeps its own."""
    for found in (parent or in_memory()).glob(f"{_prefix(run_id)}*"):
        try:
            owned = found.lstat()
            if not stat.S_ISDIR(owned.st_mode) or owned.st_uid != os.getuid():
                continue  # not made by us: a file or link of that name, or another user's
            lock = _lock(found)
        except OSError:  # went away meanwhile
            continue
        if lock is not None:
            gone = found.with_name(f"{found.name}.gone")  # nobody takes it for a new one's
            with suppress(OSError):
                found.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
            os.close(lock)


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
