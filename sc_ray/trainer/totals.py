"""What the microbatches of a step, on all workers, amount to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sc_ray.trainer.peers import Peers

_MAXIMUM = "max_"  #: how the names of those fields begin that are no sums


class Totals:
    """Numbers by name, of which those named `max_…` are maxima, and all others sums."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._is_maximum = torch.tensor([name.startswith(_MAXIMUM) for name in names])
        start = torch.zeros(len(self._names), dtype=torch.float64)
        self._values = start.masked_fill(self._is_maximum, -torch.inf)

    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Take in one microbatch's: scalars, in the order of the names."""
        self._merge(torch.stack([value.detach().double().cpu() for value in values]))

    def add_all(self, other: Totals) -> None:
        """Take in what other totals have."""
        self._merge(other._values)

    def reduce(self, peers: Peers) -> None:
        """Become what all workers have together."""
        sums, maxima = self._values.masked_fill(self._is_maximum, 0.0), self._values.clone()
        peers.sum(sums)
        if self._is_maximum.any():
            peers.max(maxima)
        self._values = torch.where(self._is_maximum, maxima, sums)

    def numbers(self) -> dict[str, float]:
        """By name; a maximum of nothing is 0."""
        found = self._values.masked_fill(self._values == -torch.inf, 0.0)
        return dict(zip(self._names, found.tolist(), strict=True))

    def _merge(self, values: torch.Tensor) -> None:
        self._values = torch.where(
            self._is_maximum, torch.maximum(self._values, values), self._values + values
        )
