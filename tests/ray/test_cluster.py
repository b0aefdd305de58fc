"""Starting Ray where that is not easy."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sc_core import ConfigError
from sc_ray import cluster
from sc_ray.cluster import start_local_ray, start_ray
from sc_ray.settings import load_config

LATE = "The current node timed out during startup. This could happen because …"


@pytest.fixture(autouse=True)
def no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a Ray of other tests in this process."""
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.mark.parametrize("late_starts", [0, 2, 3])
def test_a_start_that_ray_gives_up_for_want_of_time_is_tried_again(
    late_starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        tries.append(options)
        if len(tries) <= late_starts:
            raise Exception(LATE)
        return SimpleNamespace(address_info={"session_dir": "/session"})

    monkeypatch.setattr(ray, "init", init)
    with ExitStack() as on_exit:
        if late_starts < 3:
            assert start_local_ray(5, on_exit) == Path("/session")
        else:
            with pytest.raises(Exception, match="timed out during startup"):
                start_local_ray(5, on_exit)
    assert len(tries) == min(late_starts + 1, 3)


def test_another_failure_of_ray_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        tries.append(options)
        raise ValueError("no such option")

    monkeypatch.setattr(ray, "init", init)
    with ExitStack() as on_exit, pytest.raises(ValueError, match="no such option"):
        start_local_ray(5, on_exit)
    assert len(tries) == 1


@pytest.mark.parametrize("freed", [True, False])
def test_cpus_that_an_earlier_start_has_just_left_are_waited_for(
    freed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config("demo", ["cluster.address=auto", "cluster.storage_units=1"])
    asked: list[int] = []

    def available() -> dict[str, float]:
        asked.append(1)
        return {"CPU": 5.0 if freed and len(asked) > 3 else 4.0}

    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "available_resources", available)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    node = {"NodeID": "here", "Alive": True, "Resources": {"CPU": 5.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(cluster, "_FREED_S", 1.0)
    with ExitStack() as on_exit:
        if freed:
            start_ray(config, tmp_path, on_exit)
            node["Resources"] = {"CPU": 4.0}
            with pytest.raises(ConfigError, match="on the driver's node, which has 4:"):
                start_ray(config, tmp_path, on_exit)
        else:
            with pytest.raises(ConfigError, match="needs 5 CPUs of Ray and the cluster has 4:"):
                start_ray(config, tmp_path, on_exit)
