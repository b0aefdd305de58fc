"""What took from when to when in a run, for people to look at: one JSON object per line.

Nothing depends on spans. So a sink that fails ends no run: that is a warning in the log, and the
rest of this process life has none.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sc_core.events import Count, Lines
from sc_core.ports import SpanSink

logger = logging.getLogger(__name__)

SPANS = "spans.jsonl"
TRAIN, TRAINER, FINALISER = "train pump", "trainer", "finaliser"
READ, ESTIMATE, WRITE = "advantage: read", "advantage: estimate", "advantage: write back"
PROMPTS, COMMITS, ENGINES = "rollout pump", "commits", "engines"
"""Tracks. Spans of one track are inside each other or one after the other, as far as its tasks
are: siblings, and commits, overlap."""

STEP, SAVE, SYNC = "step", "save", "weight sync"
WAITED, HELD, SNAPSHOT = "wait for the barrier", "barrier held alone", "data plane saves"
"""Names of spans that the report of a run looks for."""

_AT_MOST_SPANS = 1024
"""Kept in memory between two steps: some 200 kB of file, written in a millisecond or so."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of the file. It is written when the span has ended."""

    track: str
    name: str
    t: float  #: unix seconds, when it began
    duration_s: Annotated[float, msgspec.Meta(ge=0)]
    incarnation: str
    step: Count | None = None  #: being made, or the last finished one
    weight_version: Count | None = None
    group_id: str | None = None
    sibling: Count | None = None
    engine: str | None = None
    note: str | None = None


_decode = msgspec.json.Decoder(Span).decode
_encode_lines = msgspec.json.Encoder().encode_lines


class Spans:
    """A run's spans, if somebody wants them: without a sink, each costs one `if`."""

    def __init__(self, sink: SpanSink | None = None) -> None:
        self._sink = sink
        self.on = sink is not None  #: look here before gathering what `add` takes

    def now(self) -> float:
        """Unix seconds of the sink's clock; 0 without one."""
        return 0.0 if self._sink is None else self._sink.now()

    def add(self, track: str, name: str, began: float, **of: Any) -> None:
        """Record what began then and ends now; `of` are further fields of `Span`."""
        if self._sink is not None:
            try:
                self._sink.add(track, name, began, **of)
            except Exception as exc:
                self._give_up(exc)

    def flush(self) -> None:
        """A step is over: what was recorded may be written now."""
        if self._sink is not None:
            try:
                self._sink.flush()
            except Exception as exc:
                self._give_up(exc)

    def __call__(self, track: str, name: str, **of: Any) -> AbstractContextManager[None]:
        """Record the body, also if it fails."""
        return nullcontext() if self._sink is None else self._around(track, name, of)

    @contextmanager
    def _around(self, track: str, name: str, of: dict[str, Any]) -> Iterator[None]:
        began = self.now()
        note = None
        try:
            yield
        except BaseException as exc:
            note = type(exc).__name__
            raise
        finally:
            if note is not None:
                of["note"] = note
            self.add(track, name, began, **of)

    def _give_up(self, error: Exception) -> None:
        self._sink, self.on = None, False
        logger.warning("no more spans of this run are recorded: %s", error)


class JsonlSpans:
    """A `SpanSink` on a file that grows by whole lines, some steps' worth at a time.

    What was not written yet is lost with the process. A torn last line of an earlier life is
    cut off.

    Args:
        path: the file; made at the first write if it is not there. Its directory must exist.
        incarnation: the event log's.
        now: the time in unix seconds, as the event log takes it.
    """

    def __init__(
        self, path: str | Path, *, incarnation: str, now: Callable[[], float] = time.time
    ) -> None:
        self._path = Path(path)
        self._incarnation = incarnation
        self.now = now
        self._lines: Lines | None = None
        self._spans: list[Span] = []

    def add(self, track: str, name: str, began: float, **of: Any) -> None:
        """Record what began then and ends now.

        Raises:
            OSError: many were waiting, and could not be written; they are lost.
        """
        took = max(0.0, self.now() - began)
        self._spans.append(
            Span(
                track=track,
                name=name,
                t=began,
                duration_s=took,
                incarnation=self._incarnation,
                **of,
            )
        )
        if len(self._spans) >= _AT_MOST_SPANS:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded.

        Raises:
            OSError: it could not be written, and is lost.
        """
        spans, self._spans = self._spans, []
        if spans:
            if self._lines is None:
                self._lines = Lines(self._path, _whole_bytes(self._path))
            self._lines.write(_encode_lines(spans))

    def close(self) -> None:
        """Write what is left, and let go of the file; a failure is a warning in the log."""
        try:
            self.flush()
        except Exception as exc:  # of the disk, or of something in them that no JSON can hold
            logger.warning("the last spans of this run are lost: %s", exc)
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read_spans(path: str | Path) -> Iterator[Span]:
    """The spans of a file, in the order in which they ended; lines that are none are left out."""
    with Path(path).open("rb") as file:
        for line in file:
            try:
                yield _decode(line)
            except (msgspec.DecodeError, RecursionError):  # torn, or of another version
                continue


def _whole_bytes(path: Path, block_bytes: int = 1 << 16) -> int:
    """How many bytes of the file are whole lines."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - block_bytes)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
