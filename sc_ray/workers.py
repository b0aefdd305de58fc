"""What a call to a worker process raises when the process itself is gone."""

from __future__ import annotations

from typing import TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from sc_core import (
    WorkerDied,
)
from sc_ray.bridge import await_ref

R = TypeVar("R")


async def answer(worker: str, ref: ray.ObjectRef[R]) -> R:
    """The value of a call to the worker of that name; cancels and errors as in `await_ref`.

    Raises:
        WorkerDied: its process is gone, or never came up.
    """
    try:
        return await await_ref(ref)
    except RayActorError as exc:
        raise died(worker, exc) from exc


def died(worker: str, report: RayActorError) -> WorkerDied:
    """Ray's report of a death in one line: what follows the last indented line of it.

    Without Ray's list of what often kills a process, which is longer than all the rest.
    """
    reason: list[str] = []
    for line in reversed(str(report).rstrip().splitlines()):
        if line[:1].isspace():
            break
        reason.insert(0, line)
    start = "it could not start: " if report.actor_init_failed else ""
    told = " ".join(reason).partition(" Some common causes include")[0].strip()
    if isinstance(report, ActorUnavailableError):
        cause = told.partition("unavailable: ")[2].removeprefix(
            "The actor is temporarily unavailable:"
        )
        told = f"it can't be reached, as if its node were gone: {cause.partition(' rpc_code')[0]}"
    if not told:  # of a node that has fallen silent Ray has indented lines only
        told = str(report).strip().splitlines()[-1].strip() if str(report).strip() else "it is gone"
    return WorkerDied(worker, start + told)
