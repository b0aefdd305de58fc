"""Advantages: how much better than expected a sibling, or each of its tokens, was.

Each is an `AdvantageEstimator` of the controller. Those of one group: `GrpoAdvantages`,
`DrGrpoAdvantages`, `RlooAdvantages`, `OpoAdvantages`, and `RawRewards`, which compares nothing.
Those that normalise over the batch: `ReinforcePlusPlusAdvantages`,
`ReinforcePlusPlusBaselineAdvantages`, `GdpoAdvantages`. With a critic: `GaeAdvantages`.
"""

from sc_ray.estimators.config import AdvantagesConfig
from sc_ray.estimators.gae import GaeAdvantages
from sc_ray.estimators.gdpo import GdpoAdvantages
from sc_ray.estimators.grpo import Baseline, DrGrpoAdvantages, GrpoAdvantages, RlooAdvantages
from sc_ray.estimators.opo import OpoAdvantages
from sc_ray.estimators.reinforce import (
    RawRewards,
    ReinforcePlusPlusAdvantages,
    ReinforcePlusPlusBaselineAdvantages,
)

__all__ = [
    "AdvantagesConfig",
    "Baseline",
    "DrGrpoAdvantages",
    "GaeAdvantages",
    "GdpoAdvantages",
    "GrpoAdvantages",
    "OpoAdvantages",
    "RawRewards",
    "ReinforcePlusPlusAdvantages",
    "ReinforcePlusPlusBaselineAdvantages",
    "RlooAdvantages",
]
