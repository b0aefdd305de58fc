"""`/metrics` for Prometheus: the last finished step, and what the run is doing now.

Every number of the last step's metrics is a gauge: `sc_`, then its name with all that is neither
letter nor digit as `_`: `timing/train/weight_sync` is `sc_timing_train_weight_sync`. What is true
now has names of its own, `sc_live_…`; totals are those of the run's effective history, and go back
where a resume does.
"""

from __future__ import annotations

import concurrent.futures
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sc_core import (
    ConfigError,
    ControllerStatistics,
)
from sc_ray.watching.numbers import numbers_of

_PATIENCE_S = 2.0
"""How long a scrape waits for a busy controller before it gets what was seen last. Prometheus
itself waits 10."""
_BOUNDS = (0, 1, 2, 4, 8, 16, 32)  #: of the staleness histogram, in versions
_UNFIT = re.compile(r"[^a-zA-Z0-9]")

Ask = Callable[[], "concurrent.futures.Future[ControllerStatistics]"]


def metric_name(name: str) -> str:
    """What a metric of `metrics.jsonl` is called here."""
    return f"sc_{_UNFIT.sub('_', name)}"


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, that can be listened on now.

    Raises:
        ConfigError: it can't; says why.
    """
    try:
        if host:
            socket.getaddrinfo(host, port)  # refuses what is no name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as found:
            free: int = found.getsockname()[1]
            return free
    except (OSError, ValueError) as exc:
        raise _taken(host, port, exc) from exc


class PrometheusEndpoint:
    """Serves `http://host:port/metrics` from threads of its own until `close`.

    Args:
        ask: have the controller's own loop take its statistics; called in any thread.

    Raises:
        ConfigError: the port can't be listened on.
    """

    def __init__(self, host: str, port: int, ask: Ask) -> None:
        registry = CollectorRegistry()
        registry.register(_Run(ask))
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as exc:
            raise _taken(host, port, exc) from exc

    def close(self) -> None:
        """Free the port; a scrape under way is answered first, or after `_PATIENCE_S` given up."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Run(Collector):
    """Asks the controller at each scrape."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()  # each scrape has a thread of its own
        self._seen: ControllerStatistics | None = None
        self._seen_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        asked = self._ask()
        try:
            now = asked.result(_PATIENCE_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            asked.cancel()
            now = None
        with self._lock:
            if now is not None:
                self._seen, self._seen_at = now, time.monotonic()
            seen, age_s = self._seen, time.monotonic() - self._seen_at
        yield _gauge("sc_live_age_seconds", "How old the rest is, above 0 if it is busy.", age_s)
        if seen is not None:
            yield from _last_step(seen.last_metrics)
            yield from _live(seen)


def _last_step(metrics: Mapping[str, Any]) -> Iterator[Metric]:
    named = {metric_name(name): (name, value) for name, value in numbers_of(metrics).items()}
    for name, (told, value) in named.items():
        yield _gauge(name, f"{told} of the last finished step.", value)


def _live(now: ControllerStatistics) -> Iterator[Metric]:
    barrier = now.barrier
    for name, told, value in (
        ("step", "Finished steps.", now.step),
        ("weight_version", "Syncs of weights.", now.weight_version),
        ("places_held", "Places of the buffer that groups hold.", now.places_held),
        ("places_capacity", "Places of the buffer.", now.places_capacity),
        ("evaluating", "Slots in flight that an evaluation has.", now.evaluating),
        ("quiet_seconds", "Since the last step, evaluation, sync or save.", now.quiet_s),
        ("gate_closed", "1 while no request may leave.", now.gate_closed_for is not None),
        ("barrier_holders", "Sections that hold the barrier.", len(barrier.holders)),
        ("barrier_waiters", "Sections that wait for the barrier.", barrier.waiting),
        ("barrier_checkpointing", "1 while a checkpoint holds it.", barrier.checkpointing),
    ):
        yield _gauge(f"sc_live_{name}", told, value)
    yield _labelled(
        GaugeMetricFamily("sc_live_groups", "Live prompts, by state.", labels=["state"]),
        {state: getattr(now, state) for state in ("waiting", "in_flight", "committed", "selected")},
    )
    yield _labelled(
        GaugeMetricFamily("sc_live_engines", "Generation engines, by state.", labels=["state"]),
        {
            "serving": len(now.engines),
            "away": len(now.engines_away),
            "out": len(now.engines_out),
        },
    )
    yield _counter("sc_barrier_entered", "Barrier sections, in this life.", now.barrier_entered)
    yield _labelled(
        CounterMetricFamily("sc_events", "Of the ledger, over the whole run.", labels=["event"]),
        now.counters,
    )
    yield _staleness(now.trained_by_staleness)


def _staleness(groups: Mapping[int, int]) -> Metric:
    inside = [0] * (len(_BOUNDS) + 1)
    for lag, count in groups.items():
        inside[next((at for at, bound in enumerate(_BOUNDS) if lag <= bound), -1)] += count
    names = [*map(floatToGoString, _BOUNDS), "+Inf"]
    return HistogramMetricFamily(
        "sc_staleness_versions",
        "Versions that groups were behind when they were trained, in this life.",
        buckets=list(zip(names, accumulate(inside), strict=True)),
        sum_value=sum(lag * count for lag, count in groups.items()),
    )


def _gauge(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(name, told, value=float(value))


def _counter(name: str, told: str, value: float) -> Metric:
    return CounterMetricFamily(name, told, value=float(value))


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> Metric:
    for label, value in values.items():
        family.add_metric([label], float(value))
    return family


def _taken(host: str, port: int, error: Exception) -> ConfigError:
    why = (error.strerror if isinstance(error, OSError) else None) or error
    return ConfigError(
        f"logger.prometheus_port is {port}, and {host}:{port} can't be listened on:"
        f" {why}; choose another one, or 0 for any"
    )
