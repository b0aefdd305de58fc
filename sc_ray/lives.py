"""One start of a run as others see it: what it says, how it ends, and what it leaves behind."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sc_core import (
    RestoreError,
    ScError,
    audit_run,
    candidates,
    verify,
)
from sc_ray.kills import kill_tree
from sc_ray.run_directory import CHECKPOINTS, EVENTS, LOGS, last_report

_LOOK_EVERY_S = 0.005
_WHAT_A_DRIVER_IMPORTS = (
    "sc_ray.__main__",
    "sc_ray.partition",
    "sc_ray.setup",
    "sc_ray.supervise",
    "transformers.tokenization_utils_tokenizers",
)


class Stalled(ScError, TimeoutError):
    """A start got nowhere."""


class Life:
    """One start of `python -m sc_ray train`, from its first instant to its last."""

    def __init__(
        self,
        run: Path,
        settings: Sequence[str],
        *,
        config: str = "demo",
        shown: bool = False,
        patience_s: float = math.inf,
    ) -> None:
        """Start it. What it prints goes to the terminal if `shown`, else to `RUN/output.txt`.

        One that is not shown is forked from a process that has all modules imported, which
        saves a good part of every start but the first.
        """
        self.run = run
        self._patience_s = patience_s  #: of `until`
        run.mkdir(parents=True, exist_ok=True)
        self._told = run / "output.txt"
        arguments = ["train", "--config", config, "--out", str(run), *settings]
        self._driver: subprocess.Popen[bytes] | _Forked
        if shown:
            command = [sys.executable, "-m", "sc_ray", *arguments]
            self._driver = subprocess.Popen(command, start_new_session=True)
        else:
            self._driver = _Forked(arguments, self._told)

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._driver.wait()

    @property
    def pid(self) -> int:
        return self._driver.pid

    @property
    def status(self) -> int | None:
        """With which it ended; None: it goes on."""
        return self._driver.poll()

    @property
    def step(self) -> int | None:
        """The steps that it has behind it; None: its controller does not run yet."""
        told = last_report(self.run)
        ours = told.get("pid") == self.pid and told.get("state") == "running"
        return int(told["step"]) if ours and "step" in told else None

    @property
    def last_line(self) -> str:
        return (self._output().splitlines() or ["it said nothing"])[-1]

    def says(self, words: str) -> bool:
        return words in self._output()

    def is_saving(self) -> bool:
        """Whether a bundle is being staged, sealed or published at this moment."""
        return any((self.run / CHECKPOINTS).glob("tmp_step_*"))

    def until(self, comes: Callable[[], bool]) -> bool:
        """Wait for it; False if the run ended first.

        Raises:
            Stalled: neither happened for very long.
        """
        give_up = time.monotonic() + self._patience_s
        while not comes():
            if self.status is not None:
                return False
            if time.monotonic() > give_up:
                raise Stalled(f"{self.run} is stuck; it last said: {self.last_line}")
            time.sleep(_LOOK_EVERY_S)
        return True

    def end(self) -> int:
        """Wait for its end, however long; its status."""
        return self._driver.wait()

    def kill(self) -> int:
        """SIGKILL the driver, if it lives, and all below it; returns how many those were."""
        return 0 if self.status is not None else kill_tree(self.pid)

    def _output(self) -> str:
        return self._told.read_text(errors="replace")


class _Forked:
    """A driver as `subprocess.Popen` would start it, in a session of its own."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_WHAT_A_DRIVER_IMPORTS])
        output.write_bytes(b"")
        self._process = context.Process(target=_drive, args=(arguments, str(output)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _drive(arguments: Sequence[str], output: str) -> None:
    """In the forked process: what `python -m sc_ray` does."""
    from sc_ray.__main__ import keep_quiet, main

    os.setsid()
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    keep_quiet()
    sys.exit(main(list(arguments)))


def what_is_wrong(run: Path) -> list[str]:
    """What the run's log and bundles say against it, now that nobody writes there; empty: nothing.

    Every prompt must be accounted for once, and every bundle that is listed must verify.
    """
    found = []
    key = os.environ.get("SC_BUNDLE_KEY", "").encode() or None
    for bundle in candidates(run / CHECKPOINTS):
        try:
            verify(bundle, key=key)
        except RestoreError as exc:
            found.append(str(exc))
    if (run / EVENTS).exists():
        report = audit_run(run, key=key)
        if not report.ok:
            found.append(str(report))
    return found


def left_behind(run: Path) -> list[str]:
    """Files in memory, and processes of Ray and vLLM, that outlived the last start of `run` here.

    Ray's are known by the name of their session, vLLM's by that of their files in memory, which
    holds the run's id.
    """
    from sc_ray.run_store import run_id

    marks = [run_id(run)]
    found = [f"/dev/shm/{path.name}" for path in Path("/dev/shm").glob(f"*{marks[0]}*")]
    link = run / LOGS / "ray"
    if link.is_symlink():
        marks.append(link.readlink().parent.name)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            command = (process / "cmdline").read_text(errors="replace")
            told = command + (process / "environ").read_text(errors="replace")
            if any(mark in told for mark in marks):
                found.append(f"pid {process.name}: {command.replace(chr(0), ' ')[:100]}")
    return found
