"""Whether the nodes of a run have the files that they need."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sc_core import (
    ConfigError,
)
from sc_ray.cluster import living_nodes

_PROBE = ".shared-"


class Use(msgspec.Struct, kw_only=True):
    """What the processes of one node need to find there."""

    processes: list[str] = []  #: their names
    shares: bool = False  #: the run directory
    writes: bool = False  #: into it


def check_files(
    run_dir: Path, uses: Mapping[str, Use], *, model: str | None, deadline_s: float
) -> None:
    """Have each node look for the files that it needs: one written here, if it shares the run
    directory, and the model. A node that writes there does so.

    Blocks, for about as long as a process takes to start. Nothing of it stays.

    Args:
        uses: by the node's id.
        model: a directory that every node needs.

    Raises:
        ConfigError: a node sees another run directory, or none, or no model; says which node.
    """
    run_dir = run_dir.resolve()
    probe = run_dir / f"{_PROBE}{uuid4().hex}"
    answers = {node: probe.with_name(f"{probe.name}.{node}") for node in sorted(uses)}
    look_there = ray.remote(num_cpus=0, max_retries=0)(_look)
    try:
        probe.touch(mode=0o600)
        looks = {
            node: look_there.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(
                str(probe) if uses[node].shares else None,
                str(answer) if uses[node].writes else None,
                model,
            )
            for node, answer in answers.items()
        }
        for node, look in looks.items():
            try:
                problem = ray.get(look, timeout=deadline_s)
            except RayError as exc:
                problem = f"can't look for them: {' '.join(str(exc).split())}"
            if not problem and uses[node].writes and not answers[node].exists():
                problem = f"writes to a {run_dir} of its own"
            if problem:
                raise ConfigError(_told(node, uses[node].processes, problem))
    except OSError as exc:
        raise ConfigError(f"the run directory {run_dir} can't be written: {exc}") from exc
    finally:
        for path in (probe, *answers.values()):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _told(node: str, processes: Sequence[str], problem: str) -> str:
    found = living_nodes().get(node)
    where = node if found is None else found["NodeManagerAddress"]
    return (
        f"node {where}, which is to have {', '.join(processes)}, {problem}; every node needs the"
        " run directory on a filesystem that all share, and the model, by the same paths (or set"
        " cluster.placement=driver_node)"
    )


def _look(probe: str | None, answer: str | None, model: str | None) -> str:
    """On the node: what is wrong there, if anything."""
    if probe is not None and not os.path.exists(probe):
        return f"does not see what is in {os.path.dirname(probe)}"
    if model is not None and not os.path.isdir(model):
        return f"has no directory {model}"
    if answer is not None:
        try:
            Path(answer).touch(mode=0o600)
        except OSError as exc:
            return f"can't write to {os.path.dirname(answer)}: {exc.strerror or exc}"
    return ""
