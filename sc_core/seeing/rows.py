"""Rows of `metrics.jsonl`, and the numbers in them, as far as they make sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_STEPS = range(2**63)
_MOST = 1e100  #: of a number: the sum of many is finite as well
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def metric_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Each with a step. Lines that are no such row, torn ones say, are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = _decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            step, incarnation = row.get("step"), row.get("incarnation")
            if type(step) is int and step in _STEPS and isinstance(incarnation, str | None):
                yield row


def number(row: Mapping[str, Any], name: str) -> float | None:
    """What a row has under that name, if it is a number that some controller could have written."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        return None
    return float(value)
