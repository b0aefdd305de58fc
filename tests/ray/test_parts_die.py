"""What happens when one process of a run is killed and the others live."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sc_ray.chaos import SETTINGS
from sc_ray.kills import actors_of
from sc_ray.lives import Life, what_is_wrong
from sc_ray.run_directory import published

AT_ONCE_S = 60.0
"""Of ending: far below the deadlines of calls, which are what an unnoticed death would run into."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as lives:

        def start_life(*settings: str) -> Life:
            life = Life(
                tmp_path / "run",
                [*SETTINGS, "grpo.max_num_steps=100000", *settings],
                patience_s=300,
            )
            return lives.enter_context(life)

        yield start_life


def kill_one(life: Life, kind: str) -> None:
    os.kill(actors_of(life.pid, kind)[0], signal.SIGKILL)


def steps(life: Life, more: int) -> None:
    """Let it make so many steps more."""
    assert life.until(lambda: life.step is not None), life.last_line
    wanted = (life.step or 0) + more
    assert life.until(lambda: (life.step or 0) >= wanted), life.last_line


def ended(life: Life) -> str:
    """Its last words, once it has failed soon."""
    began = time.monotonic()
    assert not life.until(lambda: time.monotonic() > began + AT_ONCE_S), "it goes on"
    assert life.status == 1
    return life.last_line


def test_a_run_does_without_a_part_or_ends_at_once_and_the_next_start_goes_on(
    start: Any, tmp_path: Path
) -> None:
    life = start("generation.workers=2", "cluster.num_cpus=6")
    steps(life, 3)
    kill_one(life, "GenerationWorker")
    steps(life, 10)
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert "1 of 2 generation workers live" in log
    kill_one(life, "GenerationWorker")
    assert "WorkerDied: every " in (told := ended(life)), told

    for kind, words in (
        ("TrainerWorker", "WorkerDied: trainer-0 died: "),
        ("SimpleStorageUnit", "TransferQueue's storage unit 0 died: "),
        ("TransferQueueController", "TransferQueue's index died: "),
        ("SingleControllerActor", "the controller died: "),
    ):
        life = start()
        steps(life, 3)
        assert life.says("resuming from")
        kill_one(life, kind)
        assert words in (told := ended(life)), told
        assert what_is_wrong(tmp_path / "run") == []
        assert published(tmp_path / "run")
