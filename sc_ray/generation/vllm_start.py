"""How vLLM is set up: for few threads, little memory and no noise, with a model that it can read.

Imported only where vLLM is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from sc_core import (
    ConfigError,
    RestoreError,
    WeightSyncError,
    WorkerDied,
)
from sc_ray.generation import Request
from sc_ray.generation.engine import GenerationSpec
from sc_ray.model import build_model, save_weights, weights_of
from sc_ray.with_parent import children_end_with_us

_GIB = 2**30


class Started(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A vLLM that runs, with what has to be known of it."""

    llm: Any  #: the `AsyncLLM`
    dead_error: type[Exception]  #: that it raises once its core has ended
    room: int  #: tokens of the longest prompt and completion together
    eos_ids: frozenset[int]
    tensors: Mapping[str, tuple[int, ...]]  #: of a weights file, by name; all float32
    workers: int  #: processes that hold weights

    def translated(self, request: Request) -> tuple[Any, Any]:
        """A request as prompt and sampling parameters for `llm.generate`."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop_token_ids=sorted(self.eos_ids),
            logprobs=0,  # of the token that was sampled, and no other
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return tokens_input(list(request.prompt_ids)), parameters

    def check_file(self, path: Path) -> None:
        """Refuse a file that vLLM could not load.

        Raises:
            WeightSyncError: there is none.
            RestoreError: it is damaged, or of another model.
        """
        if not path.is_file():
            raise WeightSyncError(f"there are no weights at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}
                found = {name: (p.get_dtype(), tuple(p.get_shape())) for name, p in parts.items()}
        except (OSError, SafetensorError) as exc:
            raise RestoreError(f"{path} can't be read as safetensors: {exc}") from exc
        for name in sorted(found.keys() ^ self.tensors.keys()):
            fact = "is missing from" if name in self.tensors else "is not expected in"
            raise RestoreError(f"{name} {fact} {path}: it was saved from another model")
        for name, shape in self.tensors.items():
            if found[name] != ("F32", shape):
                kind, other = found[name]
                raise RestoreError(
                    f"{name} in {path} is {kind} {other}, and the model's is F32 {shape}"
                )

    def end(self) -> None:
        """End its processes; blocks."""
        self.llm.shutdown(timeout=0.1)


def start_vllm(spec: GenerationSpec, memory: Path) -> Started:
    """Start vLLM; blocks, for half a minute or so. Settings of the process are changed for it.

    Args:
        memory: a directory for its files.

    Raises:
        ConfigError: vLLM can't run this model, or not with these settings.
        WorkerDied: it died of that; its log says more.
    """
    has_gpu = torch.cuda.is_available()
    _set_environment(spec, memory, has_gpu=has_gpu)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    directory, tensors = _model_directory(spec, memory)
    try:
        arguments = AsyncEngineArgs(**_arguments(spec, directory, has_gpu=has_gpu))
        config = arguments.create_engine_config()
    except (ValueError, TypeError, OSError, RuntimeError) as exc:
        raise ConfigError(f"vLLM can't run this model with these settings: {exc}") from exc
    try:
        with children_end_with_us():
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except Exception as exc:  # of any kind: most of it happened in another process
        raise WorkerDied("vLLM's engine", f"it could not start: {exc}") from exc
    return Started(
        llm=llm,
        dead_error=EngineDeadError,
        room=config.model_config.max_model_len,
        eos_ids=spec.tokenizer.eos_ids,
        tensors=tensors,
        workers=config.parallel_config.world_size_across_dp,
    )


def _set_environment(spec: GenerationSpec, memory: Path, *, has_gpu: bool) -> None:
    """Read by vLLM when it is imported, here and in the processes that it starts."""
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(memory),  # its sockets go when the directory does
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not has_gpu:
        os.environ |= {
            "OMP_NUM_THREADS": str(spec.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines go to the same cores
            "TORCHDYNAMO_DISABLE": "1",  # it compiles for seconds what is computed in no time
            # With it, a process between core and worker, which imports all once more. What it is
            # for, a core with as many threads as it should have, is done two lines above.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }


def _arguments(spec: GenerationSpec, directory: Path, *, has_gpu: bool) -> dict[str, Any]:
    settings = spec.vllm
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,  # ids go in and come out
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": spec.max_batch_rows,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # nothing of what the model's directory recommends
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.weight_transfer == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    if not has_gpu:
        arguments |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * _GIB),
        }
    return {**arguments, **settings.engine_args}


def _model_directory(spec: GenerationSpec, memory: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """Where vLLM finds the model, and the shapes of the tensors that a trainer sends."""
    if spec.model.pretrained:
        directory = Path(spec.model.pretrained)
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            shape_only = AutoModelForCausalLM.from_config(config)
        return directory, _shapes(shape_only)
    model: Any = build_model(spec.model, spec.tokenizer, seed=spec.run_seed)
    directory = memory / "model"
    directory.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    save_weights(model, directory / "model.safetensors")
    return directory, _shapes(model)


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()}
