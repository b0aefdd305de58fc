"""`python -m sc_ray.chaos`: real runs, killed with SIGKILL again and again, resumed and audited.

Each kill takes the driver, Ray and every worker at once, at a random moment: while a run starts,
while it restores, while it trains, or in the midst of a save. After each of them the log and all
bundles are examined. A run that comes to its end is followed by another one, until there were
enough kills; the last one then runs to its end.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sc_core import (
    ScError,
)
from sc_ray.lives import Life, what_is_wrong
from sc_ray.run_directory import last_report, published

Moment = Literal["start", "restore", "training", "save"]
MOMENTS: tuple[Moment, ...] = ("start", "restore", "training", "save")
LOOPS = ("asyncio", "uvloop", "trio")
SETTINGS = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "checkpointing.save_period=2",
    "cluster.storage_units=1",
    "cluster.num_cpus=5",
    "policy.model.hidden_size=64",
    "policy.model.num_attention_heads=2",
    "policy.model.num_key_value_heads=1",
)
"""A world that starts fast: a tiny model, and no more processes than it takes."""
_STALLED_S = 600.0
"""A start that has not come to its moment, or to its end, by then has stalled."""
_FIRST_GUESS_S = 20.0  #: of how long a start takes, before one has been seen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sc_ray.chaos", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), metavar="DIRECTORY")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        return _fail(f"{options.out} is not empty; remove it first")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1000)
    _say(f"seed {seed}; the same kinds of moments again with --seed {seed}")
    try:
        said = Chaos(options.out, options.settings, steps=options.steps, seed=seed).run(
            options.kills
        )
    except ScError as exc:
        return _fail(str(exc))
    _say(said)
    return 0


class Chaos:
    """One session of kills.

    Raises:
        ScError: from `run`; a start failed, or a run has lost something. Says what and where.
    """

    def __init__(self, out: Path, settings: list[str], *, steps: int, seed: int) -> None:
        self._out = out
        self._settings = [*SETTINGS, f"grpo.max_num_steps={steps}", *settings]
        self._steps = steps
        self._random = random.Random(seed)
        self._moments = self._in_turn()
        self._starts = 0
        self._start_s = _FIRST_GUESS_S  #: from the command to a running controller, when last seen
        self.kills = dict.fromkeys(MOMENTS, 0)
        self.resumed = 0  #: starts that went on from a bundle

    def run(self, kills: int) -> str:
        """Kill so often, let the last run end, and return the result in one line."""
        runs = 0
        while True:
            runs += 1
            run = self._out / f"run-{runs}"
            while sum(self.kills.values()) < kills:
                if self._ends(run, next(self._moments)):
                    break  # by itself: on with another one
            else:
                break
        if not self._ends(run, None):
            raise ScError(f"{run} was never killed and did not end")
        shown = ", ".join(f"{count} at {moment}" for moment, count in self.kills.items())
        return (
            f"{kills} kills over {runs} runs ({shown}): every run came to its end,"
            f" {self.resumed} starts resumed from a bundle, every audit clean"
        )

    def _in_turn(self) -> Iterator[Moment]:
        """Every kind of moment once, in some order, then again in another one."""
        while True:
            yield from self._random.sample(MOMENTS, len(MOMENTS))

    def _ends(self, run: Path, moment: Moment | None) -> bool:
        """Start the run and kill it at that moment; True if it came to its end before."""
        before = published(run)
        if moment == "restore" and not before:
            moment = "save"  # there is nothing to restore
        loop = LOOPS[self._starts % len(LOOPS)]
        self._starts += 1
        with Life(run, [*self._settings, f"event_loop={loop}"], patience_s=_STALLED_S) as life:
            ended = not self._comes(life, moment, before)
            killed = 0 if ended else life.kill()
        self.resumed += life.says("resuming from")
        if before and life.says("starting afresh"):
            raise ScError(f"{run}: a start did not go on from {', '.join(before)}")
        if ended and life.status != 0:
            raise ScError(f"{run}: a start ended with status {life.status}: {life.last_line}")
        if wrong := what_is_wrong(run):
            raise ScError(f"{run}: after {moment or 'the end'}: {'; '.join(wrong)}")
        step = last_report(run).get("step", 0)
        bundles = ", ".join(published(run)) or "none"
        if ended:
            _say(f"{run}: done at step {step} on {loop}; checkpoints: {bundles}")
            return True
        assert moment is not None
        self.kills[moment] += 1
        count = sum(self.kills.values())
        _say(
            f"kill {count}, {moment}: {run} on {loop}, {killed} processes at step {step};"
            f" checkpoints: {bundles}"
        )
        return False

    def _comes(self, life: Life, moment: Moment | None, before: dict[str, int]) -> bool:
        """Wait for the moment; False if the run ends first."""
        chance = self._random.random()
        if moment is None:
            return life.until(lambda: False)
        if moment == "start":
            at = time.monotonic() + chance * self._start_s
            return life.until(lambda: time.monotonic() >= at)
        if moment == "restore":
            reached = life.until(lambda: life.says("restoring"))
            pause_s = chance * 0.5
        else:
            began = time.monotonic()
            reached = life.until(lambda: life.step is not None)
            self._start_s = time.monotonic() - began
            if moment == "save":
                reached = reached and life.until(life.is_saving)
                pause_s = chance * 0.1
            else:
                steps = (life.step or 0) + self._random.randrange(6)
                reached = reached and life.until(lambda: (life.step or 0) >= steps)
                pause_s = chance * 0.5
        if reached:
            time.sleep(pause_s)
        return reached and life.status is None


def _say(line: str) -> None:
    sys.stdout.write(f"chaos: {line}\n")
    sys.stdout.flush()


def _fail(line: str) -> int:
    sys.stderr.write(f"chaos: error: {line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
