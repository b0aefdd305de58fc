"""How soon does the actor answer `status`, whatever its controller is doing?

- call: while the trainer, an actor of its own, is in one call for 60 s;
- block: while the controller's own loop stands still for a second, so that the answer has an age;
- save: while a bundle is saved over TransferQueue that holds rows of 500 MB.

A whole `SingleController` in its actor, over real Ray and TransferQueue, one step long; asked
every 10 ms, in turn with `ping`, which shows what Ray itself takes. Targets are for a quiet
machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

from benchmarks.bench_controller import InstantWorld
from benchmarks.measure import Ratio, Taken, Target, arguments, backends, installed, report
from sc_core import (
    Batch,
    BundleStore,
    ControllerConfig,
    JsonlEventLog,
    JsonlMetrics,
    Ports,
    Prompt,
    Sample,
    SentStore,
    SingleController,
    decode,
    in_thread,
    restore,
)

SIBLINGS = 8
ROW_BYTES = 125_000
ASK_EVERY_S = 0.01
BLOCK_S = 1.0


class SlowTrainer:
    """Stands still in the one step's only chunk until it is let go."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate

    def train_microbatches(self) -> None:
        while not self._gate.exists():
            time.sleep(0.01)


class World(InstantWorld):
    """Everything around the controller, instant but for the trainer and the size of a row."""

    select_fields = ("x",)

    def __init__(self, trainer: Any) -> None:
        import torch

        super().__init__()
        self._trainer = trainer
        self._row = torch.ones(ROW_BYTES, dtype=torch.uint8)
        self._advantage = torch.zeros(1)

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        await anyio.sleep(0.01)
        return Sample(fields={"x": self._row}, reward=1.0, tokens=1)

    async def train_microbatches(self, batch: Batch) -> None:
        from sc_ray.workers import answer

        await answer("trainer-0", self._trainer.train_microbatches.remote())

    async def finish_step(self) -> Mapping[str, float]:
        time.sleep(BLOCK_S)  # noqa: ASYNC251, that is the point
        return {}

    def estimate(self, columns: Any, group_sizes: Any) -> dict[str, list[Any]]:
        return {"advantage": [self._advantage for _ in columns["x"]]}


class Args:
    """What the actor is made from."""

    def __init__(
        self, event_loop: Any, run: Path, sent: SentStore, rows: Any, trainer: Any, groups: int
    ) -> None:
        self.event_loop = event_loop
        self._run, self._sent, self._rows, self._trainer = run, sent, rows, trainer
        self._groups = groups

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SingleController]:
        store = BundleStore(self._run / "checkpoints")
        store.open()
        world: Any = World(self._trainer)
        ports = Ports(
            connect=lambda _: in_thread(self._rows.connect),
            source=world,
            worker=world,
            trainer=world,
            weight_sync=world,
            estimator=world,
            events=JsonlEventLog(self._run / "events.jsonl"),
            metrics=JsonlMetrics(self._run / "metrics.jsonl"),
            bundles=store,
        )
        ready = await self._sent.receive(store, runner=in_thread)
        yield SingleController(settings(self._groups), ready, ports)
        store.close()


def settings(groups: int) -> ControllerConfig:
    """One step of one group, while `groups` more wait in the buffer."""
    return decode(
        {
            "grpo": {
                "num_prompts_per_step": 1,
                "num_generations_per_prompt": SIBLINGS,
                "max_num_steps": 1,
            },
            "async_rl": {"max_buffered_rollouts": groups + 1, "max_inflight_prompts": 32},
        },
        ControllerConfig,
    )


class Asking:
    """Asks an actor, in turn, for `status` and `ping`; keeps how long each answer took."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.status_s: list[float] = []
        self.ping_s: list[float] = []
        self.oldest_s = 0.0  #: age of the oldest answer

    def until(self, over: Callable[[dict[str, Any]], bool]) -> None:
        import ray

        while True:
            asked = perf_counter()
            status = ray.get(self._actor.status.remote())
            self.status_s.append(perf_counter() - asked)
            self.oldest_s = max(self.oldest_s, status["age_s"])
            asked = perf_counter()
            ray.get(self._actor.ping.remote())
            self.ping_s.append(perf_counter() - asked)
            if over(status):
                return
            time.sleep(ASK_EVERY_S)

    def told(self, phase: str) -> dict[str, list[float]]:
        return {
            f"{phase}: status, p50": [statistics.median(self.status_s)],
            f"{phase}: status, max": [max(self.status_s)],
            f"{phase}: ping, p50": [statistics.median(self.ping_s)],
            f"{phase}: ping, max": [max(self.ping_s)],
            f"{phase}: oldest answer": [self.oldest_s],
        }


def measure(
    event_loop: str, bootstrap: Any, trainer_of: Any, megabytes: int, call_s: float
) -> dict[str, list[float]]:
    import ray

    from sc_ray.actor import SingleControllerActor

    groups = megabytes * 1_000_000 // (SIBLINGS * ROW_BYTES)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as on_exit:
        run = Path(scratch)
        gate = run / "go on"
        store = BundleStore(run / "checkpoints")
        ready = anyio.run(partial(restore, store, bootstrap, settings(groups), runner=in_thread))
        trainer = trainer_of(gate)
        on_exit.callback(ray.kill, trainer)
        args = Args(event_loop, run, ready.send(), bootstrap.spec, trainer, groups)
        actor = ray.remote(SingleControllerActor).options(num_cpus=1).remote(args)
        on_exit.callback(ray.kill, actor)
        ended = actor.run.remote()

        full = Asking(actor)
        full.until(lambda status: status.get("committed", 0) >= groups)
        samples: dict[str, list[float]] = {}
        call = Asking(actor)
        began = time.monotonic()
        call.until(lambda _: time.monotonic() > began + call_s)
        samples |= call.told(CALL)
        block = Asking(actor)
        gate.touch()
        block.until(lambda status: status["step"] == 1)
        samples |= block.told(BLOCK)
        saving = Asking(actor)
        saving.until(lambda _: bool(ray.wait([ended], timeout=0)[0]))
        samples |= saving.told(SAVE)
        ray.get(ended)
        published = run / "checkpoints" / "step_1"
        size = sum(file.stat().st_size for file in published.rglob("*") if file.is_file())
        if size < megabytes * 1_000_000:
            raise SystemExit(f"the bundle holds {size} bytes only")
    return {**samples, MILLISECOND: [0.001]}


CALL, BLOCK, SAVE = "trainer in one call", "loop stands still", "a save"
MILLISECOND = "one millisecond"
_TARGET = dict.fromkeys(("asyncio", "uvloop", "trio"), Target(at_most=100))
RATIOS = {
    f"status_{kind}_ms_during_{name}": Ratio(f"{phase}: status, {kind}", MILLISECOND, _TARGET)
    for phase, name in ((CALL, "call"), (BLOCK, "block"), (SAVE, "save"))
    for kind in ("p50", "max")
}


def main() -> None:
    asked = arguments(__doc__)
    if not installed("ray", "transfer_queue", "torch"):
        print("needs Ray, TransferQueue and torch: make install")
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    import ray

    from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec

    megabytes, call_s = (20, 2.0) if asked.quick else (500, 60.0)
    taken: Taken = {}
    with ExitStack() as on_exit:
        on_exit.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=5,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 << 20,
        )
        trainer_of = ray.remote(SlowTrainer).options(num_cpus=1).remote
        for name in backends():
            with TransferQueueBootstrap(TransferQueueSpec()) as bootstrap:
                taken[name] = measure(name, bootstrap, trainer_of, megabytes, call_s)
    report(taken, RATIOS, asked.json, unit="ms")


if __name__ == "__main__":
    main()
