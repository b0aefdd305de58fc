"""A policy on disk: one format, whatever number of workers wrote it or reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from sc_core import (
    RestoreError,
)
from sc_ray.model import read_tensors, write_tensors
from sc_ray.tokenizer import Tokenizer

WEIGHTS, OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "optimizer.json"
_RNG = "torch_rng"


class _SavedState(msgspec.Struct, frozen=True, kw_only=True, tag="adamw.v1"):
    """What of the optimizer is no tensor."""

    steps: int
    scheduler_steps: int | None = None  #: None: written before there was a scheduler


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A policy at the end of a step, copied: training may go on while it is written."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: tuple[torch.Tensor, ...]  #: random state of each worker, by rank
    steps: int
    scheduler_steps: int  #: those that the learning rate has gone
    model: Any  #: the model's Hugging Face configuration
    tokenizer: Tokenizer

    def write(self, directory: Path) -> None:
        """Write a directory that `Policy.load` reads, as do Hugging Face and vLLM; no pickle."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(directory))
        self.tokenizer.save(directory)
        write_tensors(self.weights, directory / WEIGHTS)
        states = {rng_name(rank): state for rank, state in enumerate(self.rng)}
        write_tensors({**self.optimizer, **states}, directory / OPTIMIZER)
        state = _SavedState(steps=self.steps, scheduler_steps=self.scheduler_steps)
        (directory / _STATE).write_bytes(msgspec.json.encode(state))


class SavedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot wrote, read: all of it but the model's configuration."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    rng: tuple[torch.Tensor, ...]  #: of each worker that there was, by rank; at least one
    steps: int
    scheduler_steps: int
    tokenizer: Tokenizer

    @classmethod
    def read(cls, directory: Path) -> SavedPolicy:
        """Raises RestoreError if a file is missing or damaged, or of another schema."""
        try:
            state = msgspec.json.decode((directory / _STATE).read_bytes(), type=_SavedState)
        except (OSError, msgspec.DecodeError) as exc:
            raise RestoreError(f"{directory / _STATE} can't be read: {exc}") from exc
        tokenizer = Tokenizer.load(directory)
        weights, optimizer = (read_tensors(directory / name) for name in (WEIGHTS, OPTIMIZER))
        rng: list[torch.Tensor] = []
        while (found := optimizer.pop(rng_name(len(rng)), None)) is not None:
            rng.append(found)
        if not rng:
            raise RestoreError(f"{directory / OPTIMIZER} holds no {_RNG}")
        return cls(
            weights=weights,
            optimizer=optimizer,
            rng=tuple(rng),
            steps=state.steps,
            scheduler_steps=(
                state.steps if state.scheduler_steps is None else state.scheduler_steps
            ),
            tokenizer=tokenizer,
        )


def rng_name(rank: int) -> str:
    """What a worker's random state is called in the optimizer's file."""
    return _RNG if rank == 0 else f"{_RNG}.{rank}"
