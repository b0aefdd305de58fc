"""The numbers among a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """All that is a number, NaN and infinity too, also of other libraries; text and None are not.

    `step` is one of them.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if value is not None and not isinstance(value, str):
            with suppress(TypeError, ValueError, OverflowError):
                found[name] = float(value)
    return found


def flat(settings: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Settings by their dotted names; lists become text."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{at}{name}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            found[f"{at}{name}"] = value if plain else str(value)
    return found
