"""The metrics sink of a run: its file first, at once, and then everybody else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sc_core import (
    JsonlMetrics,
    MetricsSink,
)
from sc_ray.watching.background import InBackground, Service
from sc_ray.watching.numbers import numbers_of

_FLUSH_S = 30.0
"""At the end of a run, for all services together: they work at the same time."""


class WatchedMetrics(MetricsSink):
    """Writes each step's metrics to the file, and hands them to services without waiting."""

    def __init__(self, file: JsonlMetrics, services: Sequence[Service]) -> None:
        self._file = file
        self._services = [InBackground(service) for service in services]

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Record one object; it is in the file once this returns.

        Raises:
            OSError: it could not be written there.
        """
        self._file.write(metrics)
        numbers = numbers_of(metrics)
        step = int(numbers.pop("step"))
        for service in self._services:
            service.put(step, numbers)

    def close(self) -> None:
        """Let go of the file, and wait for the services, for half a minute at most."""
        self._file.close()
        give_up_at = time.monotonic() + _FLUSH_S
        for service in self._services:
            service.close(give_up_at)
