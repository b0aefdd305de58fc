"""Whether the nodes of a run see the files that they must share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sc_core import (
    ConfigError,
)
from sc_ray.cluster import living_nodes

_PROBE = ".shared-"


def check_shared(
    run_dir: Path,
    users: Mapping[str, Sequence[str]],
    *,
    writers: frozenset[str],
    deadline_s: float,
) -> None:
    """Have each node find a file that is written here, and the writing ones write one as well.

    Blocks, for about as long as a process takes to start. Nothing of it stays.

    Args:
        users: names of the processes that use the directory there, by the node's id.
        writers: those nodes that also write there.

    Raises:
        ConfigError: a node sees another directory, or none; says which, and what to do.
    """
    run_dir = run_dir.resolve()
    probe = run_dir / f"{_PROBE}{uuid4().hex}"
    look_there = ray.remote(num_cpus=0, max_retries=0)(_look)
    answers = {node: probe.with_name(f"{probe.name}.{node}") for node in sorted(users)}
    try:
        probe.touch(mode=0o600)
        looks = {
            node: look_there.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(str(probe), str(answer) if node in writers else None)
            for node, answer in answers.items()
        }
        for node, look in looks.items():
            try:
                problem = ray.get(look, timeout=deadline_s)
            except RayError as exc:
                problem = f"can't look: {' '.join(str(exc).split())}"
            if not problem and node in writers and not answers[node].exists():
                problem = f"writes to a {run_dir} of its own"
            if problem:
                raise ConfigError(_told(node, problem, users[node], run_dir))
    except OSError as exc:
        raise ConfigError(f"the run directory {run_dir} can't be written: {exc}") from exc
    finally:
        for path in (probe, *answers.values()):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _told(node: str, problem: str, users: Sequence[str], run_dir: Path) -> str:
    found = living_nodes().get(node)
    where = node if found is None else found["NodeManagerAddress"]
    return (
        f"node {where} {problem}, and {', '.join(users)} would use it there: put the run directory"
        f" ({run_dir}) on a filesystem that all nodes share, by one path, or set"
        " cluster.placement=driver_node"
    )


def _look(probe: str, answer: str | None) -> str:
    """On the node: what is wrong there, if anything."""
    if not os.path.exists(probe):
        return f"does not see what is in {os.path.dirname(probe)}"
    if answer is not None:
        try:
            Path(answer).touch(mode=0o600)
        except OSError as exc:
            return f"can't write to {os.path.dirname(answer)}: {exc.strerror or exc}"
    return ""
