"""What an advantage estimator returned: looked at before it is written into rows and trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from sc_core.config import ControllerConfig
from sc_core.errors import ConfigError, EstimatorError
from sc_core.ports import AdvantageEstimator, Columns, EstimatorScope
from sc_core.records import Batch, SampleId

MASKED = "masked"
"""The column that tells an estimator which rows are not trained on. It is in no data plane: the
index knows it."""


def check_reads_masks(batch: Batch, read: Sequence[str]) -> None:
    """Refuse masked rows where the estimator would take them for others.

    Raises:
        EstimatorError: naming the first group with a masked row.
    """
    if MASKED in read:
        return
    for group in batch.groups:
        if group.masked:
            raise EstimatorError(
                f"group {group.group_id} has masked siblings, and the advantage estimator reads"
                f" {', '.join(read)} alone: add {MASKED} to its select_fields, and leave masked"
                " rows out of every baseline"
            )


def check_scope(config: ControllerConfig, estimator: AdvantageEstimator) -> None:
    """Refuse chunks that are less than what the estimator compares.

    Raises:
        ConfigError: it looks at the whole chunk, and a step streams in several; or its scope is
            no known one.
    """
    if estimator.scope not in get_args(EstimatorScope):
        raise ConfigError(
            f"the advantage estimator's scope is {estimator.scope!r}; it is one of"
            f" {', '.join(get_args(EstimatorScope))}"
        )
    chunk = config.async_rl.min_groups_for_streaming_train
    step = config.grpo.num_prompts_per_step
    if estimator.scope == "chunk" and chunk is not None and chunk < step:
        raise ConfigError(
            f"async_rl.min_groups_for_streaming_train is {chunk}, and the advantage estimator"
            f" compares all {step} groups of a step (grpo.num_prompts_per_step): its normalisation"
            f" would depend on which came first; set {step}, or leave it out"
        )


def check_estimates(
    columns: Columns,
    rows: Sequence[SampleId],
    *,
    read: Sequence[str],
    names: frozenset[str] | None = None,
) -> frozenset[str]:
    """The names of the new columns of `rows`.

    `read` are the columns that the estimator was given, and `names` those that it made before.

    Raises:
        EstimatorError: these are other columns, or a value is not finite; names the column, and
            row and group of the value.
    """
    found = frozenset(columns)
    if names is not None and found != names:
        raise EstimatorError(
            f"the advantage estimator returned the columns {_listed(found)}, and"
            f" {_listed(names)} before"
        )
    if not found or not found.isdisjoint(read):
        raise EstimatorError(
            f"the advantage estimator returned the columns {_listed(found)}; it must make new"
            f" ones, and {_listed(read)} were given to it"
        )
    for name, values in columns.items():
        if _are_plain_and_finite(values):
            continue
        for row, value in zip(rows, values, strict=True):
            if not _is_finite(value):
                raise EstimatorError(
                    f"the advantage estimator returned {name} {value!r} for row {row} of group"
                    f" {row.rpartition('_g')[0]}"
                )
    return found


def _are_plain_and_finite(values: Sequence[Any]) -> bool:
    """Whether they are finite numbers, one by one: almost always so, and quickly told."""
    try:
        return all(map(math.isfinite, values))
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_finite(value: Any) -> bool:
    """Of a number, an array, or a sequence of numbers. An array's sum is finite if all of it is."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # not one number
        pass
    try:
        return math.isfinite(value.sum())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return (
            isinstance(value, Iterable)
            and not isinstance(value, str)
            and all(map(_is_finite, value))
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"
