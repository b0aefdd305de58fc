"""What every task of a run waits for, read off its stack: it costs nothing until somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Literal

import anyio
import msgspec

from sc_core.barrier import Section
from sc_core.records import LedgerRecord, Prompt
from sc_core.watched import Watched

Kind = Literal["call", "rollout", "barrier", "fact", "back-off", "tasks", "idle", "other"]
_LIBRARIES = ("anyio", "asyncio", "trio", "contextlib", "outcome", "uvloop")
_OWN_WORDS = ("sc_core.calls", "sc_core.watched", "sc_core.barrier", "sc_core.state")
"""Modules in which others wait: a place in them says less than the place that called them."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One task, and the innermost thing of ours that it waits for."""

    task: str  #: its name
    depth: int = 0  #: below the task of the run
    kind: Kind = "other"
    what: str = ""  #: a port call, a barrier section, a fact
    age_s: float | None = None  #: since when, where that is known
    at_most_s: float | None = None  #: its own deadline
    where: str = ""  #: file, line and function of sc_core, then those of the port beyond it
    group_id: str | None = None  #: whose attempt it is, or part of one

    def __str__(self) -> str:
        since = "" if self.age_s is None else f" for {seconds(self.age_s)}"
        bound = "" if self.at_most_s is None else f" of {seconds(self.at_most_s)}"
        return f"{self.what}{since}{bound}"


def seconds(duration_s: float) -> str:
    """As people read it: never `3.6e+03`."""
    return f"{duration_s:.1f}".removesuffix(".0") + " s"


def waits_below(root: int | None, *, rollout_s: float) -> list[Wait]:
    """The task `root` and all below it, parents first, siblings by name.

    Empty outside the event loop, and when `root` has ended. `rollout_s` is the deadline of a
    rollout call: its stack holds the end of it only.
    """
    try:
        now, tasks = anyio.current_time(), anyio.get_running_tasks()
    except anyio.NoEventLoopError:
        return []
    children: dict[int | None, list[anyio.TaskInfo]] = {}
    for task in tasks:
        children.setdefault(task.parent_id, []).append(task)
    found: list[Wait] = []
    rest = [(task, 0) for task in tasks if task.id == root]
    while rest:
        task, depth = rest.pop()
        found.append(_wait_of(task, depth, now, rollout_s))
        below = [(child, depth + 1) for child in children.get(task.id, ())]
        rest += sorted(below, key=lambda each: (each[0].name or "", each[0].id), reverse=True)
    return found


def tree(waits: Sequence[Wait], at_most: int = 2) -> list[str]:
    """One line per task, indented below its parent; of many of a name the longest waiting ones."""
    lines: list[str] = []
    _grow(waits, 0, lines, at_most)
    return lines


def _grow(waits: Sequence[Wait], start: int, lines: list[str], at_most: int) -> None:
    families: dict[str, list[Sequence[Wait]]] = {}
    for family in _families(waits[start:]):
        families.setdefault(family[0].task, []).append(family)
    for name, same in families.items():
        same.sort(key=lambda family: -max(wait.age_s or 0.0 for wait in family))
        shown = [family for family in same if family[0].kind != "idle"][:at_most]
        for family in shown:
            head = family[0]
            where = f" ({head.where})" if head.where else ""
            lines.append(f"{'  ' * head.depth}{name}: {head}{where}")
            _grow(family, 1, lines, at_most)
        others = Counter(f[0].kind for f in same if not any(f is one for one in shown))
        if others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common())
            more = "and " if shown else ""
            lines.append(f"{'  ' * same[0][0].depth}{name}: {more}{kinds}")


def _families(waits: Sequence[Wait]) -> list[Sequence[Wait]]:
    """Each task at the uppermost depth, with those below it."""
    heads = [number for number, wait in enumerate(waits) if wait.depth == waits[0].depth]
    return [waits[a:b] for a, b in pairwise([*heads, len(waits)])]


# one task ------------------------------------------------------------------------------


def _wait_of(task: anyio.TaskInfo, depth: int, now: float, rollout_s: float) -> Wait:
    name = (task.name or "task").rpartition(".")[2]
    if _runs(task.coro):
        return Wait(task=name, depth=depth, what="nothing: it writes this report")
    frames = _stack(task.coro)
    found: dict[str, Any] | None = None
    innermost: FrameType | None = None  # of ours
    place: FrameType | None = None
    group_id: str | None = None
    port = ""
    for number in reversed(range(len(frames))):  # the first that says something counts
        frame, module = frames[number], _module(frames[number])
        if not _is_ours(module):
            continue
        if innermost is None:
            innermost = frame
            beyond = frames[number + 1] if number + 1 < len(frames) else None
            if beyond is not None and beyond.f_code.co_qualname == "TaskGroup.__aexit__":
                found = {"kind": "tasks", "what": "its tasks"}
            elif beyond is not None and not _module(beyond).startswith(_LIBRARIES):
                port = f" > {_place(beyond)}"
        if place is None and module not in _OWN_WORDS:
            place = frame
        here = frame.f_locals
        group_id = group_id or _group_of(here)
        found = found or _described(frame, here, now, rollout_s)
        if found is not None and group_id is not None and place is not None:
            break
    if innermost is None:
        return Wait(task=name, depth=depth, what="its first step")
    found = found or {"what": innermost.f_code.co_name}
    where = _place(place or innermost) + port
    return Wait(task=name, depth=depth, where=where, group_id=group_id, **found)


def _runs(awaited: object) -> bool:
    return isinstance(awaited, CoroutineType) and awaited.cr_running


def _stack(awaited: object) -> list[FrameType]:
    """The frames of a coroutine and of what it awaits, outermost first."""
    frames: list[FrameType | None] = []
    while True:
        match awaited:
            case CoroutineType():
                frames.append(awaited.cr_frame)
                awaited = awaited.cr_await
            case GeneratorType():
                frames.append(awaited.gi_frame)
                awaited = awaited.gi_yieldfrom
            case AsyncGeneratorType():
                frames.append(awaited.ag_frame)
                awaited = awaited.ag_await
            case _:
                return [frame for frame in frames if frame is not None]


def _described(
    frame: FrameType, here: dict[str, Any], now: float, rollout_s: float
) -> dict[str, Any] | None:
    """What a function of sc_core that waits has in its own variables."""
    match here:
        case {"self": Section() as section}:
            return {"kind": "barrier", "what": f"the barrier, for {section!r}"}
        case {"self": Watched(), "what": str(what)}:
            return {"kind": "fact", "what": what or "a change"}
        case {
            "call": str(call),
            "deadline_s": float() | int() as deadline_s,
            "in_time": anyio.CancelScope() as in_time,
        }:
            age_s = max(0.0, now - in_time.deadline + deadline_s)  # its end is on the stack
            return {"kind": "call", "what": call, "age_s": age_s, "at_most_s": deadline_s}
        case {
            "prompt": Prompt() as prompt,
            "sibling": int(sibling),
            "in_time": anyio.CancelScope() as in_time,
        }:
            what = f"rollout of sibling {sibling} of group {prompt.group_id}"
            age_s = max(0.0, now - in_time.deadline + rollout_s)
            return {"kind": "rollout", "what": what, "age_s": age_s, "at_most_s": rollout_s}
        case {"backoff_s": float() | int() as backoff_s}:
            return {"kind": "back-off", "what": f"{backoff_s:g} s before the next attempt"}
    if frame.f_code.co_qualname == "_FreeSlot.given":
        return {"kind": "idle", "what": "the next attempt"}
    return None


def _group_of(here: dict[str, Any]) -> str | None:
    match here:
        case {"record": LedgerRecord() as of} | {"prompt": Prompt() as of}:
            return str(of.group_id)
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _is_ours(module: str) -> bool:
    return module.startswith("sc_core.") and not module.startswith("sc_core.testing")


def _place(frame: FrameType) -> str:
    file = _module(frame).removeprefix("sc_core.").replace(".", "/")
    return f"{file}.py:{frame.f_lineno} {frame.f_code.co_name}"
