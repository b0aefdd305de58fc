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

from sc_ray.kills import kill_tree
from sc_ray.run_directory import last_report, published

_LOOK_EVERY_S = 0.05


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
    command = [sys.executable, "-m", "sc_ray", "train", "--config", options.config]
    command += ["--out", str(options.out), *options.settings]
    for kill in range(1, options.kills + 1):
        driver = subprocess.Popen(command, start_new_session=True)
        try:
            reached = _wait_for_moment(driver, options.out, moments)
            if reached is None:
                return _fail(f"the run ended by itself, with status {driver.wait()}")
            count = kill_tree(driver.pid)
        finally:
            kill_tree(driver.pid)
            driver.wait()
        bundles = ", ".join(published(options.out))
        _say(f"kill {kill}: {count} processes at step {reached}; checkpoints: {bundles}")
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        return _fail(f"the resumed run ended with status {status}")
    audit = [sys.executable, "-m", "sc_core", "audit", str(options.out)]
    return subprocess.run(audit, check=False).returncode


def _wait_for_moment(
    driver: subprocess.Popen[bytes], run: Path, moments: random.Random
) -> int | None:
    """Wait for a checkpoint of this life, then for some steps and a moment; returns the step."""
    before = published(run)
    steps, pause_s = moments.randrange(10), moments.random() / 2
    saved_at: int | None = None
    while driver.poll() is None:
        told = last_report(run)
        step = int(told.get("step", 0)) if told.get("pid") == driver.pid else 0
        if saved_at is None and published(run) != before:
            saved_at = step
        if saved_at is not None and step >= saved_at + steps:
            time.sleep(pause_s)
            return step
        time.sleep(_LOOK_EVERY_S)
    return None


def _say(line: str) -> None:
    sys.stdout.write(f"demo-crash: {line}\n")
    sys.stdout.flush()


def _fail(line: str) -> int:
    sys.stderr.write(f"demo-crash: error: {line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
