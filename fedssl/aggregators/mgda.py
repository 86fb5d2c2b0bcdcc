"""The aggregator that FedU2's authors released in place of EUA: a step along the min-norm point of unit updates."""

from __future__ import annotations

from pydantic import Field

from ..messages import Message
from .eua import take_least_norm_step
from .weighted_mean import WeightedMean


class MGDA(WeightedMean):
    """theta_g <- theta_g - learning_rate * sum_k p_k g_k, g_k = delta_k / |delta_k|, delta_k = theta_g - theta_k.

    p is the min-norm point of the normalised client gradients: the least |sum_k p_k g_k| on the simplex (MGDA, Désidéri
    2012; over the clients of a federation as in Hu et al. 2022, FedMGDA+). Each client counts by its direction alone,
    whereas EUA's 2 delta_k / |delta_k|^2 gives clients that moved far more weight. This is what the released code of
    FedU2 (Liao et al. 2024) does under the name EUA. It differs from `eua` with `divide_updates_by: length` only in how
    a fixed step is given.

    The released code takes an SGD step of a fixed rate for 2 g_k, 0.1 by default and 8 in its main.py, whatever the
    updates' lengths. These are `learning_rate` 0.2 and 16 here, where g_k has length 1. Such a rate fits one model, one
    optimiser and one number of steps. Without `learning_rate` the rate is the mean of |delta_k|, weighted by samples:
    every update is brought to the mean length before p combines them. Where all clients move in one direction, the
    step then is FedAvg's; it is shorter by as much as p makes the directions cancel, and 0 where no step improves all.
    On a small CIFAR-10 (ten clients of 157 to 2,714 images) it is 0.99 of FedAvg's step; with the length at which the
    new model is a convex combination of the clients' models, as EUA's has, it was 0.64. At any length the three clients
    with the fewest images have 58 % of the shares' sum there: a unit update counts by its direction, and theirs are the
    shortest. Equal steps for all clients (`training.local_steps`), which the released code has, avoid that.

    Deviation from the released code: its solver starts at the weights by samples and stops after 20 iterations; here p
    is solved exactly (`fedkernels.client_weights`). Integers, running statistics and clients that did not move: as in
    `EUA`. Logs `mgda_weight`, `mgda_share` (whose sum is not 1), `mgda_rate_min` and `mgda_rate_max`, each as EUA's.
    """

    learning_rate: float | None = Field(
        None,
        gt=0,
        description="of the server's SGD step without momentum (default: the updates' mean length by samples)",
    )

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return take_least_norm_step(server, replies, "length", self.learning_rate, "mgda")
