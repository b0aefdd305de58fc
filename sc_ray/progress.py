"""What the terminal shows of a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

_LINE_EVERY_S = 1.0
"""Between two lines of steps where no line can be overwritten, as in a log file."""


class Console:
    """Lines for people. On a terminal, the state of the run is one line that changes in place."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._clock = clock
        self._shown = 0  #: characters of the line that may be overwritten
        self._last_step: int | None = None  #: that has a line of its own
        self._last_at = float("-inf")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._write(f"{self._erase()}{line}\n")

    def state(self, step: int, line: str) -> None:
        """The present state. Where lines stay, each step gets one at most, and a second one."""
        if self._live:
            line = line[: shutil.get_terminal_size().columns - 1]
            self._write(self._erase() + line)
            self._shown = len(line)
        elif step != self._last_step and self._clock() - self._last_at >= _LINE_EVERY_S:
            self._write(f"{line}\n")
            self._last_step, self._last_at = step, self._clock()

    def _erase(self) -> str:
        shown, self._shown = self._shown, 0
        return f"\r{' ' * shown}\r" if shown else ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:  # nobody reads any more; the run goes on
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
        except msgspec.DecodeError:
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
