"""What the terminal shows of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

import msgspec

_LINE_EVERY_S = 1.0
"""Between two lines of steps where no line can be overwritten, as in a log file."""


class Console(Protocol):
    """Lines for people, and the present state of the run."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def show(self, status: Mapping[str, Any]) -> None:
        """What `status` of the actor says, with `max_steps` and `bundles`."""

    def rest(self) -> None:
        """There is no state any more, until the next `show`."""

    def leave(self) -> None:
        """The process ends now. Callable from a signal handler."""


def console_on(stream: TextIO) -> Console:
    """A panel on a terminal that can move its cursor; lines anywhere else."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainConsole(stream)
    from sc_ray.watching.live import LiveConsole

    return LiveConsole(stream)


def let_go(stream: IO[str]) -> None:
    """What `stream` still holds, and is given from now on, goes nowhere, and is no error."""
    with suppress(OSError, ValueError):  # it is no file, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class PlainConsole:
    """Lines that stay: each step gets one at most, and a second one."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last_step: int | None = None  #: that has a line of its own
        self._last_at = float("-inf")

    def say(self, line: str) -> None:
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except OSError:  # nobody reads any more, or the disk is full; the run goes on
            let_go(self._stream)

    def show(self, status: Mapping[str, Any]) -> None:
        line = step_line(status, status.get("max_steps", 0))
        if not line or self._clock() - self._last_at < _LINE_EVERY_S:
            return
        step = status["last_metrics"]["step"]
        if step != self._last_step:
            self.say(line)
            self._last_step, self._last_at = step, self._clock()

    def rest(self) -> None:
        pass

    def leave(self) -> None:
        pass


def step_line(status: Mapping[str, Any], max_steps: int) -> str:
    """The last finished step in one line; empty before the first."""
    last = status.get("last_metrics") or {}
    if "timing/train/total_step_time" not in last:
        return ""  # no step yet, or one that is just ending
    waited_s = last.get("timing/rollout_checkpoint/barrier_wait_seconds", 0.0)
    val = (status.get("last_evaluation") or {}).get("val/reward")
    return (
        f"step {last['step']}/{max_steps}"
        f"  reward {last['train/reward']:.3f}"
        f"{'' if val is None else f'  val {val:.3f}'}"
        f"  staleness {last['train/staleness_versions_mean']:.2f}"
        f"  places {status['places_held']}/{status['places_capacity']}"
        f"  barrier wait {1000 * waited_s:.0f} ms"
        f"  {last['timing/train/total_step_time']:.2f} s/step"
    )


def ago(age_s: float) -> str:
    """How long ago, as people say it."""
    for longest_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if age_s < longest_s:
            return (
                f"{age_s / unit_s:.1f} s ago" if unit == "s" else f"{age_s / unit_s:.0f} {unit} ago"
            )
    return f"{age_s / 86400:.0f} days ago"


def engines_away(status: Mapping[str, Any]) -> dict[str, str]:
    """Engines that do not serve now: what each is, and why."""
    out = {engine: f"out: {why}" for engine, why in (status.get("engines_out") or {}).items()}
    return {**(status.get("engines_away") or {}), **out}


def learning_curve(metrics: Path, window: int = 10) -> str:
    """Mean reward over the first and the last steps of a run, from its metrics file."""
    rewards: dict[int, float] = {}
    held_out = ""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return ""
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue  # torn by a crash
        if isinstance(entry.get("train/reward"), int | float):
            rewards[entry["step"]] = entry["train/reward"]  # a step made again counts once
        if isinstance(entry.get("val/reward"), int | float):
            held_out = f"; {entry['val/reward']:.3f} on held-out prompts after step {entry['step']}"
    if not rewards:
        return ""
    by_step = [rewards[step] for step in sorted(rewards)]
    window = max(1, min(window, len(by_step) // 2))
    first, last = by_step[:window], by_step[-window:]
    return (
        f"mean reward {sum(first) / window:.3f} in the first {window} steps,"
        f" {sum(last) / window:.3f} in the last {window}{held_out}"
    )
