"""Does training on stale groups cost anything that is learnt?

The demo's task, model and settings, from random weights: strictly in turn (lookahead 0), and with
rollouts one and two weight versions ahead. Each is repeated over seeds, which settle fresh
weights, prompts and sampling. Compared are mean rewards over the last ten steps, at equal samples;
the plot has the whole curves.

The controller is the real one, as are the policy, its optimizer and the generator; they share one
process, and rows are in memory. Each step begins when all rollouts are there that may go out ahead
of it, so with a lookahead of K nearly every group is K versions old when it trains.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import torch

from sc_core import (
    Batch,
    BundleStore,
    Columns,
    ControllerConfig,
    DataPlane,
    EstimatorScope,
    Ports,
    Prompt,
    ReadyStore,
    Sample,
    SampleId,
    SingleController,
    decode,
    inline,
    restore,
)
from sc_core.testing import MemoryBootstrap, MemoryEventLog, MemoryStore
from sc_core.testing.data_plane import MemoryDataPlane
from sc_core.testing.ports import MemoryMetrics
from sc_ray.estimators import GrpoAdvantages
from sc_ray.generation import Request, request_seed, rollout_row
from sc_ray.generation.torch_engine import TorchEngine
from sc_ray.model import ModelConfig, build_model
from sc_ray.prompts import TaskPrompts
from sc_ray.settings import load_config
from sc_ray.tasks.arithmetic import larger_digit, right_digit
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy

LOOKAHEADS = (0, 1, 2)
LAST_STEPS = 10
MAX_GAP = 0.05  #: to the synchronous run
PROMPTS, SIBLINGS = 16, 16
SAMPLES_PER_STEP = PROMPTS * SIBLINGS
SAMPLED = ("input_ids", "completion_mask")
TRAINED = (*SAMPLED, "generation_logprobs", "prev_logprobs", "advantage")
DTYPES = {"input_ids": torch.int64, "completion_mask": torch.int64}  #: the others are float32

Rewards = list[float]  #: by step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: a smoke test")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    seeds, steps = (1, 12) if options.quick else (options.seeds, options.steps)
    curves: dict[int, list[Rewards]] = {lookahead: [] for lookahead in LOOKAHEADS}
    for seed in range(seeds):
        for lookahead, of_it in curves.items():
            rewards, staleness = anyio.run(train, lookahead, seed, steps, backend="trio")
            of_it.append(rewards)
            told = f"reward {last(rewards):.3f}, mean staleness {staleness:.2f}"
            print(f"seed {seed}, lookahead {lookahead}: {told}", flush=True)
    if options.plot is not None:
        plot(curves, options.plot)
    if options.json is not None:
        encoded = msgspec.json.encode({f"lookahead {k}": v for k, v in curves.items()})
        options.json.write_bytes(encoded + b"\n")
    return report(curves)


class World:
    """Every port but the data plane: one policy, and one engine that gets its weights."""

    scope: EstimatorScope = "group"
    heavy = False

    def __init__(self, seed: int, scratch: Path) -> None:
        demo = load_config("demo")
        task = larger_digit(seed=seed)
        tokenizer = Tokenizer.of_characters(task.alphabet())
        self.source = TaskPrompts(task.prompts, seed=seed)
        self.store = MemoryStore()
        self._rows = MemoryDataPlane(self.store)
        self._task, self._tokenizer, self._seed = task, tokenizer, seed
        optimizer = demo.policy.optimizer
        self._policy = Policy(ModelConfig(), tokenizer, optimizer=optimizer, seed=seed)
        model = build_model(ModelConfig(), tokenizer, seed=seed)
        self._engine = TorchEngine(model, tokenizer)
        self._estimator = GrpoAdvantages(normalize_by_std=True, group_size=SIBLINGS)
        self.select_fields = self._estimator.select_fields
        self._weights = scratch / "weights.safetensors"
        self._made: dict[str, list[Sample]] = {}  #: siblings that were not asked for yet

    # generation

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        await anyio.lowlevel.checkpoint()
        if prompt.group_id not in self._made:
            self._made[prompt.group_id] = self._generate(prompt, weight_version)
        return self._made[prompt.group_id][sibling]

    def _generate(self, prompt: Prompt, weight_version: int) -> list[Sample]:
        item, most = prompt.payload, self._task.max_new_tokens
        prompt_ids = self._tokenizer.encode(item["prompt"])
        requests = [
            Request(
                prompt_ids=prompt_ids,
                seed=request_seed(self._seed, prompt.ordinal, sibling, weight_version),
                max_new_tokens=most,
            )
            for sibling in range(SIBLINGS)
        ]
        samples = []
        for made in self._engine.generate_batch(requests):
            reward = right_digit(item["prompt"], made.text, item["answer"])
            row = rollout_row(prompt_ids, made, reward=reward)
            fields = {name: value.tolist() for name, value in row.items()}
            samples.append(
                Sample(fields=fields, reward=reward, end_weight_version=made.weight_version)
            )
        return samples

    # training

    async def prepare(self, batch: Batch) -> None:
        logprobs = self._policy.logprobs(await self._fetch(batch.sample_ids, *SAMPLED))
        columns = {"prev_logprobs": [row.tolist() for row in logprobs]}
        await self._rows.put_samples(batch.sample_ids, columns)

    async def begin_step(self, step: int) -> None:
        await anyio.wait_all_tasks_blocked()  # until all is generated that may be, ahead of time
        self._policy.begin_step()

    async def train_microbatches(self, batch: Batch) -> None:
        self._policy.accumulate(await self._fetch(batch.sample_ids, *TRAINED))
        for group in batch.groups:
            del self._made[group.group_id]

    async def finish_step(self) -> Mapping[str, float]:
        return self._policy.finish_step()

    async def abandon_step(self) -> None:
        self._policy.abandon_step()

    async def save(self, directory: Path) -> None: ...

    async def finalize_save(self) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def _fetch(self, ids: Sequence[SampleId], *names: str) -> list[dict[str, torch.Tensor]]:
        columns = await self._rows.get_samples(ids, names)
        return [
            {
                name: torch.tensor(columns[name][place], dtype=DTYPES.get(name, torch.float32))
                for name in names
            }
            for place in range(len(ids))
        ]

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        found = self._estimator.estimate(columns, group_sizes)
        return {name: [value.tolist() for value in values] for name, values in found.items()}

    # weights

    async def pause(self) -> None: ...

    async def transfer(self, version: int) -> Mapping[str, int]:
        self._policy.export_weights(self._weights)
        self._engine.load(self._weights, version)
        return {"engine": version}

    async def resume(self) -> None: ...


async def train(lookahead: int, seed: int, steps: int) -> tuple[Rewards, float]:
    """The mean reward of each step, and the mean staleness of what was trained on."""
    config = decode(
        {
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": SIBLINGS,
                "max_num_steps": steps,
            },
            "async_rl": {"sampler": {"name": "in_order", "max_lookahead_versions": lookahead}},
        },
        ControllerConfig,
    )
    with tempfile.TemporaryDirectory() as scratch:
        world = World(seed, Path(scratch))

        async def connect(_: ReadyStore) -> DataPlane:
            return MemoryDataPlane(world.store)

        ready = await restore(
            BundleStore(Path(scratch)), MemoryBootstrap(world.store), config, runner=inline
        )
        metrics = MemoryMetrics()
        ports = Ports(
            connect=connect,
            source=world.source,
            worker=world,
            trainer=world,
            weight_sync=world,
            estimator=world,
            events=MemoryEventLog(),
            metrics=metrics,
            bundles=None,
        )
        await SingleController(config, ready, ports, runner=inline).run()
    stale = statistics.fmean(line["train/staleness_versions_mean"] for line in metrics.steps)
    return [line["train/reward"] for line in metrics.steps], stale


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
