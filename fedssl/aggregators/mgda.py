"""The aggregator that FedU2's authors released in place of EUA: a step along the min-norm point of unit updates."""

from __future__ import annotations

from pydantic import Field

from ..messages import Message
from .eua import take_least_norm_step
from .weighted_mean import WeightedMean


class MGDA(WeightedMean):
    """theta_g <- theta_g - learning_rate * sum_k p_k g_k, g_k = delta_k / |delta_k|, delta_k = theta_g - theta_k.

    p is the min-norm point of the normalised client gradients: the least |sum_k p_k g_k| on the simplex (MGDA, Désidéri
    2012; over the clients of a federation as in Hu et al. 2022, FedMGDA+). Each client counts by its direction alone;
    EUA's 2 delta_k / |delta_k|^2 lets those that moved far weigh more. Written from a description of the released code
    of FedU2 (Liao et al. 2024) and not from the code itself.

    Options:
        learning_rate: of the server's SGD step, without momentum. Where not given, the step's length is that at
            which the new model is a convex combination of the clients' models, with weights in proportion to
            p_k / |delta_k|. The released code has a fixed rate for 2 g_k, by default 0.1 and in its main.py 8: that is
            0.2 and 16 here, where g_k has length 1.

    Integers and running statistics are averaged by samples. A client that did not move has weight 0; where none moved,
    the weights are by samples and the model stays as it is. Logs `mgda_weight` (p, by client) and, to compare with
    EUA's, `mgda_rate_min` and `mgda_rate_max`.
    """

    learning_rate: float | None = Field(None, gt=0)

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return take_least_norm_step(server, replies, lambda u: u.rsqrt(), self.learning_rate, "mgda")
