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
    whereas EUA's 2 delta_k / |delta_k|^2 gives clients that moved far more weight. This is written from a description
    of the released code of FedU2 (Liao et al. 2024) and not from the code itself.

    Without `learning_rate` the step has the length at which the new model is a convex combination of the clients'
    models, with weights proportional to p_k / |delta_k|. The released code has a fixed rate for 2 g_k, by default 0.1
    and in its main.py 8. These are 0.2 and 16 here, where g_k has length 1.

    Integers and running statistics are averaged by samples. A client that did not move has weight 0. Where none moved,
    the weights are proportional to the samples, and the model stays as it is. Logs `mgda_weight` (p, by client) and, to
    compare with EUA's, `mgda_rate_min` and `mgda_rate_max`.
    """

    learning_rate: float | None = Field(
        None,
        gt=0,
        description="of the server's SGD step without momentum (default: the new model is a convex combination of the "
        "clients' models)",
    )

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return take_least_norm_step(server, replies, lambda u: u.rsqrt(), self.learning_rate, "mgda")
