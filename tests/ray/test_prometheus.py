"""The endpoint for Prometheus, by itself."""

from __future__ import annotations

import concurrent.futures
import math
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sc_core.barrier import BarrierStatistics
from sc_core.controller import ControllerStatistics
from sc_core.errors import ConfigError
from sc_ray.hosted import LoopCalls
from sc_ray.watching.config import LoggerConfig
from sc_ray.watching.prometheus import PrometheusEndpoint, free_port, metric_name

HOST = "127.0.0.1"


def statistics(**more: Any) -> ControllerStatistics:
    barrier = BarrierStatistics(mutations=2, checkpointing=False, waiting=1, holders=(), waiters=())
    known: dict[str, Any] = {
        "step": 3,
        "weight_version": 3,
        "waiting": 1,
        "in_flight": 2,
        "committed": 4,
        "selected": 0,
        "places_held": 6,
        "places_capacity": 8,
        "gate_closed_for": None,
        "stop_reason": None,
        "barrier": barrier,
        "engines": ("generation-0", "generation-1"),
        "engines_out": {"generation-2": "it died"},
        "last_metrics": {
            "step": 3,
            "incarnation": "abc",
            "train/reward": 0.5,
            "train/grad_norm": math.nan,
            "timing/train/total_step_time": 1.5,
        },
        "barrier_entered": 40,
        "counters": {"dropped": 2, "evicted": 1},
        "trained_by_staleness": {0: 5, 1: 3, 3: 2, 50: 1},
        "quiet_s": 2.5,
    }
    return ControllerStatistics(**{**known, **more})


def answered(value: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(value)
    return future


@contextmanager
def endpoint(ask: Any) -> Iterator[int]:
    port = free_port(HOST, 0)
    serving = PrometheusEndpoint(HOST, port, ask)
    try:
        yield port
    finally:
        serving.close()


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for value in sample.labels.values())
            found[sample.name + labels] = sample.value
    return found


def test_the_last_step_and_what_is_true_now() -> None:
    with endpoint(lambda: answered(statistics())) as port:
        found = scrape(port)
    assert math.isnan(found.pop("sc_train_grad_norm"))
    for name, value in {
        "sc_step": 3,
        "sc_train_reward": 0.5,
        "sc_timing_train_total_step_time": 1.5,
        "sc_live_step": 3,
        "sc_live_places_held": 6,
        "sc_live_places_capacity": 8,
        "sc_live_groups{in_flight}": 2,
        "sc_live_groups{committed}": 4,
        "sc_live_engines{serving}": 2,
        "sc_live_engines{out}": 1,
        "sc_live_quiet_seconds": 2.5,
        "sc_live_gate_closed": 0,
        "sc_live_barrier_waiters": 1,
        "sc_barrier_entered_total": 40,
        "sc_events_total{dropped}": 2,
        "sc_events_total{evicted}": 1,
        "sc_staleness_versions_bucket{0.0}": 5,
        "sc_staleness_versions_bucket{1.0}": 8,
        "sc_staleness_versions_bucket{2.0}": 8,
        "sc_staleness_versions_bucket{4.0}": 10,
        "sc_staleness_versions_bucket{32.0}": 10,
        "sc_staleness_versions_bucket{+Inf}": 11,
        "sc_staleness_versions_count": 11,
        "sc_staleness_versions_sum": 59,
    }.items():
        assert found[name] == value, name
    assert "sc_incarnation" not in found


def test_names_follow_one_rule() -> None:
    assert metric_name("timing/train/weight_sync") == "sc_timing_train_weight_sync"
    assert metric_name("train/reward/Größe-2") == "sc_train_reward_Gr__e_2"


def test_a_controller_that_does_not_answer_is_shown_as_it_was_seen_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sc_ray.watching.prometheus._PATIENCE_S", 0.05)
    never: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answers = [never, answered(statistics()), concurrent.futures.Future()]
    with endpoint(lambda: answers.pop(0)) as port:
        assert list(scrape(port)) == ["sc_live_age_seconds"]
        assert never.cancelled()  # the controller need not do it later
        assert scrape(port)["sc_live_age_seconds"] < 60
        busy = scrape(port)
    assert busy["sc_live_step"] == 3
    assert busy["sc_live_age_seconds"] >= 0.05


def test_a_port_is_free_again_after_the_end_and_taken_before() -> None:
    with endpoint(lambda: answered(statistics())) as port:
        scrape(port)
        says = rf"logger.prometheus_port is {port}, and {HOST}:{port} can't be listened on: Address"
        with pytest.raises(ConfigError, match=says):
            free_port(HOST, port)
        with pytest.raises(ConfigError, match=says):
            PrometheusEndpoint(HOST, port, lambda: answered(statistics()))
    assert free_port(HOST, port) == port
    PrometheusEndpoint(HOST, port, lambda: answered(statistics())).close()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="logger.prometheus_port is 0, and nowhere.invalid:0"):
        free_port("nowhere.invalid", 0)
    for odd in ("a\0b", "\ud800", f"{'x' * 64}.invalid"):
        with pytest.raises(ConfigError, match="can't be listened on"):
            free_port(odd, 0)
    with pytest.raises(ConfigError, match="it must be in 0 … 65535"):
        LoggerConfig(prometheus_port=70000)
    assert socket.has_ipv6 is False or free_port("::1", 0) > 0


@pytest.mark.anyio
async def test_the_controllers_own_loop_takes_its_statistics() -> None:
    import threading

    calls = LoopCalls()
    here = threading.get_ident()

    def ask() -> concurrent.futures.Future[ControllerStatistics]:
        assert threading.get_ident() != here

        def take() -> ControllerStatistics:
            assert threading.get_ident() == here
            return statistics(step=7)

        return calls.call(take)

    with endpoint(ask) as port:
        found = await anyio.to_thread.run_sync(scrape, port)
    assert found["sc_live_step"] == 7


@pytest.mark.anyio
async def test_what_fails_on_the_loop_fails_where_it_was_asked() -> None:
    calls = LoopCalls()
    failed = calls.call(lambda: 1 // 0)
    cancelled = calls.call(lambda: 1)
    cancelled.cancel()
    done = calls.call(lambda: 2)
    assert await anyio.to_thread.run_sync(done.result, 60) == 2
    with pytest.raises(ZeroDivisionError):
        failed.result(0)
