"""The process that generates: an engine with its queue, and the reward of what it made."""

from __future__ import annotations

import concurrent.futures
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from sc_core import (
    DataFailure,
    Prompt,
    RolloutError,
    WeightSyncError,
)
from sc_ray.bridge import await_future
from sc_ray.generation import Completion, Request, request_seed
from sc_ray.generation.torch_engine import TorchEngine
from sc_ray.model import ModelConfig, build_model
from sc_ray.parcels import Content, unpacked
from sc_ray.tasks import Reward, Task
from sc_ray.tokenizer import Tokenizer

NO_WEIGHTS = -1
"""The weight version of an engine that was given none yet."""


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a generation worker is made from; it crosses to its process."""

    model: ModelConfig
    tokenizer: Tokenizer
    task: Task  #: of its prompts, only those sent to `rollouts` are looked at
    run_seed: int = 0  #: of all sampling; see `request_seed`
    temperature: float = 1.0
    batch_invariant: bool = False  #: a completion does not depend on its company, to the last bit
    max_batch_rows: int = 256  #: rows that run together; bounds memory
    threads: int = 1  #: of torch, in its process


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sibling, for people to read."""

    prompt: str
    completion: str
    reward: float
    weight_version: int


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Siblings of one prompt as they leave the worker: numbers, since tensors pickle slowly."""

    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    rewards: Sequence[float]


class _Call(msgspec.Struct, frozen=True, eq=False):
    requests: Sequence[Request]
    completions: concurrent.futures.Future[list[Completion]]


class BatchingEngine:
    """An engine and the one thread that uses it; its methods belong to one event loop.

    Calls that come while the engine is busy run together when it is free. Cancelling a call takes
    its requests out of the queue; what runs already is finished and thrown away.
    """

    def __init__(self, engine: TorchEngine, *, max_batch_rows: int) -> None:
        self._engine = engine
        self._max_batch_rows = max_batch_rows
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "engine")
        # Both are used by the loop and by the thread: each operation on them is atomic.
        self._waiting: deque[_Call] = deque()
        self._paused = False

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of one prompt's requests, in their order; waits while paused.

        Raises:
            DataFailure: the prompt is empty or too long.
        """
        call = _Call(requests, concurrent.futures.Future())
        self._waiting.append(call)
        self._thread.submit(self._run_waiting)
        try:
            return await await_future(call.completions)
        finally:
            call.completions.cancel()  # if it is still in the queue

    async def pause(self) -> None:
        """Return once nothing is generated, until `resume`."""
        self._paused = True
        await await_future(self._thread.submit(_nothing))  # after the batch that runs

    async def resume(self) -> None:
        self._paused = False
        self._thread.submit(self._run_waiting)

    async def load(self, path: Path, version: int) -> int:
        """Take weights from a file, between two batches; returns the version it then has.

        Raises:
            WeightSyncError: there is no such file; nothing was touched.
        """
        return await await_future(self._thread.submit(self._load, path, version))

    async def load_content(self, content: Content, version: int) -> int:
        """As `load`, from the content of such a file."""
        return await await_future(self._thread.submit(self._load_content, content, version))

    # in the thread ---------------------------------------------------------------------

    def _load_content(self, content: Content, version: int) -> int:
        with unpacked(content) as path:
            return self._load(path, version)

    def _load(self, path: Path, version: int) -> int:
        if not path.is_file():
            raise WeightSyncError(f"there are no weights at {path}")
        self._engine.load(path, version)
        return self._engine.weight_version

    def _run_waiting(self) -> None:
        while not self._paused and (calls := self._take_batch()):
            self._run(calls)

    def _take_batch(self) -> list[_Call]:
        calls: list[_Call] = []
        rows = 0
        while self._waiting and rows < self._max_batch_rows:
            call = self._waiting.popleft()
            if call.completions.set_running_or_notify_cancel():
                calls.append(call)
                rows += len(call.requests)
        return calls

    def _run(self, calls: Sequence[_Call]) -> None:
        requests = [request for call in calls for request in call.requests]
        try:
            completions = iter(self._engine.generate_batch(requests))
        except DataFailure as exc:
            if len(calls) == 1:
                calls[0].completions.set_exception(exc)
            else:  # one prompt is at fault: the others must not suffer
                for call in calls:
                    self._run([call])
        except BaseException as exc:  # carried to the callers, not swallowed
            for call in calls:
                call.completions.set_exception(exc)
        else:
            for call in calls:
                call.completions.set_result([next(completions) for _ in call.requests])


class GenerationWorker:
    """Generates siblings and judges them, many prompts at a time.

    With `batch_invariant`, a completion follows from the weights, the prompt, its ordinal, the
    sibling, the weight version of its stamp and the run's seed, and from nothing else.
    """

    def __init__(self, spec: GenerationSpec, name: str = "generation-0") -> None:
        """Build the engine; it generates only after `load_weights`.

        Raises:
            ConfigError: the model can't be built.
        """
        self._spec = spec
        self._name = name
        engine = TorchEngine(
            build_model(spec.model, spec.tokenizer, seed=spec.run_seed),
            spec.tokenizer,
            weight_version=NO_WEIGHTS,
            batch_invariant=spec.batch_invariant,
            threads=spec.threads,
        )
        self._engine = BatchingEngine(engine, max_batch_rows=spec.max_batch_rows)
        self._judge = concurrent.futures.ThreadPoolExecutor(1, "reward")
        self._recent: deque[Example] = deque(maxlen=64)

    async def rollouts(
        self, prompt: Prompt, siblings: Sequence[int], weight_version: int
    ) -> Rollouts:
        """Generate these siblings of a prompt, and the reward of each. Waits while paused.

        A `ray.cancel` takes effect at once: what waits is not generated, and what runs is
        finished and thrown away, as it is if the caller only stops listening.

        Raises:
            DataFailure: the prompt is at fault, or the reward function fails on it.
            RolloutError: the engine has older weights than `weight_version`.
        """
        spec = self._spec
        item = _item(prompt)
        prompt_ids = spec.tokenizer.encode(item["prompt"])
        requests = [
            Request(
                prompt_ids=prompt_ids,
                seed=request_seed(spec.run_seed, prompt.ordinal, sibling, weight_version),
                max_new_tokens=spec.task.max_new_tokens,
                temperature=spec.temperature,
            )
            for sibling in siblings
        ]
        completions = await self._engine.generate(requests)
        served = min(completion.weight_version for completion in completions)
        if served < weight_version:
            raise RolloutError(
                f"weight version {weight_version} was asked for, and this engine has "
                + ("none" if served == NO_WEIGHTS else f"version {served}")
            )
        rewards = await await_future(self._judge.submit(self._score, item, completions))
        return Rollouts(prompt_ids=prompt_ids, completions=completions, rewards=rewards)

    def _score(self, item: Mapping[str, Any], completions: Sequence[Completion]) -> list[float]:
        task, rewards = self._spec.task, []
        for completion in completions:
            try:
                reward = task.score(item, completion.text)
            except DataFailure:
                raise
            except Exception as exc:  # the function is the user's: it may raise anything
                raise DataFailure(
                    f"the reward function {_name_of(task.reward)} failed on prompt"
                    f" {item['prompt']!r} and completion {completion.text!r}:"
                    f" {type(exc).__name__}: {exc}"
                ) from exc
            rewards.append(reward)
            self._recent.append(
                Example(
                    prompt=item["prompt"],
                    completion=completion.text,
                    reward=reward,
                    weight_version=completion.weight_version,
                )
            )
        return rewards

    async def pause(self) -> None:
        """Hold all requests; returns once nothing is generated any more."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on with the requests held. Does nothing if none are."""
        await self._engine.resume()

    async def load_weights(self, path: Path, version: int) -> int:
        """Take weights from a safetensors file; returns the version loaded.

        Raises:
            WeightSyncError: there is no such file. The engine keeps the weights it had, as it
                does on a `RestoreError`, for a file that is damaged or of another model.
        """
        return await self._engine.load(path, version)

    async def load_content(self, content: Content, version: int) -> int:
        """As `load_weights`, for a worker that does not share the file's node."""
        return await self._engine.load_content(content, version)

    async def examples(self, count: int) -> list[Example]:
        """The last finished siblings, newest last, 64 at most."""
        return list(self._recent)[-count:] if count > 0 else []

    async def ping(self) -> str:
        """The worker's name, once it is up."""
        return self._name

    async def check(self) -> None:
        """Raises whatever ended the engine, if it is dead."""

    async def node_id(self) -> str:
        """Of the node of Ray's cluster that it runs on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node


GenerationActor = ray.remote(num_cpus=1, max_concurrency=10_000)(GenerationWorker)
"""Held requests take no thread: the number bounds nothing but a runaway."""


def _item(prompt: Prompt) -> Mapping[str, Any]:
    item = prompt.payload
    if not isinstance(item, Mapping):
        raise DataFailure(f"prompt {prompt.ordinal} is a {type(item).__name__}, not an object")
    for key in ("prompt", "answer"):
        if not isinstance(item.get(key), str):
            raise DataFailure(f"prompt {prompt.ordinal} has no text under the key {key!r}: {item}")
    return item


def _name_of(reward: Reward) -> str:
    if inspect.isfunction(reward):
        return f"{reward.__module__}:{reward.__qualname__}"
    return repr(reward)


def _nothing() -> None:
    pass
