"""Rows of many lengths as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from sc_core import (
    ScError,
)

Row = Mapping[str, torch.Tensor]
"""One sibling: 1-D tensors by column name, as `sc_ray.generation.rollout_row` makes them; training
also needs `prev_logprobs` `[T]`, from `Policy.logprobs`, and `advantage`, `[1]` or `[T]`. With a
penalty in the loss for leaving a reference, it needs `reference_logprobs` `[T]` as well."""


class Microbatch:
    """Rows padded at the end to one length, on the device that computes.

    Without rows it is one of padding alone, and `input_ids` the only column: a forward that takes
    part in an exchange between workers and means nothing.
    """

    def __init__(self, rows: Sequence[Row], pad_id: int, device: torch.device) -> None:
        self.rows = rows
        self._device = device
        if rows:
            self.input_ids = self.column("input_ids", pad_id)
            self.mask = self.column("completion_mask").bool()
        else:
            self.input_ids = torch.full((1, 2), pad_id, device=device)

    def column(self, name: str, padding: float = 0) -> torch.Tensor:
        """`[rows, tokens]`."""
        padded = pad_sequence(
            [row[name] for row in self.rows], batch_first=True, padding_value=padding
        )
        return padded.to(self._device)

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
        return pad_sequence(each, batch_first=True).to(self._device)


def microbatches(
    rows: Sequence[Row], size: int, pad_id: int, device: torch.device, *, at_least: int = 0
) -> Iterator[Microbatch]:
    """The rows, so many at a time, then empty ones until there were `at_least` microbatches."""
    starts = range(0, len(rows), size)
    for start in starts:
        yield Microbatch(rows[start : start + size], pad_id, device)
    for _ in range(len(starts), at_least):
        yield Microbatch((), pad_id, device)
