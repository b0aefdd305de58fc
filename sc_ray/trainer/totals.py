"""What the microbatches of a step, on all workers, amount to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sc_ray.trainer.peers import Peers

_MAXIMUM = "max_"  #: how the names of those fields begin that are no sums


class Totals:
    """Numbers by name, of which those named `max_…` are maxima, none below 0, and others sums."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._is_maximum = torch.tensor([name.startswith(_MAXIMUM) for name in names])
        self._values = torch.zeros(len(self._names), dtype=torch.float64)

    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Take in one microbatch's: scalars, in the order of the names."""
        self._merge(torch.stack([value.detach().double() for value in values]).cpu())

    def add_all(self, other: Totals) -> None:
        """Take in what other totals have."""
        self._merge(other._values)

    def reduce(self, peers: Peers) -> None:
        """Become what all workers have together."""
        sums, maxima = self._values.clone(), self._values.clone()
        peers.sum(sums)
        peers.max(maxima)
        self._values = torch.where(self._is_maximum, maxima, sums)

    def by_name(self) -> dict[str, float]:
        return dict(zip(self._names, self._values.tolist(), strict=True))

    def _merge(self, values: torch.Tensor) -> None:
        largest = torch.maximum(self._values, values)
        self._values = torch.where(self._is_maximum, largest, self._values + values)
