"""A trainer, engines, a prompt source and an estimator in memory, small and deterministic.

What the trainer calls weights is a hash over every row it was trained on, in order, and what
the engines generate is a hash over those weights and the prompt: two runs end with the same
weights only if they trained on the same tokens in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import msgspec

from sc_core.disk import LOCAL, Disk
from sc_core.errors import BundleDamaged, EndOfPrompts, EnginesFailed, RolloutError, WorkerDied
from sc_core.ports import Columns, DataPlane, EstimatorScope
from sc_core.records import Batch, Prompt, PulledPrompt, Sample
from sc_core.watched import Watched

Latency = Callable[[Prompt, int], float]
Script = Callable[[Prompt, int, int], Awaitable[None]]


def _hash(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class ListPrompts:
    """A `PromptSource` over a list, for a number of epochs; a position is a count of prompts.

    As from a loader that drops the last batch if it is short, each epoch ends with the last
    whole batch of `batch` prompts.
    """

    def __init__(self, prompts: Sequence[Any], *, epochs: int = 1, batch: int = 1) -> None:
        self._prompts = list(prompts)[: len(prompts) // batch * batch]
        self._epochs = epochs
        self._next = 0
        self.pulled: list[Any] = []  #: every payload given, in order

    async def next_prompt(self) -> PulledPrompt:
        await anyio.lowlevel.checkpoint()
        if self._next >= len(self._prompts) * self._epochs:
            raise EndOfPrompts(f"{self._epochs} epochs of {len(self._prompts)} prompts are over")
        payload = self._prompts[self._next % len(self._prompts)]
        self._next += 1
        self.pulled.append(payload)
        return PulledPrompt(payload, self._next)

    async def seek(self, position: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self._next = 0 if position is None else position

    def fingerprint(self) -> str:
        return _hash(self._prompts)[:16]


class ListValidation:
    """`ValidationPrompts` over a list."""

    def __init__(self, prompts: Sequence[Any]) -> None:
        self._prompts = list(prompts)

    def prompts(self) -> Sequence[Any]:
        return self._prompts

    def fingerprint(self) -> str:
        return _hash(self._prompts)[:16]


class MemoryTrainer:
    """A `Trainer` whose weights are a hash chain. Keeps a log of the batches it was given."""

    def __init__(self, plane: DataPlane, *, seed: int = 0, disk: Disk = LOCAL) -> None:
        self._plane = plane
        self._disk = disk
        self.weights = _hash("initial", seed)
        self._open: list[str] | None = None  #: digests of the chunks of the open step
        self.trained: list[tuple[int, ...]] = []  #: ordinals of each finished step
        self._ordinals: list[int] = []

    async def prepare(self, batch: Batch) -> None:
        tokens = (await self._plane.get_samples(batch.sample_ids, ["tokens"]))["tokens"]
        logprobs = [int(_hash(self.weights, row)[:6], 16) for row in tokens]
        await self._plane.put_samples(batch.sample_ids, {"logprobs": logprobs})

    async def begin_step(self, step: int) -> None:
        await anyio.lowlevel.checkpoint()
        self._open, self._ordinals = [], []

    async def train_microbatches(self, batch: Batch) -> None:
        assert self._open is not None
        fields = ["tokens", "logprobs", "advantage"]
        columns = await self._plane.get_samples(batch.trained_ids, fields)
        self._open.append(_hash([columns[name] for name in fields]))
        self._ordinals += [group.ordinal for group in batch.groups]

    async def finish_step(self) -> Mapping[str, float]:
        assert self._open is not None
        await anyio.lowlevel.checkpoint()
        self.weights = _hash(self.weights, self._open)
        self.trained.append(tuple(self._ordinals))
        self._open = None
        return {"loss": int(self.weights[:4], 16) / 65536}

    async def abandon_step(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._open = None

    async def save(self, directory: Path) -> None:
        await anyio.lowlevel.checkpoint()
        self._disk.write(directory / "weights.json", msgspec.json.encode(self.weights))

    async def finalize_save(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def load(self, directory: Path) -> None:
        await anyio.lowlevel.checkpoint()
        raw = self._disk.read(directory / "weights.json", 1 << 10)
        try:
            self.weights = msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError as exc:
            raise BundleDamaged(directory.parent.name, "policy/weights.json", str(exc)) from exc


class MemoryEngines:
    """`RolloutWorker`, `WeightSync` and `EngineFleet` in one.

    Each engine generates tokens from the weights it was given. A request goes to the one with
    the fewest, waits while that is paused, and ends by the weights it has then. `latency` gives
    the virtual seconds that one sibling takes. `script` is awaited before a sibling is
    generated, with the prompt, the sibling and the weight version; it may sleep, raise or hang.
    """

    def __init__(
        self,
        trainer: MemoryTrainer,
        *,
        engines: int = 1,
        latency: Latency = lambda prompt, sibling: 0.0,
        script: Script | None = None,
    ) -> None:
        self._trainer = trainer
        self._latency = latency
        self._script = script
        self._engines = {f"engine{i}": _Engine() for i in range(engines)}
        self._weights, self._version = "", -1  #: of the last transfer
        self._syncing = Watched(False)
        self._faults: dict[tuple[str, str], int] = {}
        self.out: dict[str, str] = {}  #: engines that were put out, and why
        self.on_join: Callable[[str, int], object] = lambda engine, version: None
        """Called when one has joined, with the version that it confirmed."""
        self.rollouts: list[tuple[int, int, int]] = []  #: ordinal, sibling, version of each call

    @property
    def serves(self) -> dict[str, int]:
        """The version that each engine in service has confirmed."""
        return {name: engine.version for name, engine in self._engines.items()}

    @property
    def paused(self) -> bool:
        """Whether any engine in service is."""
        return any(engine.resumed is not None for engine in self._engines.values())

    @property
    def under_way(self) -> dict[str, int]:
        """Requests, by engine in service."""
        return {name: len(engine.requests) for name, engine in self._engines.items()}

    def fail(self, call: Literal["pause", "transfer", "resume"], engine: str, times: int) -> None:
        """Have the next `times` such calls to an engine fail."""
        self._faults[call, engine] = times

    async def join(self, name: str) -> None:
        """An engine more: it gets the weights of the last sync, then requests."""
        if name in self._engines:
            raise ValueError(f"there is an engine {name} already")
        while True:
            await self._syncing.wait_until(lambda syncing: not syncing)
            engine = _Engine(self._weights, self._version)
            await anyio.lowlevel.checkpoint()  # the weights are on their way
            if not self._syncing.value and engine.version == self._version:
                self._engines[name] = engine
                self.on_join(name, engine.version)
                return

    def leave(self, name: str) -> None:
        """An engine less. Requests that it has are finished, by the weights it has."""
        self._engines.pop(name).resume()

    def put_out(self, engine: str, reason: str) -> int:
        self.out[engine] = reason
        gone = self._engines.pop(engine)
        for request in gone.requests:
            request.cancel()
        return len(self._engines)

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        self.rollouts.append((prompt.ordinal, sibling, weight_version))
        if not self._engines:
            raise WorkerDied("every engine", "none is left")
        name, engine = min(self._engines.items(), key=lambda each: len(each[1].requests))
        with anyio.CancelScope() as request:
            engine.requests.append(request)
            try:
                if self._script is not None:
                    await self._script(prompt, sibling, weight_version)
                await anyio.sleep(self._latency(prompt, sibling))
                while engine.resumed is not None:
                    await engine.resumed.wait()
            finally:
                engine.requests.remove(request)
            made = _hash(engine.weights, prompt.payload, prompt.ordinal, sibling, weight_version)
            reward = int(made[0], 16) / 15
            return Sample(
                fields={"tokens": [int(c, 16) for c in made[: 4 + sibling]], "reward": reward},
                reward=reward,
                tokens=4 + sibling,
                end_weight_version=engine.version,
                engine=name,
            )
        raise RolloutError(f"{name} was put out of service: {self.out[name]}")

    async def pause(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._syncing.set(True)
        self._each("pause", _Engine.pause)

    async def transfer(self, version: int) -> Mapping[str, int]:
        await anyio.lowlevel.checkpoint()

        def load(engine: _Engine) -> None:
            engine.weights, engine.version = self._trainer.weights, version

        self._each("transfer", load)
        self._weights, self._version = self._trainer.weights, version
        return self.serves

    async def resume(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._each("resume", _Engine.resume)
        self._syncing.set(False)

    def _each(self, call: str, work: Callable[[_Engine], None]) -> None:
        failures: dict[str, str] = {}
        for name, engine in self._engines.items():
            if self._faults.get((call, name), 0) > 0:
                self._faults[call, name] -= 1
                failures[name] = f"{call} was told to fail"
            else:
                work(engine)
        if failures:
            raise EnginesFailed(call, failures)


class _Engine:
    def __init__(self, weights: str = "", version: int = -1) -> None:
        self.weights, self.version = weights, version
        self.resumed: anyio.Event | None = None  #: while it is paused
        self.requests: list[anyio.CancelScope] = []

    def pause(self) -> None:
        if self.resumed is None:
            self.resumed = anyio.Event()

    def resume(self) -> None:
        if self.resumed is not None:
            self.resumed.set()
            self.resumed = None


class MeanBaseline:
    """An `AdvantageEstimator`: reward less the mean of its group; 0 for masked siblings."""

    select_fields = ("reward", "masked")

    def __init__(self, *, heavy: bool = False, scope: EstimatorScope = "group") -> None:
        self.heavy = heavy
        self.scope = scope

    def estimate(self, columns: Columns, group_sizes: Sequence[int]) -> dict[str, list[Any]]:
        advantages: list[float] = []
        for size in group_sizes:
            rows = slice(len(advantages), len(advantages) + size)
            advantages += self._of_group(columns["reward"][rows], columns["masked"][rows])
        return {"advantage": advantages}

    def _of_group(self, rewards: Sequence[float], masked: Sequence[bool]) -> list[float]:
        trained = [r for r, m in zip(rewards, masked, strict=True) if not m]
        total, count = sum(trained), len(trained)
        return [
            0.0 if m else r - self._baseline(r, total, count)
            for r, m in zip(rewards, masked, strict=True)
        ]

    def _baseline(self, reward: float, total: float, count: int) -> float:
        """Of one sibling among `count` that are trained on, itself included."""
        return total / count


class LeaveOneOut(MeanBaseline):
    """Reward less the mean of the *other* siblings; 0 for one that has none, or is masked."""

    def _baseline(self, reward: float, total: float, count: int) -> float:
        return (total - reward) / (count - 1) if count > 1 else reward


class MemoryMetrics:
    """A `MetricsSink` that keeps what it was given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def write(self, metrics: Mapping[str, Any]) -> None:
        self.steps.append(dict(metrics))
