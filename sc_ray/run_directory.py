"""One run's directory: who runs it, and what that process last said of itself."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from sc_core import (
    LOCAL,
    DiskLock,
    RunInUse,
    SaveError,
    ScError,
    candidates,
)

CHECKPOINTS, EVENTS, METRICS, LOGS = "checkpoints", "events.jsonl", "metrics.jsonl", "logs"
SPANS = "spans.jsonl"
LOCK, STATUS, CONFIG = "lock", "status.json", "config.yaml"
_AT_MOST_BYTES = 1 << 20


class NotRunning(ScError, RuntimeError):
    """Nobody works on this run now."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"no run is going on in {self.path}"


class RunDirectory:
    """`RUN`, locked by the driver for as long as it lives.

    Raises:
        RunInUse: another driver has it; names its process.
        SaveError: it can't be made or written.
    """

    def __init__(self, path: Path) -> None:
        try:
            (path / LOGS).mkdir(parents=True, exist_ok=True)
            self.path = path.resolve()
            self.facts: dict[str, Any] = {}  #: that every report has
            self._lock: DiskLock = LOCAL.lock(self.path / LOCK)
        except OSError as exc:
            raise SaveError(
                f"the run directory {path} can't be written: {exc.strerror or exc}; choose"
                " another one by --out"
            ) from exc

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def report(self, phase: str, status: Mapping[str, Any] = {}) -> None:
        """Replace `status.json` by what is true now."""
        told = {"phase": phase, "t": time.time(), "pid": os.getpid(), **self.facts, **status}
        staged = self.path / f"{STATUS}.tmp"
        staged.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
        staged.replace(self.path / STATUS)


def keep_config(path: Path, text: str) -> None:
    """Replace `config.yaml` by the settings of this start; other ones become `config.N.yaml`.

    The higher N is, the later they were in use.
    """
    kept = path / CONFIG
    if kept.is_file() and (before := kept.read_text()) != text:
        numbers = (one.name.split(".")[1] for one in path.glob("config.*.yaml"))
        last = max((int(number) for number in numbers if number.isdigit()), default=0)
        _replace(path / f"config.{last + 1}.yaml", before)
    _replace(kept, text)


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f"{path.name}.tmp")
    staged.write_text(text)
    LOCAL.sync(staged)
    staged.replace(path)
    LOCAL.sync_dir(path.parent)


def last_report(path: Path) -> dict[str, Any]:
    """What the run last said of itself; empty if it never did."""
    try:
        raw = LOCAL.read(path / STATUS, _AT_MOST_BYTES)
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def running_pid(path: Path) -> int | None:
    """The process that runs `path` on this machine now; None if there is none.

    Raises:
        RunInUse: a process on another machine does.
    """
    try:
        holder = LOCAL.read(path / LOCK, _AT_MOST_BYTES).decode(errors="replace").split()
    except FileNotFoundError:
        return None
    if len(holder) < 4 or not holder[1].isdigit():
        return None
    pid, host = int(holder[1]), holder[3]
    if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
        return None  # without touching the lock, which a start may be about to take
    try:
        LOCAL.lock(path / LOCK).release()
    except RunInUse:
        if host != socket.gethostname():
            raise
        return pid
    return None


def published(path: Path) -> dict[str, int]:
    """Bundles by name, newest first, with what changes when one is replaced."""
    found = {}
    for bundle in candidates(path / CHECKPOINTS):
        try:
            found[bundle.name] = bundle.stat().st_ino
        except FileNotFoundError:  # pruned meanwhile
            continue
    return found
