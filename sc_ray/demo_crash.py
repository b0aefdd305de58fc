"""`python -m sc_ray.demo_crash`: a run that is killed in the middle, goes on, and is audited.

The kill is a SIGKILL of the driver, of Ray and of every worker, at a random moment after the
first checkpoint: no process gets to say goodbye.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

from sc_ray.lives import Life
from sc_ray.run_directory import published


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sc_ray.demo_crash", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-crash"), metavar="RUN")
    parser.add_argument("--config", default="demo", metavar="NAME|FILE")
    parser.add_argument("--seed", type=int, default=None, help="of the moment of the kill")
    parser.add_argument("--kills", type=int, default=1, help="how often to kill it")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if published(options.out):
        return _fail(f"{options.out} has checkpoints of another run; remove it first")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1000)
    _say(f"seed {seed}; the same moments again with --seed {seed}")
    moments = random.Random(seed)
    for kill in range(1, options.kills + 1):
        with Life(options.out, options.settings, config=options.config, shown=True) as life:
            reached = _wait_for_moment(life, moments)
            if reached is None:
                return _fail(f"the run ended by itself, with status {life.end()}")
            count = life.kill()
        bundles = ", ".join(published(options.out))
        _say(f"kill {kill}: {count} processes at step {reached}; checkpoints: {bundles}")
    with Life(options.out, options.settings, config=options.config, shown=True) as life:
        if status := life.end():
            return _fail(f"the resumed run ended with status {status}")
    audit = [sys.executable, "-m", "sc_core", "audit", str(options.out)]
    return subprocess.run(audit, check=False).returncode


def _wait_for_moment(life: Life, moments: random.Random) -> int | None:
    """Wait for a checkpoint of this life, then for some steps and a moment; returns the step."""
    before = published(life.run)
    steps, pause_s = moments.randrange(10), moments.random() / 2
    if not life.until(lambda: published(life.run) != before):
        return None
    wanted = (life.step or 0) + steps
    if not life.until(lambda: (life.step or 0) >= wanted):
        return None
    time.sleep(pause_s)
    return life.step


def _say(line: str) -> None:
    sys.stdout.write(f"demo-crash: {line}\n")
    sys.stdout.flush()


def _fail(line: str) -> int:
    sys.stderr.write(f"demo-crash: error: {line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
