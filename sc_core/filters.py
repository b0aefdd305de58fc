"""Which finished groups are worth training on."""

from __future__ import annotations

import math
from collections.abc import Sequence


class ZeroVarianceFilter:
    """Drops groups whose rewards are all equal: relative to their mean they teach nothing.

    Rewards count as equal when the greatest and the smallest differ by at most `tolerance`, in
    units of reward. The default, 0, asks for equal floats; set it where rewards are computed
    with rounding. A group with a reward that is not finite is kept, for others to complain about.
    One without a sibling to train on is dropped.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        if not tolerance >= 0:
            raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
        self._tolerance = tolerance

    def keep(self, rewards: Sequence[float]) -> bool:
        """Whether `rewards`, one per sibling, differ."""
        if not all(map(math.isfinite, rewards)):
            return True
        if not rewards:
            return False
        return max(rewards) - min(rewards) > self._tolerance
