"""Real Ray, real TransferQueue, real clocks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Any

# Read when Ray and TransferQueue are imported, here and in every process that Ray starts.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TQ_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import ray

from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec

LONGEST = (
    "test_parts_die.py",
    "test_train_command.py",
    "test_scale_out.py",
    "test_chaos.py",
    "test_engines.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first, so that no process ends long after the other."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """A virtual clock would jump over deadlines while other threads and processes work."""
    if request.param == "trio":
        return "trio", {}
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests of a process; its CPUs are numbers only.

    Ray gives up a start that takes 30 s, so those of two processes take turns.
    """
    with (tmp_path_factory.getbasetemp().parent / "ray.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def bootstrap(local_ray: None) -> Iterator[TransferQueueBootstrap]:
    """One TransferQueue for all tests. Who needs an untouched store discards what others did."""
    with TransferQueueBootstrap(TransferQueueSpec(deadline_s=20)) as started:
        yield started
