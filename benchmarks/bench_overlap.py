"""How much faster are steps when the next step's rollouts run while this one trains?

Whole runs of `python -m sc_ray train` on the demo's task, strictly in turn (lookahead 0) and one
version ahead (lookahead 1), in alternation; steps per second, without the start.

- torch, vllm: engines that compute, on the same cores as the trainer: where these are few, they
  are the limit;
- waiting: engines that wait as long as the rest of a step takes, as engines on machines of their
  own would: what is left is what the controller makes of the overlap. Its own share of a step is
  the CPU time of its thread, with the Ray calls, the barrier and the index in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measure import installed
from benchmarks.waiting import WAIT

WARM_STEPS = 5
MAX_SHARE = 0.02  #: of the controller's thread in a step of `waiting`
TARGETS = {"torch": 1.0, "vllm": 1.3, "waiting": 1.8}

LONG_COMPLETIONS = {
    "grpo.num_prompts_per_step": 8,
    "grpo.num_generations_per_prompt": 8,
    "task.max_new_tokens": 500,
    "policy.model.max_position_embeddings": 512,
}
"""So that a step of the tiny model takes seconds, and not the time of its overheads."""

Steps = list[dict[str, Any]]  #: the metrics of each, without the first ones


class Pace(msgspec.Struct, frozen=True):
    """One run."""

    per_second: float  #: steps
    share: float  #: of the controller's thread
    exposed_s: float  #: a step's wait for rollouts
    step_s: float

    @classmethod
    def of(cls, steps: Steps) -> Pace:
        step_s = mean(steps, "timing/train/total_step_time")
        return cls(
            per_second=1 / step_s,
            share=mean(steps, "timing/train/controller_cpu_time") / step_s,
            exposed_s=mean(steps, "timing/train/exposed_generation"),
            step_s=step_s,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short pair each: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, for each kind of engine")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"), metavar="DIRECTORY")
    parser.add_argument("engines", nargs="*", metavar="|".join(TARGETS))
    options = parser.parse_args()
    pairs, steps = (1, 20) if options.quick else (options.pairs, 40)
    found: dict[str, dict[int, list[Pace]]] = {}
    missed = False
    for engine in options.engines or [e for e in TARGETS if e != "vllm" or installed("vllm")]:
        bench = Bench(engine, options.out, steps)
        found[engine] = bench.pairs(pairs)
        missed |= report(engine, found[engine])
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return int(missed)


class Bench:
    """Runs on one kind of engine."""

    def __init__(self, engine: str, out: Path, steps: int) -> None:
        self._engine = engine
        self._out = out
        self._steps = steps
        self._environment = dict(os.environ)

    def pairs(self, count: int) -> dict[int, list[Pace]]:
        """The runs, by lookahead; each pair is next to each other in time."""
        if self._engine == "waiting":
            self._wait_as_long_as_the_rest()
        paces: dict[int, list[Pace]] = {0: [], 1: []}
        for _ in range(count):
            for lookahead, of_it in paces.items():
                of_it.append(self._run(lookahead))
                print(f"{self._engine}, lookahead {lookahead}: {of_it[-1]}", flush=True)
        return paces

    def _wait_as_long_as_the_rest(self) -> None:
        wait_s = 0.2
        self._environment[WAIT] = str(wait_s)
        pace = self._run(0)
        others_s = pace.step_s - pace.exposed_s
        beside_s = max(0.0, pace.exposed_s - wait_s)  # of calls and rows, in a step's rollouts
        self._environment[WAIT] = str(max(0.0, others_s - beside_s))
        print(f"a step without rollouts takes {others_s:.2f} s: so long shall they take, too")

    def _run(self, lookahead: int) -> Pace:
        run = self._out / self._engine
        shutil.rmtree(run, ignore_errors=True)
        engine = "benchmarks.waiting:WaitingEngine" if self._engine == "waiting" else self._engine
        settings = {
            "grpo.max_num_steps": self._steps,
            "grpo.val_period": 0,
            "async_rl.sampler.name": "in_order",
            "async_rl.sampler.max_lookahead_versions": lookahead,
            "checkpointing.enabled": "false",
            "generation.engine": engine,
        }
        if self._engine == "waiting":
            settings |= LONG_COMPLETIONS
        command = [sys.executable, "-m", "sc_ray", "train", "--config", "demo", "--out", str(run)]
        command += [f"{key}={value}" for key, value in settings.items()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self._environment)
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        return Pace.of([msgspec.json.decode(line) for line in lines][WARM_STEPS:])


def mean(steps: Steps, name: str) -> float:
    return statistics.fmean(step[name] for step in steps)


def report(engine: str, paces: Mapping[int, list[Pace]]) -> bool:
    """Print the medians beside their targets; whether one is missed."""
    pairs = zip(paces[1], paces[0], strict=True)
    ratio = statistics.median(ahead.per_second / turn.per_second for ahead, turn in pairs)
    share = statistics.median(pace.share for pace in paces[1])
    speeds = [statistics.median(pace.per_second for pace in paces[k]) for k in (0, 1)]
    too_slow = ratio < TARGETS[engine]
    too_dear = engine == "waiting" and share > MAX_SHARE
    print(
        f"{engine}: {speeds[0]:.2f} steps/s in turn, {speeds[1]:.2f} one version ahead:"
        f" {ratio:.2f}x (>= {TARGETS[engine]:g}{', missed' if too_slow else ''});"
        f" the controller's share is {share:.1%}{', missed' if too_dear else ''}\n",
        flush=True,
    )
    return too_slow or too_dear


if __name__ == "__main__":
    sys.exit(main())
