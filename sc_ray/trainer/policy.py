"""A model and its optimizer, trained step by step: what a trainer worker holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sc_core import (
    RestoreError,
    ScError,
)
from sc_ray.losses import LossConfig, LossSums, policy_gradient_loss, step_metrics
from sc_ray.model import (
    ModelConfig,
    build_model,
    configure_torch,
    copy_tensors,
    token_logprobs,
    weights_of,
    write_tensors,
)
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.config import OptimizerConfig, SchedulerConfig, Sharding
from sc_ray.trainer.microbatch import Microbatch, Row, microbatches
from sc_ray.trainer.peers import Peers
from sc_ray.trainer.schedule import schedule
from sc_ray.trainer.sharding import copies, parts, shard, whole
from sc_ray.trainer.snapshot import OPTIMIZER, WEIGHTS, PolicySnapshot, SavedPolicy
from sc_ray.trainer.totals import Totals


class Policy:
    """The model being trained. One caller at a time; every method blocks.

    A step is `begin_step`, `accumulate` for each of its chunks, then `finish_step` or
    `abandon_step`. The same calls on the same rows give the same bits, also when a save and a
    load into a new object lie between them.

    With `peers`, each of them has such an object and calls the same methods in the same order,
    with its own rows; what they become together is what one would with all rows, but for
    rounding. Exchanges are part of `finish_step`, `snapshot` and `save`; of `logprobs`,
    `reference_logprobs`, `accumulate` and `export_weights` only if the model is sharded.

    Args:
        temperature: that of the rollouts; log-probs are those of the same distribution.
        threads: of the whole process; see `configure_torch`.
        peers: the other workers; None: there are none.
        sharding: `fsdp2` leaves each of several workers its part of weights, gradients and
            optimizer; with `replicated`, each has them whole.
        reference: keep the initial weights too, for `reference_logprobs`. They are those of
            `model` and `seed`, or of its pretrained directory, so nothing of them is saved: after
            a `load` they are still the initial ones, if these settings are what they were.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        optimizer: OptimizerConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        loss: LossConfig | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        threads: int = 1,
        device: str = "cpu",
        peers: Peers | None = None,
        sharding: Sharding = "fsdp2",
        reference: bool = False,
    ) -> None:
        if device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # same bits every time
        configure_torch(threads)
        self._settings = optimizer or OptimizerConfig()
        self._scheduler_settings = scheduler or SchedulerConfig()
        self._loss = loss or LossConfig()
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._device = torch.device(device)
        self._peers = peers
        self._sharded_over = peers if sharding == "fsdp2" else None
        self._seed = seed
        self._model = self._placed(build_model(model, tokenizer, seed=seed))
        self._reference = (
            self._placed(build_model(model, tokenizer, seed=seed)) if reference else None
        )
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=self._settings.lr,
            betas=(self._settings.beta1, self._settings.beta2),
            eps=self._settings.eps,
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():  # as AdamW does, only before the first step
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._scheduler = schedule(self._optimizer, self._scheduler_settings)
        self._rng = self._fresh_rng(steps=0)
        self._step: _OpenStep | None = None
        self.steps = 0  #: finished, over all restarts

    # log-probs -------------------------------------------------------------------------

    def logprobs(self, rows: Sequence[Row], *, most_rows: int = 0) -> list[torch.Tensor]:
        """Log-probs of each row's sampled tokens under the current weights.

        One float32 tensor per row, as long as its `input_ids`, zero where nothing was sampled.

        Args:
            most_rows: how many rows the worker has that has most: a sharded model goes forward
                equally often on each. Of no account otherwise.
        """
        return self._logprobs_under(self._model, rows, most_rows)

    def reference_logprobs(self, rows: Sequence[Row], *, most_rows: int = 0) -> list[torch.Tensor]:
        """The same under the initial weights.

        Raises:
            ScError: this policy keeps no reference.
        """
        if self._reference is None:
            raise ScError("reference_logprobs: this policy was made without a reference")
        return self._logprobs_under(self._reference, rows, most_rows)

    def _logprobs_under(
        self, model: torch.nn.Module, rows: Sequence[Row], most_rows: int
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for batch in self._microbatches(rows, most_rows):
            with torch.no_grad():
                logprobs = self._token_logprobs(batch, model)
            if not batch.rows:
                continue
            found += [
                values[: len(row["input_ids"])].clone()
                for row, values in zip(
                    batch.rows, logprobs.where(batch.mask, 0.0).cpu(), strict=True
                )
            ]
        return found

    # a step ----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step: gradients are empty afterwards.

        Raises:
            ScError: a step is open already.
        """
        if self._step is not None:
            raise ScError("a step is open; finish_step or abandon_step comes before begin_step")
        self._optimizer.zero_grad(set_to_none=True)
        self._step = _OpenStep(rng_before=self._rng)

    def accumulate(self, rows: Sequence[Row], *, most_rows: int = 0) -> dict[str, float]:
        """Add one chunk's gradient to the open step; returns `loss` and `tokens` of the chunk.

        Args:
            most_rows: as in `logprobs`.

        Raises:
            ScError: no step is open, or a row has neither one advantage nor one per token.
        """
        step = self._open("accumulate")
        chunk = Totals(LossSums._fields)
        self._model.train()
        try:
            with self._own_randomness():
                for batch in self._microbatches(rows, most_rows):
                    if not batch.rows:  # adds exactly nothing, and meets the others on the way
                        self._token_logprobs(batch).mul(0).sum().backward()  # type: ignore[no-untyped-call]
                        continue
                    sums = policy_gradient_loss(
                        logprobs=self._token_logprobs(batch),
                        prev_logprobs=batch.column("prev_logprobs"),
                        generation_logprobs=batch.column("generation_logprobs"),
                        advantages=batch.advantages(),
                        mask=batch.mask,
                        config=self._loss,
                        reference_logprobs=(
                            batch.column("reference_logprobs") if self._loss.kl_in_loss else None
                        ),
                    )
                    sums.loss.backward()  # type: ignore[no-untyped-call]
                    chunk.add(sums)
        finally:
            self._model.eval()
        step.totals.add_all(chunk)
        metrics = step_metrics(chunk.by_name())
        return {name: metrics[name] for name in ("loss", "tokens")}

    def finish_step(self) -> dict[str, float]:
        """Apply the gradient, divided by the step's tokens or sequences, and close the step.

        Returns `grad_norm` (before clipping), `lr`, that of this step, and the metrics of
        `sc_ray.losses.step_metrics`; the same on every worker. A step without a sampled token
        leaves weights, optimizer and learning rate as they are; all of these but `lr` are 0.

        Raises:
            ScError: no step is open, or its gradient is not finite. The step is then abandoned.
        """
        step = self._open("finish_step")
        try:
            metrics = self._apply(step)
        except BaseException:
            self.abandon_step()
            raise
        self._optimizer.zero_grad(set_to_none=True)
        self._step = None
        self.steps += 1
        return metrics

    def abandon_step(self) -> None:
        """Forget the open step, if there is one: all is as it was before `begin_step`."""
        if self._step is not None:
            self._optimizer.zero_grad(set_to_none=True)
            self._rng = self._step.rng_before
            self._step = None

    # weights and disk ------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """The current weights by name, not copied; of a sharded model this worker's parts."""
        return weights_of(self._model)

    def export_weights(self, path: Path) -> None:
        """Write the weights alone, for engines to load: whole or not at all.

        Of several workers the first one writes.
        """
        if self._sharded_over is not None:
            weights = copies(weights_of(self._model), self._peers)
        else:
            weights = weights_of(self._model)
        if self._is_first:
            write_tensors(weights, path)

    def snapshot(self) -> PolicySnapshot | None:
        """A copy of everything further training depends on, as of the last finished step.

        Of several workers the first one gets it, for all of them; the others get None.
        """
        model: Any = self._model
        weights = copies(weights_of(model), self._peers)
        optimizer = copies(self._optimizer_tensors(), self._peers)
        rng = (self._step.rng_before if self._step else self._rng).clone()
        states = [rng] if self._peers is None else self._peers.each(rng)
        if not self._is_first:
            return None
        return PolicySnapshot(
            weights=weights,
            optimizer=optimizer,
            rng=tuple(states),
            steps=self.steps,
            scheduler_steps=self._scheduler.last_epoch,
            model=model.config,
            tokenizer=self._tokenizer,
        )

    def save(self, directory: Path) -> None:
        """Write `snapshot()` into `directory`. An open step is not in it, and goes on."""
        snapshot = self.snapshot()
        if snapshot is not None:
            snapshot.write(directory)

    def load(self, directory: Path) -> None:
        """Become what `save` wrote, whatever this policy was; settings stay this object's own.

        Any number of workers can load what any number saved. Each goes on with the random state
        that was its own by rank; one that had none begins with one that follows from the seed,
        its rank and the number of steps.

        Raises:
            RestoreError: a file is missing, damaged, or of another model or vocabulary. This
                policy is then not fit for use unless it is loaded again.
        """
        saved = SavedPolicy.read(directory)
        if saved.tokenizer.vocabulary() != self._tokenizer.vocabulary():
            raise RestoreError(
                f"the tokenizer in {directory} has another vocabulary than this run's"
            )
        self.abandon_step()
        for found, mine, name in (
            (saved.weights, weights_of(self._model), WEIGHTS),
            (saved.optimizer, self._optimizer_tensors(), OPTIMIZER),
        ):
            copy_tensors(parts(found, mine), mine, origin=str(directory / name))
        rank = self._rank
        self._rng = saved.rng[rank] if rank < len(saved.rng) else self._fresh_rng(saved.steps)
        self._scheduler = schedule(
            self._optimizer, self._scheduler_settings, steps=saved.scheduler_steps
        )
        self.steps = saved.steps

    # below the surface -----------------------------------------------------------------

    def _open(self, call: str) -> _OpenStep:
        if self._step is None:
            raise ScError(f"{call}: no step is open; begin_step comes first")
        return self._step

    def _apply(self, step: _OpenStep) -> dict[str, float]:
        gradients = []
        for parameter in self._parameters.values():
            if parameter.grad is None:  # this worker had no rows
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self._peers is not None:
            step.totals.reduce(self._peers)
            if self._sharded_over is None:  # else it happened on the way backward
                for gradient in gradients:
                    self._peers.sum(gradient)
        rate = float(self._optimizer.param_groups[0]["lr"])
        totals = step.totals.by_name()
        metrics = {**step_metrics(totals), "lr": rate}
        denominator, tokens = totals["denominator"], totals["tokens"]
        if denominator == 0:
            return {**metrics, "grad_norm": 0.0}
        for gradient in gradients:
            gradient.div_(denominator)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if not torch.isfinite(norm):
            raise ScError(f"finish_step: the gradient's norm over {tokens:.0f} tokens is {norm}")
        torch.nn.utils.clip_grads_with_norm_(
            self._parameters.values(), self._settings.max_grad_norm, norm
        )
        self._optimizer.step()
        self._scheduler.step()
        return {**metrics, "grad_norm": float(norm)}

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in state[parameter].items()
        }

    def _microbatches(self, rows: Sequence[Row], most_rows: int) -> Iterator[Microbatch]:
        size = self._settings.microbatch_rows
        at_least = -(-most_rows // size) if self._sharded_over is not None else 0
        return microbatches(rows, size, self._tokenizer.pad_id, self._device, at_least=at_least)

    def _token_logprobs(
        self, batch: Microbatch, model: torch.nn.Module | None = None
    ) -> torch.Tensor:
        return token_logprobs(model or self._model, batch.input_ids, temperature=self._temperature)

    def _placed(self, model: torch.nn.Module) -> torch.nn.Module:
        model.to(self._device)
        if self._sharded_over is not None:
            shard(model, self._sharded_over)
        return model

    @property
    def _rank(self) -> int:
        return 0 if self._peers is None else self._peers.rank

    @property
    def _is_first(self) -> bool:
        return self._rank == 0

    def _fresh_rng(self, steps: int) -> torch.Tensor:
        """The random state of a worker that has none from before."""
        seed = self._seed
        if self._rank > 0:
            text = f"{self._seed} {self._rank} {steps}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        return torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Run dropout, where a model has it, on this policy's own random numbers."""
        on_gpu = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
            torch.set_rng_state(self._rng)
            if on_gpu:  # its state follows from the CPU's, which alone is saved
                torch.cuda.manual_seed(int(torch.randint(2**62, ())))
            yield
            self._rng = torch.get_rng_state()


class _OpenStep:
    """What a step has gathered besides gradients."""

    def __init__(self, rng_before: torch.Tensor) -> None:
        self.rng_before = rng_before
        self.totals = Totals(LossSums._fields)
