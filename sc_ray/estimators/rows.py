"""What estimators have in common: rows in groups, of which some are masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sc_core import (
    Columns,
    ConfigError,
    DataPlaneError,
)
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

EPSILON = 1e-8  #: added to a standard deviation over the batch


def scalars(columns: Columns, name: str, group_sizes: Sequence[int]) -> torch.Tensor:
    """A column of one number per row: float64 `[rows]`.

    Raises:
        DataPlaneError: the groups have more or fewer rows than there are.
    """
    rows = columns[name]
    if sum(group_sizes) != len(rows):
        raise DataPlaneError(f"{len(rows)} {name}s for groups of {sum(group_sizes)} rows")
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([torch.as_tensor(row).reshape(1).double() for row in rows])


def trained_rows(columns: Columns, count: int) -> torch.Tensor:
    """Which rows are not masked: bool `[rows]`. All of them, if no column says."""
    masked = columns.get("masked")
    if masked is None:
        return torch.ones(count, dtype=torch.bool)
    return ~torch.as_tensor(list(masked), dtype=torch.bool)


def sampled_tokens(columns: Columns) -> torch.Tensor:
    """How many tokens of each row were sampled: float64 `[rows]`."""
    counts = [float(torch.as_tensor(row).sum()) for row in columns["completion_mask"]]
    return torch.tensor(counts, dtype=torch.float64)


def within_groups(
    values: torch.Tensor,
    trained: torch.Tensor,
    group_sizes: Sequence[int],
    compare: Callable[[slice, torch.Tensor], torch.Tensor],
    *,
    smallest: int = 1,
) -> torch.Tensor:
    """Compare the rows of each group that are not masked; all others get zeros.

    `compare` is given where the group is, and where in it the rows are that count. A group of
    which masks leave fewer than `smallest` gets zeros: those have nobody to compare with.
    """
    found, first = torch.zeros_like(values), 0
    for size in group_sizes:
        group = slice(first, first + size)
        kept = trained[group]
        if int(kept.sum()) >= smallest:
            found[group][kept] = compare(group, kept)
        first += size
    return found


def check_size(siblings: int | None, smallest: int, which: str) -> None:
    """Refuse groups in which nobody can be compared.

    Raises:
        ConfigError: there are fewer siblings than `smallest`.
    """
    if siblings is not None and siblings < smallest:
        raise ConfigError(f"{which} needs groups of at least {smallest} siblings, not {siblings}")


def normalised(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Less the mean, by the standard deviation, of values that count `weights` times each.

    With W the sum of the weights: m = sum w x / W, s^2 = sum w (x - m)^2 / W, and
    (x - m) / (s + 1e-8). Values of weight 0 become 0.
    """
    total = weights.sum()
    mean = (weights * values).sum() / total
    deviation = ((weights * (values - mean).square()).sum() / total).sqrt()
    return torch.where(weights > 0, (values - mean) / (deviation + EPSILON), 0.0)


def one_per_row(advantages: torch.Tensor) -> dict[str, list[Any]]:
    """The column `advantage`, `[1]` per row."""
    return {"advantage": list(advantages.float().reshape(-1, 1))}
