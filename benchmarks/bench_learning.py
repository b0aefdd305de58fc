"""Does training on stale groups cost anything that is learnt?

The demo's task and model, trained from random weights: strictly in turn (lookahead 0), and with
rollouts that run one and two weight versions ahead. Each is repeated over seeds, which settle
fresh weights, prompts and sampling. Compared are mean rewards over the last ten steps, at equal
samples; the plot has the whole curves.

It takes an hour or so. A run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

LOOKAHEADS = (0, 1, 2)
LAST_STEPS = 10
MAX_GAP = 0.05  #: to the synchronous run
SAMPLES_PER_STEP = 16 * 16

Rewards = list[float]  #: by step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), metavar="DIRECTORY")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    curves: dict[int, list[Rewards]] = {lookahead: [] for lookahead in LOOKAHEADS}
    for seed in range(options.seeds):  # interleaved: one that is broken off has all three of some
        for lookahead in LOOKAHEADS:
            run = options.out / f"lookahead-{lookahead}" / f"seed-{seed}"
            curves[lookahead].append(rewards_of(run, lookahead, seed, options.steps))
            print(f"{run}: {last(curves[lookahead][-1]):.3f}", flush=True)
    if options.plot is not None:
        plot(curves, options.plot)
    if options.json is not None:
        encoded = msgspec.json.encode({f"lookahead {k}": v for k, v in curves.items()})
        options.json.write_bytes(encoded + b"\n")
    return report(curves)


def rewards_of(run: Path, lookahead: int, seed: int, steps: int) -> Rewards:
    """Train, unless that was done before; the mean reward of each step."""
    rewards = read(run / "metrics.jsonl")
    if len(rewards) < steps:
        command = [sys.executable, "-m", "sc_ray", "train", "--config", "demo", "--out", str(run)]
        settings = (
            f"grpo.seed={seed}",
            f"grpo.max_num_steps={steps}",
            "grpo.val_period=0",
            "async_rl.sampler.name=in_order",
            f"async_rl.sampler.max_lookahead_versions={lookahead}",
            f"checkpointing.save_period={steps}",
        )
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        rewards = read(run / "metrics.jsonl")
    return rewards[:steps]


def read(metrics: Path) -> Rewards:
    rewards: dict[int, float] = {}
    if metrics.exists():
        for line in metrics.read_bytes().splitlines():
            entry = msgspec.json.decode(line, type=dict[str, Any])
            rewards[entry["step"]] = entry["train/reward"]  # a step made again counts once
    return [rewards[step] for step in sorted(rewards)]


def last(rewards: Sequence[float]) -> float:
    return statistics.fmean(rewards[-LAST_STEPS:])


def report(curves: Mapping[int, Sequence[Rewards]]) -> int:
    """Print the table; returns 1 if a lookahead stays behind by more than it may."""
    print(f"\nmean reward of the last {LAST_STEPS} steps, over {len(curves[0])} seeds")
    reached = {k: [last(rewards) for rewards in seeds] for k, seeds in curves.items()}
    synchronous = statistics.fmean(reached[0])
    missed = False
    for lookahead, values in reached.items():
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        ratio = mean / synchronous
        missed |= ratio < 1 - MAX_GAP
        each = " ".join(f"{value:.3f}" for value in values)
        print(
            f"lookahead {lookahead}  {mean:.3f} +- {error:.3f}  {ratio:.3f} of lookahead 0"
            f" (>= {1 - MAX_GAP}{', missed' if ratio < 1 - MAX_GAP else ''})  each: {each}"
        )
    return int(missed)


def plot(curves: Mapping[int, Sequence[Rewards]], path: Path) -> None:
    """Mean over the seeds, and the range of all of them, each smoothed over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "single-controller"  # the same numbers, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for lookahead, seeds in curves.items():
        smooth = [smoothed(rewards) for rewards in seeds]
        by_step = list(zip(*smooth, strict=True))
        samples = [SAMPLES_PER_STEP * (step + 1) for step in range(len(by_step))]
        label = "in turn (lookahead 0)" if lookahead == 0 else f"lookahead {lookahead}"
        (line,) = axes.plot(samples, [statistics.fmean(each) for each in by_step], label=label)
        low, high = [min(each) for each in by_step], [max(each) for each in by_step]
        axes.fill_between(samples, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="samples trained on", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def smoothed(rewards: Sequence[float]) -> Rewards:
    return [
        statistics.fmean(rewards[max(0, step - LAST_STEPS + 1) : step + 1])
        for step in range(len(rewards))
    ]


if __name__ == "__main__":
    sys.exit(main())
