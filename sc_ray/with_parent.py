"""Processes that end when the one that started them does, however that comes about.

A library starts them by `multiprocessing`, and gives no say in how. So each new interpreter is
made to run this module first, before it imports or builds anything.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

_PARENT = "SC_RAY_PARENT"
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Whatever `multiprocessing` spawns in this context gets a SIGKILL when it has no parent.

    So does what these processes spawn in their turn. To Linux the parent is the thread that
    spawned, and its end is enough: spawn from one that stays. Elsewhere this does nothing.
    """
    usual: Any = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        told: dict[str, Any] = usual(name)
        told.pop("init_main_from_path", None)  # the parent's main module, which no child needs
        return {**told, "init_main_from_name": "sc_ray.with_parent"}

    os.environ[_PARENT] = str(os.getpid())
    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = usual


def _end_with_parent() -> None:
    parent = os.environ.get(_PARENT)
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before we asked
            os._exit(1)
        os.environ[_PARENT] = str(os.getpid())


if __name__ == "__mp_main__":
    _end_with_parent()
