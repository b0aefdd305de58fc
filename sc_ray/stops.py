"""`python -m sc_ray.stops`: a real run, stopped by SIGTERM again and again, resumed and audited.

Each stop comes at another moment, from the first instant of a start to the midst of a save.
After each of them the run must have ended in time, with the documented status, one complete
bundle of the last finished step, a clean audit and no process left. The last start runs on to
its end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from sc_core import (
    ScError,
)
from sc_ray.chaos import LOOPS, SETTINGS
from sc_ray.lives import Life, left_behind, what_is_wrong
from sc_ray.run_directory import CHECKPOINTS, EVENTS, last_report, published

Moment = Literal[
    "before Ray",
    "generation",
    "TransferQueue",
    "restore",
    "first step",
    "trainer call",
    "weight sync",
    "window",
    "finaliser",
    "between steps",
    "twice",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
"""In this order the first comes while there is nothing to save yet, the others afterwards."""
GRACE_S = 60.0
"""From the signal to the end of the process, which batch systems grant at the least."""
_STALLED_S = 600.0
_GONE_S = 30.0
"""Ray's daemons notice within some seconds that a driver left without shutting them down."""
_UNTOUCHED = "before training had begun; nothing changed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sc_ray.stops", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/stops"), metavar="DIRECTORY")
    parser.add_argument("--stops", type=int, default=len(MOMENTS), help="how many")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="of which kinds, in turn")
    parser.add_argument("--seed", type=int, default=None, help="of the pauses before a signal")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    moments = options.moments.split(",")
    if unknown := set(moments) - set(MOMENTS):
        parser.error(f"no such moment: {', '.join(sorted(unknown))}")
    if options.out.exists() and any(options.out.iterdir()):
        return _fail(f"{options.out} is not empty; remove it first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the start under way
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1000)
    _say(f"seed {seed}; the same pauses again with --seed {seed}")
    try:
        _say(Stops(options.out / "run", options.settings, seed=seed).run(moments, options.stops))
    except ScError as exc:
        return _fail(str(exc))
    return 0


class Stops:
    """One session of stops.

    Raises:
        ScError: from `run` and `stop`; a start failed, or a stop did not do as it should.
    """

    def __init__(self, run: Path, settings: Sequence[str], *, seed: int) -> None:
        self._run = run
        self._settings = [*SETTINGS, *settings]
        self._random = random.Random(seed)
        self._starts = 0
        self._longest_s = 0.0

    def run(self, moments: Sequence[Moment], stops: int) -> str:
        """Stop so often, let the last start end, and return the result in one line."""
        for at in range(stops):
            self.stop(moments[at % len(moments)])
        newest = _step(next(iter(published(self._run)), "step_0"))
        with self._start(newest + 2) as life:
            status = life.end()
        if status != 0:
            raise ScError(f"the last start ended with status {status}: {life.last_line}")
        self._check(what_is_wrong(self._run) + left_behind(self._run))
        return (
            f"{stops} stops at {len(set(moments[:stops]))} kinds of moments: each left what it"
            f" should within {self._longest_s:.1f} s, and the run came to its end; every audit"
            " clean, no process left"
        )

    def _start(self, steps: int) -> Life:
        loop = LOOPS[self._starts % len(LOOPS)]
        self._starts += 1
        asked = [*self._settings, f"event_loop={loop}", f"grpo.max_num_steps={steps}"]
        return Life(self._run, asked, patience_s=_STALLED_S)

    def stop(self, moment: Moment) -> None:
        """Start the run, stop it at that moment, and check all that a stop promises."""
        before = published(self._run)
        with self._start(100_000) as life:
            if not self._comes(life, moment):
                raise ScError(f"{moment}: a start ended by itself: {life.last_line}")
            os.kill(life.pid, signal.SIGTERM)
            began = time.monotonic()
            if moment == "twice":
                life.until(lambda: life.says("once more ends at once"))
                os.kill(life.pid, signal.SIGTERM)
            life.until(lambda: time.monotonic() > began + GRACE_S)
            took_s = time.monotonic() - began
            if life.status is None:
                raise ScError(f"{moment}: the run goes on {GRACE_S:g} s after SIGTERM")
        self._longest_s = max(self._longest_s, took_s)
        after, step = published(self._run), _last_step(self._run / EVENTS)
        untouched = moment == "twice" or life.says(_UNTOUCHED)
        expected = 1 if moment == "twice" or not after else 3
        wrong = what_is_wrong(self._run)
        if life.status != expected:
            wrong.append(f"status {life.status} and not {expected}: {life.last_line}")
        if untouched and moment != "twice" and after != before:
            wrong.append(f"bundles changed from {list(before)} to {list(after)}")
        if not untouched and next(iter(after), None) != f"step_{step}":
            wrong.append(f"step {step} was finished and the bundles are {list(after)}")
        self._check(wrong + self._left(moment), moment)
        shown = ", ".join(after) or "none"
        _say(f"{moment}: ended in {took_s:.1f} s, status {life.status}; checkpoints: {shown}")

    def _left(self, moment: Moment) -> list[str]:
        """What is still there when it should have gone."""
        gone_by = time.monotonic() + _GONE_S
        while True:
            left = left_behind(self._run)
            if moment == "twice":  # the next start removes its files
                left = [each for each in left if each.startswith("pid")]
            if not left or time.monotonic() > gone_by:
                return left
            time.sleep(0.1)

    def _check(self, wrong: Sequence[str], moment: str = "the end") -> None:
        if wrong:
            raise ScError(f"{self._run}: after {moment}: {'; '.join(wrong)}")

    def _comes(self, life: Life, moment: Moment) -> bool:
        """Wait for the moment; False if the run ends first."""
        checkpoints = self._run / CHECKPOINTS
        log = _Tail(self._run / EVENTS)
        comes: dict[Moment, tuple[float, Callable[[], bool]]] = {
            "before Ray": (0.3, lambda: last_report(self._run).get("pid") == life.pid),
            "TransferQueue": (3.0, lambda: life.says("starting TransferQueue")),
            "restore": (0.3, lambda: life.says("restoring")),
            "first step": (1.0, lambda: life.says("resuming from") or life.says("afresh")),
            "generation": (0.3, lambda: log.has("dispatched")),
            "trainer call": (0.05, lambda: log.has("selected")),
            "weight sync": (0.02, lambda: log.has("trained")),
            "between steps": (0.0, lambda: log.has("weight_sync")),
            "twice": (0.3, lambda: log.has("trained")),
            "window": (0.02, lambda: any(checkpoints.glob("tmp_step_*"))),
            "finaliser": (0.02, lambda: any(checkpoints.glob("tmp_step_*/training_info.json"))),
        }
        longest_s, reached = comes[moment]
        if moment in MOMENTS[MOMENTS.index("trainer call") :] or moment == "generation":
            for _ in range(1 + self._random.randrange(3)):
                if not life.until(lambda: log.has("trained")):
                    return False
        if not life.until(reached):
            return False
        time.sleep(self._random.random() * longest_s)
        return life.status is None


class _Tail:
    """What was added to an event log since it was last looked at."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = path.stat().st_size if path.exists() else 0

    def has(self, event: str) -> bool:
        """Whether such an event has come since; forgets all that came up to it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen)
                added = file.read()
        except FileNotFoundError:
            return False
        start = 0
        for line in added.splitlines(keepends=True):
            start += len(line)
            if line.endswith(b"\n") and msgspec.json.decode(line)["event"] == event:
                self._seen += start
                return True
        return False


def _last_step(events: Path) -> int:
    """The last finished step of the run's effective history."""
    step = 0
    if events.exists():
        for line in events.read_bytes().splitlines():
            event = msgspec.json.decode(line)
            if event["event"] in ("run_started", "resumed", "trained"):
                step = event.get("step", 0)
    return step


def _step(bundle: str) -> int:
    return int(bundle.removeprefix("step_"))


def _say(line: str) -> None:
    sys.stdout.write(f"stops: {line}\n")
    sys.stdout.flush()


def _fail(line: str) -> int:
    sys.stderr.write(f"stops: error: {line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
