"""The process that trains: a policy, and its own way to the rows."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import ray

from sc_core import (
    Batch,
    SampleId,
    ScError,
)
from sc_ray.losses import LossConfig
from sc_ray.model import ModelConfig
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import OptimizerConfig, Policy, Row
from sc_ray.transfer_queue import TransferQueueSpec

SAMPLED = ("input_ids", "completion_mask")
"""The columns that log-probs are computed from."""


F = TypeVar("F")
_aside: Callable[[F], F] = ray.method(concurrency_group="aside")


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a trainer worker is made from; it crosses to its process."""

    model: ModelConfig
    tokenizer: Tokenizer
    rows: TransferQueueSpec
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    temperature: float = 1.0  #: that of the rollouts
    seed: int = 0  #: of fresh weights
    threads: int = 1  #: of torch, in its process


class TrainerWorker:
    """A `Policy` that fetches the rows of a batch itself, in the batch's order of rows.

    Calls come one at a time, in the order in which they were sent, so an `abandon_step` also
    undoes a chunk that somebody has stopped waiting for. Beside them, `finalize_save` and `ping`
    are answered at any time.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Build the policy and connect to TransferQueue, which must be running.

        Raises:
            DataPlaneError: no TransferQueue runs in this Ray cluster.
            ConfigError: the model can't be built.
        """
        self._policy = Policy(
            spec.model,
            spec.tokenizer,
            optimizer=spec.optimizer,
            loss=spec.loss,
            temperature=spec.temperature,
            seed=spec.seed,
            threads=spec.threads,
        )
        self._trained = (*SAMPLED, *spec.loss.columns)  #: what a gradient is computed from
        self._rows = spec.rows.connect_rows()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "policy writer")
        self._written: concurrent.futures.Future[None] | None = None

    # a step ----------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Write the column `prev_logprobs`: log-probs under the weights of now."""
        logprobs = self._policy.logprobs(self._fetch(batch.sample_ids, SAMPLED))
        self._rows.put(batch.sample_ids, {"prev_logprobs": logprobs})

    def begin_step(self, step: int) -> None:
        """Open a step.

        Raises:
            ScError: a step is open, or it is not the turn of this one.
        """
        if step != self._policy.steps + 1:
            raise ScError(
                f"begin_step: step {step} was asked for, and these weights have"
                f" {self._policy.steps} steps behind them; load the policy that belongs to the run"
            )
        self._policy.begin_step()

    def train_microbatches(self, batch: Batch) -> None:
        """Accumulate the gradient of one chunk; its masked rows are not even fetched."""
        if rows := batch.trained_ids:
            self._policy.accumulate(self._fetch(rows, self._trained))

    def finish_step(self) -> Mapping[str, float]:
        """Apply the gradient; returns the metrics of `Policy.finish_step`."""
        return self._policy.finish_step()

    def abandon_step(self) -> None:
        """Close the open step, if there is one, as if it had never been opened."""
        self._policy.abandon_step()

    def _fetch(self, rows: Sequence[SampleId], names: tuple[str, ...]) -> list[Row]:
        columns = self._rows.fetch(rows, names)
        return [
            dict(zip(names, values, strict=True))
            for values in zip(*(columns[name] for name in names), strict=True)
        ]

    # disk ------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Copy the policy as of the last finished step, and begin to write the copy."""
        self._written = self._writer.submit(self._policy.snapshot().write, directory)

    @_aside
    def finalize_save(self) -> None:
        """Return once the last save is written, or raise what it failed of."""
        if self._written is not None:
            self._written.result()

    def load(self, directory: Path) -> None:
        """Become what `save` wrote."""
        self._policy.load(directory)

    def export_weights(self, path: Path) -> None:
        """Write the weights alone into a file, whole or not at all."""
        self._policy.export_weights(path)

    @_aside
    def ping(self) -> int:
        """How many steps the weights have behind them."""
        return self._policy.steps


TrainerActor = ray.remote(num_cpus=1, concurrency_groups={"aside": 1})(TrainerWorker)
