"""Starting Ray where that is not easy."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sc_ray.cluster import start_local_ray

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
