"""Ray, started quietly, with room for every process of a run, and ended by whoever started it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sc_core import (
    ConfigError,
)
from sc_ray.settings import TrainConfig

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 256 << 20
"""Rows and weights do not go through it; only prompts, completions and reports do."""
_START_ATTEMPTS = 3  #: Ray gives up a start that takes 30 s, as it may on a busy machine
_FREED_S = 10.0
"""Until a cluster knows that the CPUs of processes which have just ended, as those of an earlier
start, are free again."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run talks to nobody outside
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else every start prints a notice about it
    "TQ_LOGGING_LEVEL": "WARNING",
    "TQ_NUM_THREADS": "1",
}


def start_ray(config: TrainConfig, logs: Path, on_exit: ExitStack) -> None:
    """Start a Ray of our own, or join the one that `cluster.address` names.

    Blocks for some seconds. Call it in the main thread: Ray's processes end with the thread that
    started them. `logs / "ray"` becomes a link to what they print.

    Raises:
        ConfigError: it has too few CPUs, in all or on this node. Those of a placement group may
            be yet to come.
    """
    _be_quiet()
    if config.cluster.address is None and not ray.is_initialized():
        check_cpus(config, config.cluster.num_cpus)
        session = start_local_ray(config.cluster.num_cpus, on_exit)
        link = logs / "ray"
        with suppress(OSError):  # a convenience, worth no failure
            link.unlink(missing_ok=True)
            link.symlink_to(session / "logs")
        return
    if not ray.is_initialized():
        on_exit.callback(ray.shutdown)
        with _own_sigterm():
            ray.init(
                address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR
            )
    if config.cluster.placement == "driver_node":
        give_up = time.monotonic() + _FREED_S
        while (free := ray.available_resources().get("CPU", 0.0)) < config.cpus_needed:
            if time.monotonic() > give_up:
                check_cpus(config, free)
            time.sleep(0.1)
    here = living_nodes()[ray.get_runtime_context().get_node_id()]
    needed, there = config.cpus_needed_here, here["Resources"].get("CPU", 0.0)
    if there < needed:
        raise ConfigError(
            f"the run needs {needed} CPUs of Ray on the driver's node, which has {there:g}: start"
            f" Ray there with --num-cpus={needed}; they need not be real ones"
        )


def start_local_ray(num_cpus: int, on_exit: ExitStack) -> Path:
    """Start a Ray of our own, which ends when `on_exit` closes; returns its session's directory."""
    _be_quiet()
    on_exit.callback(ray.shutdown)
    with _other_process_group(), _own_sigterm():
        started = _start(num_cpus)
    return Path(started.address_info["session_dir"])


def _start(num_cpus: int) -> Any:
    attempts_left = _START_ATTEMPTS
    while True:
        attempts_left -= 1
        try:
            return ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
        except Exception as exc:  # Ray has no class of its own for this
            if "timed out during startup" not in str(exc) or not attempts_left:
                raise
            logger.warning("Ray did not start within its 30 s on this busy machine; once more")
            ray.shutdown()


def check_cpus(config: TrainConfig, there: float) -> None:
    """Refuse a cluster in which some process would wait for a CPU for ever.

    Raises:
        ConfigError: with how many are needed and how many there are.
    """
    if there < config.cpus_needed:
        raise ConfigError(
            f"the run needs {config.cpus_needed} CPUs of Ray and the cluster has {there:g}:"
            f" set cluster.num_cpus={config.cpus_needed}; they need not be real ones"
        )


def this_node() -> NodeAffinitySchedulingStrategy:
    """For actors that share files with the driver."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def living_nodes() -> dict[str, Mapping[str, Any]]:
    """What Ray tells of the nodes of its cluster that it takes for alive, by their ids. Blocks."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def kill(actor: Any) -> None:
    """End an actor's process, if it is still there."""
    with suppress(Exception):  # it is gone, or Ray is
        ray.kill(actor)


def _be_quiet() -> None:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself; give it back to who had it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _other_process_group() -> Iterator[None]:
    """Processes started inside get none of the signals that are sent to our process group.

    `timeout` and batch systems send SIGTERM to all of it: the driver is to save with Ray still
    alive. Not needed in the foreground of a terminal, whose Ctrl-C Ray ignores by itself, and
    not possible for the leader of a session or group.
    """
    group = os.getpgrp()
    with suppress(OSError):
        if os.tcgetpgrp(0) == group:
            yield
            return
    with suppress(PermissionError):
        os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpgid(0, group)
