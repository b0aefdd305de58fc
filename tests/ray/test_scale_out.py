"""A run over several nodes of a Ray cluster, by a placement group, and engines that join later.

All starts use one run directory: each goes on from what the one before has left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes

from sc_core import audit_run
from sc_ray.chaos import SETTINGS
from sc_ray.lives import Life, what_is_wrong
from sc_ray.run_directory import EVENTS, published

SPREAD = (
    "cluster.placement=spread",
    "cluster.storage_units=2",
    "policy.workers=2",
    "generation.workers=2",
    "generation.max_workers=3",
)
"""Takes the 5 CPUs of the first node and the 3 of the second one to the last; the third engine
waits for another."""
WORKERS = ("TrainerWorker", "GenerationWorker", "SimpleStorageUnit")
OF_THE_DRIVER = ("SingleControllerActor", "TransferQueueController")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(5)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scale-out") / "run"


@pytest.fixture
def start(nodes: RayNodes, run: Path) -> Iterator[Any]:
    with ExitStack() as lives:

        def start_life(*settings: str) -> Life:
            wanted = [*SETTINGS, nodes.address, *SPREAD, *settings]
            return lives.enter_context(Life(run, wanted, patience_s=300))

        yield start_life


def test_a_run_that_finds_no_room_says_what_for_and_what_there_is(
    nodes: RayNodes, start: Any
) -> None:
    began = time.monotonic()
    life = start("cluster.start_deadline_s=3")
    assert life.end() == 2
    assert time.monotonic() < began + 60
    assert life.says("waiting for room in the cluster: 3 CPUs on the driver's node and 5 x 1 CPU")
    assert life.last_line == (
        "sc_ray: error: cluster.placement is spread, and within 3 s (cluster.start_deadline_s) Ray"
        " found no room for 3 CPUs on the driver's node and 5 x 1 CPU on any; the cluster has"
        " 1 node: 5 CPUs (the driver's); free of all that: 5 CPUs"
    )


def test_a_run_is_spread_over_nodes_and_uses_one_that_is_added(
    nodes: RayNodes, run: Path, start: Any
) -> None:
    far = nodes.add(3)
    life = start("grpo.max_num_steps=100000")
    assert life.until(lambda: (life.step or 0) >= 3), life.last_line
    assert nodes.kinds(nodes.head, *WORKERS) == nodes.kinds(far, *WORKERS) == (1, 1, 1)
    assert nodes.kinds(nodes.head, *OF_THE_DRIVER) == (1, 1)
    assert life.until(lambda: life.says("generation-2 is awaited: it joins once")), life.last_line

    added = nodes.add(1)
    assert life.until(lambda: life.says("generation-2 has joined")), life.last_line
    assert nodes.kinds(added, *WORKERS) == (0, 1, 0)
    assert life.until(lambda: has_served(run, "generation-2")), life.last_line
    nodes.lose(added)
    assert life.until(lambda: life.says("generation-2 is awaited: generation-2 died: ")), (
        life.last_line
    )
    step = life.step or 0
    assert life.until(lambda: (life.step or 0) >= step + 3), life.last_line

    nodes.lose(far)
    began = time.monotonic()
    assert not life.until(lambda: time.monotonic() > began + 60), "it goes on"
    assert life.status == 1
    assert " died: it can't be reached, as if its node were gone: " in life.last_line
    assert what_is_wrong(run) == []
    assert published(run)
    joined = audit_run(run).engines["generation-2"]
    assert joined.joined == 1 and joined.groups


def test_it_goes_on_with_fewer_workers_and_ends_though_an_engine_never_came(
    nodes: RayNodes, run: Path, start: Any
) -> None:
    reached = int(next(iter(published(run))).removeprefix("step_"))
    far = nodes.add(1)
    life = start(
        f"grpo.max_num_steps={reached + 4}",
        "cluster.placement=pack",
        "policy.workers=1",
        "generation.workers=1",
        "generation.max_workers=2",
    )
    assert life.until(lambda: life.step is not None), life.last_line
    on_each = [nodes.kinds(node, *WORKERS) for node in (nodes.head, far)]
    assert tuple(map(sum, zip(*on_each, strict=True))) == (1, 1, 2)
    assert sum(on_each[1]) == 1, "the one for which there was no room on the first node"
    assert life.end() == 0, life.last_line
    assert life.says("resuming from") and life.says("generation-1 is awaited")
    assert f"step_{reached + 4}" in life.last_line
    assert what_is_wrong(run) == []


def has_served(run: Path, engine: str) -> bool:
    """Whether a group was committed with a sibling of that engine."""
    lines = (run / EVENTS).read_text().splitlines()
    return any(f'"{engine}":' in line.partition('"served":')[2] for line in lines)
