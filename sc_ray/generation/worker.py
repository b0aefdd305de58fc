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
)
from sc_ray.bridge import await_future
from sc_ray.generation import Completion, Request, request_seed
from sc_ray.generation.engine import NO_WEIGHTS, GenerationSpec, build_engine
from sc_ray.parcels import Content
from sc_ray.tasks import Reward


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


class GenerationWorker:
    """Generates siblings and judges them, many prompts at a time.

    With `batch_invariant`, a completion follows from the weights, the prompt, its ordinal, the
    sibling, the weight version of its stamp and the run's seed, and from nothing else.
    """

    def __init__(self, spec: GenerationSpec, name: str = "generation-0") -> None:
        """Begin to build the engine; it generates only after `load_weights`.

        Raises:
            ConfigError: there is no such engine, or it can't be built; `ready` may say so later.
        """
        self._spec = spec
        self._name = name
        self._engine = build_engine(spec)
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

    async def ready(self) -> None:
        """Return once the engine is built.

        Raises:
            ConfigError: it can't be.
            WorkerDied: it died of that.
        """
        await self._engine.start()

    async def check(self) -> None:
        """Raise WorkerDied if the engine is dead, while this process lives."""
        await self._engine.check()

    async def ping(self) -> str:
        """The worker's name; answers also while the engine is being built, or is busy."""
        return self._name

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
