"""A service that gets metrics in a thread of its own: it may be slow, hang or fail."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_QUEUED_ROWS = 256
"""Steps that may wait for a slow service; a row is some kB."""
_FAILURES_IN_A_ROW = 5
"""After so many a service is left alone: each may take as long as its own timeouts."""


class Service(Protocol):
    """What takes metrics. One thread calls it; every method may block, and may raise anything."""

    @property
    def name(self) -> str:
        """For people."""

    def start(self) -> None:
        """Connect. Called again, before the next row, after it has failed."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the metrics of a step. NaN is one of the numbers that may come."""

    def finish(self) -> None:
        """Bring all of it to its place, and let go. Called once if it was started."""


class InBackground:
    """Feeds one service. `put` never waits; what fails is a warning in the log, not an error.

    The first failure is warned of, and so is the last: after five in a row the service is left
    out. What did not reach it is in `metrics.jsonl` all the same.
    """

    def __init__(self, service: Service, *, queued_rows: int = _QUEUED_ROWS) -> None:
        self._service = service
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None]
        self._rows = queue.Queue(queued_rows)
        self._started = False
        self._failures = 0  #: in a row
        self._lost = 0  #: rows
        self._warned = self._full = False
        self._thread = threading.Thread(target=self._main, name=service.name, daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over a row; it is lost if so many wait already that the service must be stuck."""
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._lost += 1
            if not self._full:
                self._full = True
                logger.warning(
                    "%s is too slow: it misses the metrics of step %d, and maybe of later ones",
                    self._service.name,
                    step,
                )

    def close(self, give_up_at: float) -> None:
        """Wait until all rows are where they should be, or for `time.monotonic() == give_up_at`."""
        try:
            self._rows.put(None, timeout=max(0.0, give_up_at - time.monotonic()))
        except queue.Full:
            pass  # the thread can't end in time, as said below
        self._thread.join(max(0.0, give_up_at - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "%s is not done in time: %d rows or more did not reach it",
                self._service.name,
                self._rows.qsize() + self._lost,
            )
        elif self._lost:
            logger.warning("%s misses the metrics of %d steps", self._service.name, self._lost)

    def _main(self) -> None:
        self._succeeds(self._start)
        while (row := self._rows.get()) is not None:
            if self._failures >= _FAILURES_IN_A_ROW or not self._succeeds(self._write, *row):
                self._lost += 1
        if self._started:
            self._succeeds(self._service.finish)

    def _start(self) -> None:
        self._service.start()
        self._started = True

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._started:
            self._start()
        self._service.write(step, numbers)

    def _succeeds(self, work: Callable[..., None], *args: Any) -> bool:
        try:
            work(*args)
        except BaseException as exc:  # even SystemExit: it would end the thread silently
            self._failures += 1
            self._warn(exc)
            return False
        self._failures = 0
        return True

    def _warn(self, error: BaseException) -> None:
        name, reason = self._service.name, _told(error)
        if self._failures == _FAILURES_IN_A_ROW:
            logger.warning("%s is left out after %d failures: %s", name, self._failures, reason)
        elif not self._warned:
            self._warned = True
            logger.warning("%s failed, and gets the next step again: %s", name, reason)


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its own `__str__`
        return type(error).__name__
