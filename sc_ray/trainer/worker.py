"""A process that trains: a policy, or its part of one, and its own way to the rows."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import ray

from sc_core import (
    Batch,
    SampleId,
    ScError,
)
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.lazy import much_is_imported
from sc_ray.losses import LossConfig
from sc_ray.model import ModelConfig
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.config import OptimizerConfig, SchedulerConfig, Sharding
from sc_ray.trainer.seat import Seat
from sc_ray.trainer.shares import shares_of
from sc_ray.transfer_queue import TransferQueueSpec

if TYPE_CHECKING:
    from sc_ray.trainer.microbatch import Row
    from sc_ray.trainer.sender import WeightSender

SAMPLED = ("input_ids", "completion_mask")
"""The columns that log-probs are computed from."""
REFERENCE = "reference_logprobs"


F = TypeVar("F")
R = TypeVar("R")
_aside: Callable[[F], F] = ray.method(concurrency_group="aside")


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a trainer worker is made from; it crosses to its process."""

    model: ModelConfig
    tokenizer: Tokenizer
    rows: TransferQueueSpec
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    temperature: float = 1.0  #: that of the rollouts
    seed: int = 0  #: of fresh weights
    threads: int = 1  #: of torch, in its process
    device: str = "cpu"  #: or `cuda`
    sharding: Sharding = "fsdp2"  #: of the policy, if there are several workers
    reference: bool = False  #: also give log-probs under the initial weights


class TrainerWorker:
    """A `Policy` that fetches the rows of a batch itself, in the batch's order of rows.

    One of several gets the same calls as the others, and fetches its share of the rows, which
    it knows without asking. If a fetch fails on one of them, the call fails on all.

    Calls come one at a time, in the order in which they were sent, so an `abandon_step` also
    undoes a chunk that somebody has stopped waiting for. Beside them, `finalize_save` and `ping`
    are answered at any time.
    """

    def __init__(self, spec: TrainerSpec, seat: Seat | None = None) -> None:
        """Meet the other workers, build the policy and connect to TransferQueue, which must run.

        Args:
            seat: the place among several workers; None: there is one.

        Raises:
            DataPlaneError: no TransferQueue runs in this Ray cluster.
            ConfigError: the model can't be built.
            ScError: another worker did not come up in time.
        """
        with much_is_imported():
            from sc_ray.trainer.peers import Peers
            from sc_ray.trainer.policy import Policy

        self._peers = None if seat is None else Peers(seat, spec.device)
        self._reference = spec.reference
        self._policy = Policy(
            spec.model,
            spec.tokenizer,
            optimizer=spec.optimizer,
            scheduler=spec.scheduler,
            loss=spec.loss,
            temperature=spec.temperature,
            seed=spec.seed,
            threads=spec.threads,
            device=spec.device,
            peers=self._peers,
            sharding=spec.sharding,
            reference=spec.reference,
        )
        self._trained = (*SAMPLED, *spec.loss.columns)  #: what a gradient is computed from
        self._rows = spec.rows.connect_rows()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "policy writer")
        self._written: concurrent.futures.Future[None] | None = None
        self._sender: WeightSender | None = None  #: once it is needed

    # a step ----------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Write the column `prev_logprobs`: log-probs under the weights of now.

        With a reference, `reference_logprobs` too: those under the initial weights.
        """
        mine, most_rows = self._share(batch, trained=False)
        rows = self._together("prepare", lambda: self._fetch(mine, SAMPLED))
        columns = {"prev_logprobs": self._policy.logprobs(rows, most_rows=most_rows)}
        if self._reference:
            columns[REFERENCE] = self._policy.reference_logprobs(rows, most_rows=most_rows)
        if mine:
            self._rows.put(mine, columns)

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
        mine, most_rows = self._share(batch, trained=True)
        if most_rows == 0:
            return
        rows = self._together("train_microbatches", lambda: self._fetch(mine, self._trained))
        self._policy.accumulate(rows, most_rows=most_rows)

    def finish_step(self) -> Mapping[str, float]:
        """Apply the gradient; returns the metrics of `Policy.finish_step`."""
        return self._policy.finish_step()

    def abandon_step(self) -> None:
        """Close the open step, if there is one, as if it had never been opened."""
        self._policy.abandon_step()

    def _share(self, batch: Batch, *, trained: bool) -> tuple[tuple[SampleId, ...], int]:
        """This worker's rows, and how many the worker has that has most."""
        rank, workers = (0, 1) if self._peers is None else (self._peers.rank, self._peers.workers)
        shares = shares_of(batch, workers, trained=trained)
        return shares[rank], max(map(len, shares))

    def _together(self, call: str, work: Callable[[], R]) -> R:
        return work() if self._peers is None else self._peers.together(call, work)

    def _fetch(self, rows: Sequence[SampleId], names: tuple[str, ...]) -> list[Row]:
        if not rows:
            return []
        columns = self._rows.fetch(rows, names)
        return [
            dict(zip(names, values, strict=True))
            for values in zip(*(columns[name] for name in names), strict=True)
        ]

    # disk ------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Copy the policy as of the last finished step, and begin to write the copy.

        The first of several workers writes it, for all of them.
        """
        self._written = None
        snapshot = self._policy.snapshot()
        if snapshot is not None:
            self._written = self._writer.submit(snapshot.write, directory)

    @_aside
    def finalize_save(self) -> None:
        """Return once the last save is written, or raise what it failed of.

        A worker that writes nothing has nothing to wait for.
        """
        if self._written is not None:
            self._written.result()

    def load(self, directory: Path) -> None:
        """Become what `save` wrote."""
        self._policy.load(directory)

    # to the engines --------------------------------------------------------------------

    def export_weights(self, path: Path) -> int:
        """Write the weights alone into a file, whole or not at all.

        Returns how many steps they have behind them.
        """
        self._policy.export_weights(path)
        return self._policy.steps

    def send_weights(self, plan: SendPlan) -> Sent:
        """Broadcast the weights to engines, which are paused.

        The first of several workers sends; what it returns tells of the engines.

        Raises:
            WeightSyncError: it could not send.
        """
        if self._sender is None:
            with much_is_imported():
                from sc_ray.trainer.sender import WeightSender

            first = self._peers is None or self._peers.rank == 0
            self._sender = WeightSender(self._policy, first=first)
        return self._sender.send(plan)

    @_aside
    def ping(self) -> int:
        """How many steps the weights have behind them."""
        return self._policy.steps


TrainerActor = ray.remote(num_cpus=1, concurrency_groups={"aside": 1})(TrainerWorker)
