"""Finds and ends processes as a crash does, by SIGKILL."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_tree(root: int) -> int:
    """SIGKILL a process and all its descendants, in whatever session; returns how many.

    All are stopped before the first one is killed, so that none can start another, and none is
    left whose parent, by which it is found, is gone.
    """
    stopped: set[int] = set()
    while found := descendants(root) - stopped:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(stopped)


def descendants(root: int) -> set[int]:
    """`root`, if it lives, and every living process below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
                    if int(entry.name) == root:
                        children.setdefault(-1, []).append(root)
    found: set[int] = set()
    rest = children.get(-1, [])
    while rest:
        found.update(rest)
        rest = [child for pid in rest for child in children.get(pid, ())]
    return found


def actors_of(root: int, kind: str) -> list[int]:
    """Living processes below `root` that are Ray actors of the class `kind`, by their title."""
    found = []
    for pid in sorted(descendants(root)):
        with suppress(OSError):  # it ended meanwhile
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if title.startswith(f"ray::{kind}"):
                found.append(pid)
    return found
