"""What a policy learns from tokens that a slightly different policy generated.

`policy_gradient_loss` puts it together: a ratio and its clip (`surrogate`), the weight of what
another policy sampled (`importance`), a penalty for leaving a reference (`kl`); `sums`
has what the parts of a step add up to, and `config` the settings.
"""

from sc_ray.losses.config import KlType, Level, LossConfig
from sc_ray.losses.policy_gradient import policy_gradient_loss
from sc_ray.losses.sums import LossSums, step_metrics

__all__ = ["KlType", "Level", "LossConfig", "LossSums", "policy_gradient_loss", "step_metrics"]
