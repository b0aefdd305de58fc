"""Generation by vLLM's `AsyncLLM`, which computes in a process of its own, its engine core."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from sc_core import (
    ConfigError,
    WeightSyncError,
    WorkerDied,
    in_thread,
    root_cause,
)
from sc_ray.bridge import await_future
from sc_ray.generation import Completion, Request
from sc_ray.generation.engine import (
    NO_WEIGHTS,
    GenerationSpec,
    WeightReceiver,
    refuse_unfit,
)
from sc_ray.generation.vllm_start import Started, start_vllm
from sc_ray.memory import MemoryDirectory
from sc_ray.parcels import Content, unpacked

R = TypeVar("R")

_FILE = "model.safetensors"
_LEAST_TEMPERATURE = 0.01
"""vLLM takes a lower one for this, and its log-probs would be of another distribution."""


class VllmEngine:
    """An `Engine` for one asyncio loop.

    It is built in a thread, from the moment that it is made, so that the loop stays free. Log-probs
    are of the distribution that was sampled from, at the request's temperature. The same seed gives
    the same tokens as long as log-probs, which depend on what else runs, come out alike.
    """

    def __init__(self, spec: GenerationSpec) -> None:
        self.pause_mode = spec.vllm.pause_mode  #: of the next pause
        self._spec = spec
        self._memory = MemoryDirectory(spec.run_id)
        self._finalizer = weakref.finalize(self, self._memory.close)
        # It stays as long as the engine: see `children_end_with_us`.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "vllm")
        self._built = self._thread.submit(start_vllm, spec, self._memory.path)
        self._started: Started | None = None  #: once it has generated a first token
        self._starting = anyio.Lock()
        self._loading = anyio.Lock()
        self._held: anyio.Event | None = None  #: set by the end of the pause under way
        self._reload: asyncio.Task[int] | None = None
        self._update = ""  #: the one of weights under way, or given up: what to say of it then
        self._broken = ""  #: why it can't be used, though its process lives
        self._numbers = itertools.count()

    @property
    def room(self) -> int:
        assert self._started is not None, "it is known once `start` has returned"
        return self._started.room

    @property
    def receiver(self) -> WeightReceiver:
        return self

    async def start(self) -> None:
        await self._ready()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        vllm = await self._ready()
        for request in requests:
            refuse_unfit(request, room=vllm.room)
            if 0 < request.temperature < _LEAST_TEMPERATURE:
                raise ConfigError(
                    f"temperature = {request.temperature:g}: vLLM samples at 0, or at"
                    f" {_LEAST_TEMPERATURE:g} and more"
                )
        completions: dict[int, Completion] = {}

        async def one(place: int, request: Request) -> None:
            completions[place] = await self._complete(vllm, request)

        try:
            async with anyio.create_task_group() as tg:
                for place, request in enumerate(requests):
                    tg.start_soon(one, place, request)
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        return [completions[place] for place in range(len(requests))]

    async def pause(self) -> None:
        vllm = await self._ready()
        if self._held is None:
            self._held = anyio.Event()
        # It forgets all keys and values, also of requests that it keeps: they are of old weights.
        pause = vllm.llm.pause_generation(mode=self.pause_mode, clear_cache=True)
        await self._answer(vllm, pause)

    async def resume(self) -> None:
        self._refuse_half_new_weights()
        vllm = await self._ready()
        await self._answer(vllm, vllm.llm.resume_generation())
        if self._held is not None:
            self._held.set()
            self._held = None

    async def load(self, path: Path, version: int) -> int:
        vllm = await self._ready()
        await in_thread(vllm.check_file, path)  # vLLM dies of one that it can't use
        async with self._loading:
            self._refuse_half_new_weights()
            await self._ready()
            paused = self._held is not None
            if not paused:
                await self.pause()
            try:
                # A cancel ends the wait, and not the load: half of the weights would be new.
                self._reload = asyncio.create_task(self._take(vllm, path, version))
                return await asyncio.shield(self._reload)
            finally:
                if not paused:
                    await self.resume()

    async def load_content(self, content: Content, version: int) -> int:
        with unpacked(content) as path:
            return await self.load(path, version)

    # a WeightReceiver -------------------------------------------------------------------

    async def workers(self) -> int:
        return (await self._ready()).workers

    async def meet(self, info: Mapping[str, Any]) -> None:
        self._refuse_half_new_weights()
        vllm = await self._ready()
        # It aborts what an earlier group still had under way: nothing that anybody waits for.
        await self._call(vllm, "shutdown_weight_transfer_engine")
        await self._call(vllm, "init_weight_transfer_engine", init_info=dict(info))

    async def begin(self) -> None:
        self._refuse_half_new_weights()
        vllm = await self._ready()
        if self._held is None:
            raise WeightSyncError("weights are broadcast to an engine that is paused; it is not")
        self._update = "it did not get all of the weights that were broadcast to it"
        await self._call(vllm, "start_weight_update")

    async def receive(self, info: Mapping[str, Any]) -> None:
        await self._call(await self._ready(), "update_weights", update_info=dict(info))

    async def finish(self, version: int) -> int:
        vllm = await self._ready()
        await self._call(vllm, "finish_weight_update")
        confirmed = await self._confirm(vllm, version)
        self._update = ""
        return confirmed

    async def _call(self, vllm: Started, method: str, **arguments: Any) -> None:
        """Have every process that holds weights do this."""
        await self._answer(vllm, vllm.llm.collective_rpc(method, kwargs=arguments))

    # ------------------------------------------------------------------------------------

    async def check(self) -> None:
        if self._broken:
            raise self._died(self._broken)
        if self._built.done():
            vllm = await await_future(self._built)
            if self._started is not None:
                await self._answer(vllm, vllm.llm.is_paused())

    def close(self) -> None:
        if not self._built.cancel():
            with suppress(Exception):  # it could not be built
                self._built.result().end()
        # Nothing may hold on to it: vLLM's destructor fails when the interpreter ends.
        self._built, self._started = concurrent.futures.Future(), None
        self._broken = "it was closed"
        self._built.set_exception(self._died(self._broken))
        self._thread.shutdown(wait=False)
        self._finalizer()

    async def _ready(self) -> Started:
        if self._broken:
            raise self._died(self._broken)
        if self._started is None:
            async with self._starting:
                vllm = await await_future(self._built)
                if self._started is None:
                    first = Request(prompt_ids=[0], seed=0, max_new_tokens=1)
                    await self._sample(vllm, first)  # the first one takes long
                    await self._answer(vllm, vllm.llm.update_weight_version(str(NO_WEIGHTS)))
                    self._started = vllm
        assert self._started is not None
        return self._started

    async def _complete(self, vllm: Started, request: Request) -> Completion:
        while True:
            while self._held is not None:
                await self._answer(vllm, self._held.wait())
            output = await self._sample(vllm, request)
            versions = [int(span.version) for span in output.weight_versions or ()]
            aborted = output.finish_reason == "abort"
            mixed = len(versions) > 1 and self.pause_mode != "keep"
            if aborted or mixed:  # by a pause: ask again, from the start
                continue
            tokens = list(output.token_ids)
            greedy = request.temperature == 0
            return Completion(
                token_ids=tokens,
                logprobs=[
                    0.0 if greedy else of[token].logprob
                    for token, of in zip(tokens, output.logprobs, strict=True)
                ],
                text=self._spec.tokenizer.completion_text(tokens),
                finish_reason="eos" if tokens[-1] in self._spec.tokenizer.eos_ids else "length",
                weight_version=versions[-1],
            )

    async def _sample(self, vllm: Started, request: Request) -> Any:
        """vLLM's `CompletionOutput`. A cancel aborts the request."""
        prompt, parameters = vllm.translated(request)

        async def last() -> Any:
            output: Any = None
            async for final in vllm.llm.generate(prompt, parameters, f"{next(self._numbers)}"):
                output = final.outputs[0]
            return output

        return await self._answer(vllm, last())

    async def _take(self, vllm: Started, path: Path, version: int) -> int:
        """Load weights while nothing runs. What fails here leaves weights that nobody knows."""
        with self._as_directory(path) as directory:
            vllm.check_file(directory / _FILE)  # it may have gone meanwhile
            self._update = f"it did not finish to load version {version}"
            try:
                await self._call(vllm, "reload_weights", weights_path=str(directory))
                confirmed = await self._confirm(vllm, version)
            except BaseException as exc:
                self._broken = self._update
                if isinstance(exc, Exception) and not isinstance(exc, WorkerDied):
                    raise WeightSyncError(f"vLLM could not load {path}: {exc}") from exc
                raise
            self._update = ""
            return confirmed

    async def _confirm(self, vllm: Started, version: int) -> int:
        """Forget keys and values of the weights of before; returns the version it then has."""
        await self._answer(vllm, vllm.llm.reset_prefix_cache())
        await self._answer(vllm, vllm.llm.update_weight_version(str(version)))
        return int(await self._answer(vllm, vllm.llm.get_weight_version()))

    def _refuse_half_new_weights(self) -> None:
        """Whoever comes here takes an update that has not ended for given up."""
        if self._update:
            self._broken = self._update

    @contextmanager
    def _as_directory(self, path: Path) -> Iterator[Path]:
        """A directory that holds nothing but the file, by the name that vLLM looks for."""
        directory = self._memory.path / f"weights-{next(self._numbers)}"
        directory.mkdir()
        link = directory / _FILE
        try:
            link.symlink_to(path.resolve())
            yield directory
        finally:
            link.unlink(missing_ok=True)
            directory.rmdir()

    async def _answer(self, vllm: Started, call: Coroutine[Any, Any, R]) -> R:
        """What `call` returns, unless the engine core dies before: that wakes nobody by itself."""
        asked = asyncio.ensure_future(call)
        listening: asyncio.Task[None] | None = vllm.llm.output_handler  # None: to begin with
        try:
            until = {asked} if listening is None else {asked, listening}
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()  # does nothing to one that is done
        error: BaseException | None = None
        if asked.done() and not asked.cancelled():
            error = asked.exception()
            if error is None:
                return asked.result()
            if not isinstance(error, vllm.dead_error) and not (listening and listening.done()):
                raise error
        raise self._died("its core has ended") from error

    def _died(self, reason: str) -> WorkerDied:
        return WorkerDied("vLLM's engine", reason)
