"""A model and its optimizer, trained step by step: what a trainer worker holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sc_core import (
    ConfigError,
    RestoreError,
    ScError,
)
from sc_ray.lazy import lazy
from sc_ray.losses import LossConfig, LossSums, policy_gradient_loss, step_metrics
from sc_ray.model import (
    ModelConfig,
    build_model,
    configure_torch,
    copy_tensors,
    read_tensors,
    save_weights,
    token_logprobs,
    weights_of,
    write_tensors,
)
from sc_ray.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Row: TypeAlias = "Mapping[str, torch.Tensor]"
"""One sibling: 1-D tensors by column name, as `sc_ray.generation.rollout_row` makes them; training
also needs `prev_logprobs` `[T]`, from `Policy.logprobs`, and `advantage`, `[1]` or `[T]`. With a
penalty in the loss for leaving a reference, it needs `reference_logprobs` `[T]` as well."""

_WEIGHTS, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "optimizer.json"
_RNG = "torch_rng"


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW at a constant learning rate.

    Raises:
        ConfigError: a value that can't train.
    """

    lr: float = 5e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  #: a longer gradient is scaled down to this
    microbatch_rows: int = 64  #: rows in one forward and backward; bounds memory

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.max_grad_norm <= 0 or self.microbatch_rows < 1:
            raise ConfigError(
                f"optimizer.lr = {self.lr:g}, max_grad_norm = {self.max_grad_norm:g} and"
                f" microbatch_rows = {self.microbatch_rows} must all be above 0"
            )


class _SavedState(msgspec.Struct, frozen=True, kw_only=True, tag="adamw.v1"):
    """What of the optimizer is no tensor."""

    steps: int


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A policy at the end of a step, copied: training may go on while it is written."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    steps: int
    model: Any  #: the model's Hugging Face configuration
    tokenizer: Tokenizer

    def write(self, directory: Path) -> None:
        """Write a directory that `Policy.load` reads, as do Hugging Face and vLLM; no pickle."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(directory))
        self.tokenizer.save(directory)
        write_tensors(self.weights, directory / _WEIGHTS)
        write_tensors(self.optimizer, directory / _OPTIMIZER)
        (directory / _STATE).write_bytes(msgspec.json.encode(_SavedState(steps=self.steps)))


class Policy:
    """The model being trained. One caller at a time; every method blocks.

    A step is `begin_step`, `accumulate` for each of its chunks, then `finish_step` or
    `abandon_step`. The same calls on the same rows give the same bits, also when a save and a
    load into a new object lie between them.

    Args:
        temperature: that of the rollouts; log-probs are those of the same distribution.
        threads: of the whole process; see `configure_torch`.
        all_reduce: sums a tensor over data-parallel workers, in place, on every one of them, as
            `torch.distributed.all_reduce` does. It is called in `finish_step` alone, and equally
            often on each worker, whatever rows each has seen.
        all_reduce_max: the same for the largest.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        threads: int = 1,
        all_reduce: Callable[[torch.Tensor], object] | None = None,
        all_reduce_max: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        configure_torch(threads)
        self._settings = optimizer or OptimizerConfig()
        self._loss = loss or LossConfig()
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._all_reduce = all_reduce
        self._all_reduce_max = all_reduce_max
        self._model = build_model(model, tokenizer, seed=seed)
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
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._rng = torch.Generator().manual_seed(seed).get_state()
        self._step: _OpenStep | None = None
        self.steps = 0  #: finished, over all restarts

    # log-probs -------------------------------------------------------------------------

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Log-probs of each row's sampled tokens under the current weights.

        One float32 tensor per row, as long as its `input_ids`, zero where nothing was sampled.
        """
        found: list[torch.Tensor] = []
        for batch in self._microbatches(rows):
            with torch.no_grad():
                logprobs = self._token_logprobs(batch)
            found += [
                values[: len(row["input_ids"])].clone()
                for row, values in zip(batch.rows, logprobs.where(batch.mask, 0.0), strict=True)
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

    def accumulate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Add one chunk's gradient to the open step; returns `loss` and `tokens` of the chunk.

        Raises:
            ScError: no step is open, or a row has neither one advantage nor one per token.
        """
        step = self._open("accumulate")
        chunk = _Totals()
        self._model.train()
        try:
            with self._own_randomness():
                for batch in self._microbatches(rows):
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
                    chunk.add(torch.stack([value.detach().double() for value in sums]))
        finally:
            self._model.eval()
        step.totals.add(chunk.values)
        metrics = step_metrics(chunk.by_name())
        return {name: metrics[name] for name in ("loss", "tokens")}

    def finish_step(self) -> dict[str, float]:
        """Apply the gradient, divided by the step's tokens or sequences, and close the step.

        Returns `grad_norm` (before clipping) and the metrics of `sc_ray.losses.step_metrics`; the
        same on every data-parallel worker. A step without a sampled token leaves weights and
        optimizer as they are; all of these are 0.

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

    # disk ------------------------------------------------------------------------------

    def export_weights(self, path: Path) -> None:
        """Write the weights alone, for engines to load: whole or not at all."""
        save_weights(self._model, path)

    def snapshot(self) -> PolicySnapshot:
        """A copy of everything further training depends on, as of the last finished step."""
        model: Any = self._model
        tensors = {name: tensor.clone() for name, tensor in self._optimizer_tensors().items()}
        tensors[_RNG] = (self._step.rng_before if self._step else self._rng).clone()
        return PolicySnapshot(
            weights={name: tensor.clone() for name, tensor in weights_of(model).items()},
            optimizer=tensors,
            steps=self.steps,
            model=model.config,
            tokenizer=self._tokenizer,
        )

    def save(self, directory: Path) -> None:
        """Write `snapshot()` into `directory`. An open step is not in it, and goes on."""
        self.snapshot().write(directory)

    def load(self, directory: Path) -> None:
        """Become what `save` wrote, whatever this policy was; settings stay this object's own.

        Raises:
            RestoreError: a file is missing, damaged, or of another model or vocabulary. This
                policy is then not fit for use unless it is loaded again.
        """
        try:
            state = msgspec.json.decode((directory / _STATE).read_bytes(), type=_SavedState)
        except (OSError, msgspec.DecodeError) as exc:
            raise RestoreError(f"{directory / _STATE} can't be read: {exc}") from exc
        if Tokenizer.load(directory).vocabulary() != self._tokenizer.vocabulary():
            raise RestoreError(
                f"the tokenizer in {directory} has another vocabulary than this run's"
            )
        weights, optimizer = (read_tensors(directory / name) for name in (_WEIGHTS, _OPTIMIZER))
        rng = optimizer.pop(_RNG, None)
        if rng is None:
            raise RestoreError(f"{directory / _OPTIMIZER} holds no {_RNG}")
        self.abandon_step()
        copy_tensors(weights, weights_of(self._model), origin=str(directory / _WEIGHTS))
        copy_tensors(optimizer, self._optimizer_tensors(), origin=str(directory / _OPTIMIZER))
        self._rng = rng
        self.steps = state.steps

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
        if self._all_reduce is not None:
            for gradient in gradients:
                self._all_reduce(gradient)
            step.totals.reduce(self._all_reduce, self._all_reduce_max)
        totals = step.totals.by_name()
        metrics = step_metrics(totals)
        denominator, tokens = totals["denominator"], totals["tokens"]
        if denominator == 0:
            return {**metrics, "grad_norm": 0.0}
        for gradient in gradients:
            gradient.div_(denominator)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise ScError(f"finish_step: the gradient's norm over {tokens:.0f} tokens is {norm}")
        torch.nn.utils.clip_grads_with_norm_(
            self._parameters.values(), self._settings.max_grad_norm, norm
        )
        self._optimizer.step()
        return {**metrics, "grad_norm": float(norm)}

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in state[parameter].items()
        }

    def _microbatches(self, rows: Sequence[Row]) -> Iterator[_Microbatch]:
        size = self._settings.microbatch_rows
        for start in range(0, len(rows), size):
            yield _Microbatch(rows[start : start + size], self._tokenizer.pad_id)

    def _token_logprobs(self, batch: _Microbatch) -> torch.Tensor:
        return token_logprobs(self._model, batch.input_ids, temperature=self._temperature)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Run dropout, where a model has it, on this policy's own random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._rng)
            yield
            self._rng = torch.get_rng_state()


class _OpenStep:
    """What a step has gathered besides gradients."""

    def __init__(self, rng_before: torch.Tensor) -> None:
        self.rng_before = rng_before
        self.totals = _Totals()


class _Totals:
    """What the `LossSums` of several microbatches, and of several workers, amount to."""

    def __init__(self) -> None:
        self._is_maximum = torch.tensor([name.startswith("max_") for name in LossSums._fields])
        self.values = torch.zeros(len(LossSums._fields), dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        together = torch.maximum(self.values, values)
        self.values = torch.where(self._is_maximum, together, self.values + values)

    def reduce(
        self,
        all_reduce: Callable[[torch.Tensor], object],
        all_reduce_max: Callable[[torch.Tensor], object] | None,
    ) -> None:
        sums, maxima = self.values.clone(), self.values.clone()
        all_reduce(sums)
        if all_reduce_max is not None:
            all_reduce_max(maxima)
        self.values = torch.where(self._is_maximum, maxima, sums)

    def by_name(self) -> dict[str, float]:
        return dict(zip(LossSums._fields, self.values.tolist(), strict=True))


class _Microbatch:
    """Rows padded at the end to one length."""

    def __init__(self, rows: Sequence[Row], pad_id: int) -> None:
        self.rows = rows
        self.input_ids = self.column("input_ids", pad_id)
        self.mask = self.column("completion_mask").bool()

    def column(self, name: str, padding: float = 0) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in self.rows], batch_first=True, padding_value=padding
        )

    def advantages(self) -> torch.Tensor:
        """`[rows, tokens]`, whether rows have one or one per token."""
        each = []
        for row in self.rows:
            advantage, tokens = row["advantage"], len(row["input_ids"])
            if len(advantage) not in (1, tokens):
                raise ScError(
                    f"a row of {tokens} tokens has {len(advantage)} advantages; it needs one, or"
                    " one per token"
                )
            each.append(advantage.expand(tokens))
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
