"""What happened to every prompt: one JSON object per line, over all incarnations of a run.

Each line is written by one system call and belongs to the file once `append` has returned, so
a SIGKILL loses nothing; `sync` makes it survive a power cut as well. Only the last line can be
torn, and the next start cuts it off.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sc_core.errors import RestoreError
from sc_core.ports import EventKind

logger = logging.getLogger(__name__)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of the log. Fields that a kind has no use for are left out."""

    seq: Count  #: strictly increasing over the whole file, all incarnations
    t: float  #: unix seconds
    incarnation: str  #: the process life that wrote it
    event: EventKind
    ordinal: Count | None = None
    group_id: str | None = None
    step: Count | None = None
    """The step being made (`selected`, `abandoned`), the target (`dispatched`), the target that
    goes without it (`dropped`), else finished."""
    weight_version: Count | None = None
    """Of the group's start (`dispatched`, `committed`), else the newest."""
    reason: str | None = None  #: a category, then, after a colon, details
    parent: str | None = None  #: `resumed`: the incarnation that took the bundle's cut
    parent_seq: Count | None = None  #: `resumed`: that cut's `event_seq`
    digest: str | None = None  #: `resumed`, `checkpoint`: of the bundle's cut
    path: str | None = None  #: `checkpoint`: where the bundle was published
    engines: tuple[str, ...] | None = None
    """`weight_sync`: those that confirmed the version. Left out where they are the same as at
    the last sync of the same incarnation. `engine`: the one whose state is now that of `reason`;
    `weight_version` is what it confirmed between two syncs, if it did."""
    served: Mapping[str, tuple[Count, ...]] | None = None
    """`committed`: by engine, the end versions of the siblings that it made, as far as workers
    name their engines."""
    settings: Mapping[str, Any] | None = None
    """`run_started`, `resumed`: what decisions follow from, as `DecisionSettings` has it."""


_decode = msgspec.json.Decoder(Event).decode
_encoder = msgspec.json.Encoder(enc_hook=float)  # numbers of other libraries; NaN becomes null


def new_incarnation() -> str:
    """An id that no other process life has."""
    return secrets.token_hex(6)


def make_events(
    kind: EventKind,
    each: Sequence[Mapping[str, Any]],
    *,
    after_seq: int,
    t: float,
    incarnation: str,
) -> list[Event]:
    """Number the events of one instant, starting at `after_seq + 1`."""
    return [
        Event(seq=seq, t=t, incarnation=incarnation, event=kind, **fields)
        for seq, fields in enumerate(each, after_seq + 1)
    ]


def read_events(path: str | Path) -> Iterator[Event]:
    """Read a log line by line; a torn last line is left out, so the log may be in use.

    Raises:
        RestoreError: a complete line is not an event; names the line's number.
    """
    for event, _ in _read(Path(path)):
        yield event


def _read(path: Path) -> Iterator[tuple[Event, int]]:
    """Events, each with the size of its line in bytes."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = _decode(line)
            except (msgspec.DecodeError, RecursionError) as exc:
                unreadable = not isinstance(exc, msgspec.ValidationError)
                if unreadable and not file.readline():
                    return  # nothing comes after it: torn by a power cut
                raise RestoreError(
                    f"{path}: line {number} is not an event: {exc};"
                    " repair the line, or move the file away"
                ) from exc
            yield event, len(line)


class Lines:
    """A file that only ever grows by whole lines."""

    def __init__(self, path: Path, keep_bytes: int) -> None:
        """Open `path` for appending after its first `keep_bytes` bytes; the rest is cut off."""
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = keep_bytes
        torn = os.fstat(self._fd).st_size - keep_bytes
        if torn:
            logger.warning("%s: cut off a torn last line of %d bytes", path, torn)
            os.ftruncate(self._fd, keep_bytes)

    def write(self, lines: bytes) -> None:
        try:
            written = os.write(self._fd, lines)
            while written < len(lines):
                written += os.write(self._fd, memoryview(lines)[written:])
        except OSError as exc:
            if self._fd >= 0:  # half a line in the middle of the file could not be read again
                os.ftruncate(self._fd, self._size)
            raise OSError(exc.errno, exc.strerror, str(self._path)) from exc
        self._size += len(lines)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JsonlEventLog:
    """An `EventSink` on a file. Opening reads the whole log once, to go on where it ends.

    Args:
        path: the log; made if it is not there. Its directory must exist.
        incarnation: of this process life; None makes a new one.
        now: the time in unix seconds.

    Raises:
        RestoreError: a complete line of the log is not an event, or `incarnation` has events.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        incarnation: str | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        path = Path(path)
        self._incarnation = new_incarnation() if incarnation is None else incarnation
        self._now = now
        self._seq = keep_bytes = 0
        self._name_synced = False
        for event, size in _read(path) if path.exists() else ():
            if event.incarnation == self._incarnation:
                raise RestoreError(
                    f"{path}: incarnation {self._incarnation} has events already;"
                    " every start needs a new one"
                )
            self._seq = event.seq
            keep_bytes += size
        self._path = path
        self._lines = Lines(path, keep_bytes)

    def __repr__(self) -> str:
        return f"<JsonlEventLog {self._path} at {self._seq}, incarnation {self._incarnation}>"

    @property
    def seq(self) -> int:
        """Of the last event, whichever incarnation wrote it; 0 where there is none."""
        return self._seq

    @property
    def incarnation(self) -> str:
        """Of this process life."""
        return self._incarnation

    def append(self, kind: EventKind, **fields: Any) -> int:
        """Write one event; returns its sequence number.

        Raises:
            OSError: it could not be written; the log is as it was before.
        """
        seq = self._seq + 1
        event = Event(seq=seq, t=self._now(), incarnation=self._incarnation, event=kind, **fields)
        self._lines.write(_encoder.encode(event) + b"\n")
        self._seq = seq
        return seq

    def append_many(self, kind: EventKind, each: Sequence[Mapping[str, Any]]) -> int:
        """Write events of one kind and one instant by one call; returns the last number.

        Raises:
            OSError: they could not be written; the log is as it was before.
        """
        events = make_events(
            kind, each, after_seq=self._seq, t=self._now(), incarnation=self._incarnation
        )
        self._lines.write(_encoder.encode_lines(events))
        self._seq += len(events)
        return self._seq

    def sync(self) -> None:
        """Make everything appended so far survive a power cut. Blocks: call it in a thread."""
        self._lines.sync()
        if not self._name_synced:
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self._name_synced = True

    def close(self) -> None:
        """Let go of the file; appending afterwards raises `OSError`."""
        self._lines.close()


class JsonlMetrics:
    """A `MetricsSink` on a file: one JSON object per line; NaN and infinity become null."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        keep_bytes = 0
        if path.exists():
            with path.open("rb") as file:
                keep_bytes = sum(len(line) for line in file if line.endswith(b"\n"))
        self._lines = Lines(path, keep_bytes)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one object; it is in the file once this returns.

        Raises:
            OSError: it could not be written; the file is as it was before.
            TypeError: a value is neither JSON nor a number.
        """
        self._lines.write(_encoder.encode_lines([metrics]))

    def close(self) -> None:
        """Let go of the file; writing afterwards raises `OSError`."""
        self._lines.close()
