"""What happens when one part of a run dies, or is asked to stop, and the others live.

All runs use one Ray of two nodes. The second node has room for one generation worker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes

from sc_core import audit_run
from sc_ray.chaos import SETTINGS
from sc_ray.kills import actors_of
from sc_ray.lives import Life, what_is_wrong
from sc_ray.run_directory import last_report, published
from sc_ray.stops import Stops

AT_ONCE_S = 60.0
"""Of ending: far below the deadlines of calls, which are what an unnoticed death would run into."""
ATTEMPTS = "async_rl.generation_fleet_health.max_restart_attempts_per_shard"
KINDS = ("GenerationWorker", "TrainerWorker", "SingleController", "SimpleStorage", "TransferQueue")


class TwoNodes(RayNodes):
    """The second one, `far`, has one CPU."""

    def __init__(self) -> None:
        super().__init__(16)
        self.far = self.add(1)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run directory: each start goes on from what the one before has left."""
    return tmp_path_factory.mktemp("parts") / "run"


@pytest.fixture
def start(nodes: TwoNodes, run: Path) -> Iterator[Any]:
    with ExitStack() as lives:

        def start_life(*settings: str) -> Life:
            wanted = [*SETTINGS, nodes.address, "grpo.max_num_steps=100000", *settings]
            return lives.enter_context(Life(run, wanted, patience_s=300))

        yield start_life


def steps(life: Life, more: int) -> None:
    """Let it make so many steps more."""
    assert life.until(lambda: life.step is not None), life.last_line
    wanted = (life.step or 0) + more
    assert life.until(lambda: (life.step or 0) >= wanted), life.last_line


def said_to_be(life: Life, state: str) -> set[str]:
    """Generation workers that its terminal said to be, or to have been, in that state."""
    return set(re.findall(rf"(generation-\d) is {state}", (life.run / "output.txt").read_text()))


def ended(life: Life) -> str:
    """Its last words, once it has failed soon."""
    began = time.monotonic()
    assert not life.until(lambda: time.monotonic() > began + AT_ONCE_S), "it goes on"
    assert life.status == 1
    assert what_is_wrong(life.run) == []
    assert published(life.run)
    return life.last_line


def test_a_run_restarts_generation_workers_and_then_does_without_until_the_last(
    nodes: TwoNodes, start: Any
) -> None:
    life = start("generation.workers=2", "cluster.spread_generation=true", f"{ATTEMPTS}=1")
    steps(life, 3)
    here, there = (actors_of(node, "GenerationWorker") for node in (nodes.head, nodes.far))
    assert (len(here), len(there)) == (1, 1)
    nodes.kill_one("GenerationWorker")
    assert life.until(lambda: len(said_to_be(life, "back")) == 1), life.last_line
    steps(life, 3)
    nodes.cut_off(nodes.far)
    began = time.monotonic()
    assert life.until(lambda: len(said_to_be(life, "restarting")) == 2), life.last_line
    assert time.monotonic() < began + AT_ONCE_S
    assert life.until(lambda: len(said_to_be(life, "back")) == 2), life.last_line
    steps(life, 3)
    nodes.kill_one("GenerationWorker")
    assert life.until(lambda: len(said_to_be(life, "out")) == 1), life.last_line
    (left,) = {"generation-0", "generation-1"} - said_to_be(life, "out")
    steps(life, 3)
    nodes.kill_one("GenerationWorker")
    words = f"WorkerDied: every .* died: .*{left} died: "  # whoever met with it first says so
    assert re.search(words, (last := ended(life))), last
    engines = audit_run(life.run).engines
    assert [engine.joined for engine in engines.values()] == [1, 1], "they confirmed before serving"
    assert all(engine.groups for engine in engines.values())


def test_a_stop_in_the_midst_of_a_save_leaves_a_bundle_and_nothing_else(
    nodes: TwoNodes, run: Path
) -> None:
    Stops(run, [nodes.address], seed=7).stop("finaliser")  # which raises if anything is wrong
    deadline = time.monotonic() + AT_ONCE_S
    while left := [kind for kind in KINDS if actors_of(nodes.head, kind)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("TrainerWorker", "WorkerDied: trainer-0 died: "),
        ("SimpleStorageUnit", "TransferQueue's storage unit 0 died: "),
    ],
)
def test_a_run_that_can_not_do_without_a_part_ends_at_once(
    nodes: TwoNodes, start: Any, kind: str, words: str
) -> None:
    life = start()
    steps(life, 3)
    assert life.says("resuming from")
    nodes.kill_one(kind)
    assert words in (told := ended(life)), told


def test_a_controller_that_died_is_followed_by_another_as_often_as_wished(
    nodes: TwoNodes, start: Any
) -> None:
    life = start("cluster.max_controller_restarts=1")
    steps(life, 3)
    nodes.kill_one("GenerationWorker")  # the only one: the run waits for another
    assert life.until(lambda: said_to_be(life, "back") == {"generation-0"}), life.last_line
    steps(life, 3)
    step = life.step or 0
    nodes.kill_one("SingleControllerActor")
    assert life.until(lambda: life.says("restart 1 of 1")), life.last_line
    assert life.until(lambda: last_report(life.run).get("state") is None), life.last_line
    steps(life, 3)
    assert life.says("resuming from")
    assert (life.step or 0) > step - 2
    assert len(actors_of(nodes.head, "GenerationWorker")) == 1, "that other one has ended as well"
    nodes.kill_one("TransferQueueController")
    assert "TransferQueue's index died: " in (told := ended(life)), told
