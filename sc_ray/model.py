"""A causal language model made from a few numbers, and its weights on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from sc_core import (
    ConfigError,
    RestoreError,
)
from sc_ray.lazy import lazy, much_is_imported

if TYPE_CHECKING:
    import safetensors.torch as safetensors_torch
    import torch

    from sc_ray.tokenizer import Tokenizer
else:
    safetensors_torch = lazy("safetensors.torch")
    torch = lazy("torch")


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip

SHAPE = (*_SIZES, "tie_word_embeddings")  #: settings that saved weights can't follow


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a small Qwen2, in float32; the names are those of Hugging Face.

    Raises:
        ConfigError: a number that no model has, or the heads do not divide what they must.
    """

    hidden_size: int = 128
    """Width; over `num_attention_heads` it gives the head size, which vLLM on CPU wants >= 32."""
    intermediate_size: int = 256  #: width inside the feed-forward blocks
    num_hidden_layers: int = 2  #: transformer blocks, one upon the other
    num_attention_heads: int = 4  #: of each block; must divide `hidden_size`
    num_key_value_heads: int = 2  #: each serves an equal share of the attention heads
    max_position_embeddings: int = 256  #: tokens of the longest prompt and completion together
    tie_word_embeddings: bool = False  #: whether the output layer is the embedding, transposed
    initializer_range: float = 0.09
    """Standard deviation of fresh weights: 1/sqrt(hidden_size), which keeps the size of what passes
    through. The usual 0.02 is for wide models; from there this one learns the most frequent
    answers long before it tells prompts apart."""
    pretrained: str = ""
    """Directory with a Hugging Face causal LM to start from; its own shape then counts, not this
    one, and its tokenizer is the one to use."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.initializer_range < math.inf:
            raise ConfigError(
                f"model.initializer_range is {self.initializer_range}; it must be above 0, and"
                " finite"
            )
        width, heads, kv_heads = (
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
        )
        if width % heads or heads % kv_heads:
            raise ConfigError(
                f"model.num_attention_heads = {heads} must divide hidden_size = {width}, and"
                f" num_key_value_heads = {kv_heads} must divide num_attention_heads"
            )


def configure_torch(threads: int) -> None:
    """Make this process compute the same bits every time: set threads, refuse loose kernels.

    These are settings of the process, not of one model: whoever comes last decides.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def build_model(config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> torch.nn.Module:
    """A model for `tokenizer`'s vocabulary, in evaluation mode.

    Fresh weights depend on `config`, the vocabulary's size and `seed` alone; torch's global
    random state is left as it was.

    Raises:
        ConfigError: `config.pretrained` holds no model, or one with too few tokens.
    """
    if config.pretrained:
        return _open_pretrained(config.pretrained, tokenizer)
    with much_is_imported():
        from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = msgspec.structs.asdict(config)
    del shape["pretrained"]
    qwen2 = Qwen2Config(
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],  # vLLM chooses its own code by this
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = Qwen2ForCausalLM(qwen2)
    return model.eval()


def _open_pretrained(directory: str, tokenizer: Tokenizer) -> torch.nn.Module:
    with much_is_imported():
        from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
    except Exception as exc:  # of what is damaged the libraries raise anything
        reason = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise ConfigError(f"model.pretrained: no causal LM in {directory}: {reason}") from exc
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{directory} has {model.config.vocab_size} tokens and the tokenizer"
            f" {tokenizer.vocab_size}; use the tokenizer saved with the model"
        )
    opened: torch.nn.Module = model.eval()
    return opened


def token_logprobs(
    model: torch.nn.Module, input_ids: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each token given those before it: `[rows, tokens]`, like `input_ids`.

    Rows may be padded at the end, with any token: none is seen by those before it. The first
    column is zero: nothing precedes the first token.
    """
    logits = model(input_ids=input_ids, use_cache=False).logits
    following = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    chosen = following.gather(-1, input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


# weights on disk -----------------------------------------------------------------------


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by name, not copied. Tied weights appear once, as the embedding."""
    kept = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in kept}


def save_weights(model: torch.nn.Module, path: Path, *, fsync: bool = False) -> None:
    """Write all weights into one safetensors file; see `write_tensors`."""
    write_tensors(weights_of(model), path, fsync=fsync)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Overwrite the model's weights in place by those of a file that `save_weights` wrote.

    Raises:
        RestoreError: the file is missing or unreadable, or holds other weights; the model is
            then as it was.
    """
    copy_tensors(read_tensors(path), weights_of(model), origin=str(path))


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, fsync: bool = False) -> None:
    """Write a safetensors file that is at `path` either whole or not at all.

    With `fsync` it also survives a power cut once this returns.
    """
    staged = path.with_name(f"{path.name}.tmp")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors_torch.save_file(contiguous, staged, metadata={"format": "pt"})
        if fsync:
            _sync(staged)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    if fsync:
        _sync(path.parent)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, by name.

    Raises:
        RestoreError: there is no such file, or it is damaged.
    """
    try:
        tensors: dict[str, torch.Tensor] = safetensors_torch.load_file(path)
    except (OSError, SafetensorError) as exc:
        raise RestoreError(f"{path} can't be read as safetensors: {exc}") from exc
    return tensors


def copy_tensors(
    source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], *, origin: str
) -> None:
    """Copy tensors in place, name by name. Everything is compared before anything is written.

    Raises:
        RestoreError: names, shapes or dtypes differ; the message names `origin` and one of them.
    """
    for name in sorted(source.keys() ^ target.keys()):
        fact = "is missing from" if name in target else "is not expected in"
        raise RestoreError(f"{name} {fact} {origin}: it was saved from another model")
    for name, tensor in target.items():
        found = source[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise RestoreError(
                f"{name} in {origin} is {found.dtype} {tuple(found.shape)}, and the model's is"
                f" {tensor.dtype} {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
