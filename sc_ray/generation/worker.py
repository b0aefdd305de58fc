"""The process that generates: an engine with its queue, and the reward of what it made."""

from __future__ import annotations

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
from sc_ray.bridge import LoopThread, await_future
from sc_ray.generation import Completion, Request, request_seed
from sc_ray.generation.engine import NO_WEIGHTS, GenerationSpec, WeightReceiver, build_engine
from sc_ray.generation.episodes import Episode, hear_all
from sc_ray.parcels import Content
from sc_ray.phrasing import Phrasing
from sc_ray.tasks.task import prompt_text


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sibling, for people to read."""

    prompt: str
    completion: str
    reward: float
    weight_version: int


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Siblings of one prompt as they leave the worker: numbers, since tensors pickle slowly."""

    prompt_ids: Sequence[int]
    completions: Sequence[Completion]  #: of several turns, with the replies between them
    rewards: Sequence[float]
    components: Sequence[Sequence[float]] = ()
    """What each reward is made of, by the order of the names; empty where it is one number."""
    component_names: Sequence[str] = ()


class GenerationWorker:
    """Generates siblings and judges them, many prompts at a time.

    With `batch_invariant`, a completion follows from the weights, the prompt, its ordinal, the
    sibling, the weight version of its stamp and the run's seed, and from nothing else; a later
    turn also from its environment, and from the weights that serve it then.
    """

    def __init__(self, spec: GenerationSpec, name: str = "generation-0") -> None:
        """Begin to build the engine; it generates only after `load_weights`.

        Raises:
            ConfigError: there is no such engine, or it can't be built; `ready` may say so later.
        """
        self._spec = spec
        self._name = name
        self._engine = build_engine(spec)
        self._phrasing = Phrasing(
            tokenizer=spec.tokenizer, chat=spec.chat, system_prompt=spec.system_prompt
        )
        self._judge = LoopThread("reward")
        self._component_names: tuple[str, ...] | None = None  #: once there was a reward
        self._recent: deque[Example] = deque(maxlen=64)

    async def rollouts(
        self, prompt: Prompt, siblings: Sequence[int], weight_version: int
    ) -> Rollouts:
        """Generate these siblings of a prompt, and the reward of each. Waits while paused.

        After each turn, those whose episode goes on are generated together.

        A `ray.cancel` takes effect at once: what waits is not generated, and what runs is
        finished and thrown away, as it is if the caller only stops listening.

        Raises:
            DataFailure: the prompt is at fault, or the reward function or environment fails on it.
            RolloutError: the engine has older weights than `weight_version`.
        """
        await self._engine.start()  # until then its room is not known
        item = _item(prompt, answers=self._spec.task.environment is None)
        prompt_ids = self._phrasing.prompt_ids(item)
        await self._engine.start()
        episodes = [
            Episode(
                self._spec.task,
                item,
                self._phrasing,
                prompt_ids,
                sibling=sibling,
                room=self._engine.room,
            )
            for sibling in siblings
        ]
        for turn in range(self._spec.task.max_turns):
            going = [episode for episode in episodes if not episode.over]
            if not going:
                break
            requests = [self._request(prompt, one, weight_version, turn) for one in going]
            completions = await self._engine.generate(requests)
            _refuse_older(completions, weight_version)
            heard = self._judge.submit(hear_all(going, completions))
            try:
                await await_future(heard)
            finally:
                heard.cancel()
        return self._rollouts(item, prompt_ids, episodes)

    def _request(self, prompt: Prompt, episode: Episode, weight_version: int, turn: int) -> Request:
        spec = self._spec
        temperature = spec.temperature
        if prompt.held_out and spec.val_temperature is not None:
            temperature = spec.val_temperature
        return Request(
            prompt_ids=episode.read_ids,
            seed=request_seed(spec.run_seed, prompt.ordinal, episode.sibling, weight_version, turn),
            max_new_tokens=spec.task.max_new_tokens,
            temperature=temperature,
        )

    def _rollouts(
        self, item: Mapping[str, Any], prompt_ids: Sequence[int], episodes: Sequence[Episode]
    ) -> Rollouts:
        completions = [episode.completion() for episode in episodes]
        scores = [episode.score() for episode in episodes]
        for completion, score in zip(completions, scores, strict=True):
            self._check_components(tuple(score.components), item)
            self._recent.append(
                Example(
                    prompt=prompt_text(item),
                    completion=completion.text,
                    reward=score.reward,
                    weight_version=completion.weight_version,
                )
            )
        named = bool(self._component_names)
        return Rollouts(
            prompt_ids=prompt_ids,
            completions=completions,
            rewards=[score.reward for score in scores],
            components=[list(score.components.values()) for score in scores] if named else (),
            component_names=self._component_names or (),
        )

    def _check_components(self, names: tuple[str, ...], item: Mapping[str, Any]) -> None:
        """Rows of a run have the same columns, of the same length."""
        if self._component_names is None:
            self._component_names = names
        if names != self._component_names:
            raise DataFailure(
                f"the reward for prompt {prompt_text(item)!r} has the components"
                f" {', '.join(names) or 'none'}, and an earlier one"
                f" {', '.join(self._component_names) or 'none'}; they must always be the same"
            )

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

    # weights by broadcast: see `WeightReceiver` -----------------------------------------

    async def transfer_workers(self) -> int:
        return await self._receiver().workers()

    async def meet_trainer(self, info: Mapping[str, Any]) -> None:
        await self._receiver().meet(info)

    async def begin_update(self) -> None:
        await self._receiver().begin()

    async def receive_weights(self, info: Mapping[str, Any]) -> None:
        await self._receiver().receive(info)

    async def finish_update(self, version: int) -> int:
        return await self._receiver().finish(version)

    def _receiver(self) -> WeightReceiver:
        receiver = self._engine.receiver
        if receiver is None:
            raise WeightSyncError(
                f"generation.engine {self._spec.engine} can't take weights by broadcast, only"
                " from files: set generation.weight_transfer=file"
            )
        return receiver

    # ------------------------------------------------------------------------------------

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


def _item(prompt: Prompt, *, answers: bool) -> Mapping[str, Any]:
    item = prompt.payload
    if not isinstance(item, Mapping):
        raise DataFailure(f"prompt {prompt.ordinal} is a {type(item).__name__}, not an object")
    text = () if item.get("messages") else ("prompt",)
    for key in (*text, "answer") if answers else text:
        if not isinstance(item.get(key), str):
            raise DataFailure(f"prompt {prompt.ordinal} has no text under the key {key!r}: {item}")
    return item


def _refuse_older(completions: Sequence[Completion], weight_version: int) -> None:
    served = min(completion.weight_version for completion in completions)
    if served < weight_version:
        raise RolloutError(
            f"weight version {weight_version} was asked for, and this engine has "
            + ("none" if served == NO_WEIGHTS else f"version {served}")
        )
