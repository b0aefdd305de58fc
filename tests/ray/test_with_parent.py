"""Processes end with the one that started them, also when it gets to do nothing about it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from sc_ray.lives import left_behind
from sc_ray.run_store import run_id

PARENT = """
import contextlib, multiprocessing, time
from sc_ray.with_parent import children_end_with_us

SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
START = f'''
import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=exec, args=({SLEEP!r},))
child.start()
{SLEEP}
'''

with children_end_with_us() if WRAPPED else contextlib.nullcontext():
    multiprocessing.get_context("spawn").Process(target=exec, args=(START,)).start()
time.sleep(1000)
"""


def orphans(*, wrapped: bool) -> int:
    """How many of a child and its child outlive their ancestor's SIGKILL."""
    script = PARENT.replace("WRAPPED", str(wrapped))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    below = [int(parent.stdout.readline()) for _ in range(2)]
    watched = [os.pidfd_open(pid) for pid in below]
    parent.kill()
    parent.wait()
    ended: list[int] = []
    while len(ended) < len(watched):
        more = [fd for fd in watched if fd not in ended]
        ready, _, _ = select.select(more, [], [], 10.0 if wrapped else 0.5)
        if not ready:
            break
        ended += ready
    for pid, fd in zip(below, watched, strict=True):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(fd)
    parent.stdout.close()
    return len(watched) - len(ended)


def test_no_descendant_outlives_a_parent_that_was_killed() -> None:
    assert orphans(wrapped=True) == 0
    assert orphans(wrapped=False) == 2


def test_a_child_whose_parent_died_before_it_could_ask_ends_at_once() -> None:
    script = "import runpy; runpy.run_module('sc_ray.with_parent', run_name='__mp_main__')"
    for parent, status in ((os.getpid(), 0), (1, 1)):
        environment = os.environ | {"SC_RAY_PARENT": str(parent)}
        done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
        assert done.returncode == status


def test_a_process_of_a_run_that_is_left_is_found_by_its_files_in_memory(tmp_path: Path) -> None:
    environment = os.environ | {"VLLM_RPC_BASE_PATH": f"/dev/shm/x.{run_id(tmp_path)}.y"}
    with subprocess.Popen(["sleep", "1000"], env=environment) as left:
        (found,) = left_behind(tmp_path)
        left.kill()
    assert found.startswith(f"pid {left.pid}: sleep")
    assert left_behind(tmp_path) == []
