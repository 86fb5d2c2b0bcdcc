"""FedProx's proximal term: stay near the global weights."""

from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss


class Proximal(Regularizer):
    """FedProx (Li et al. 2020, Federated Optimization in Heterogeneous Networks, Eq. 2): mu / 2 |w - w_t|^2.

    This is LW-FedSSL's proximal alignment (PA, section 4.6), which cites FedProx and prints no mu. w are the parameters
    that train in the round, including the heads, and w_t are their values at its start. FedProx tries mu = 0.001, 0.01,
    0.1 and 1; the default is the lower of the middle two. Logs `proximal_distance`, |w - w_t|.
    """

    weight: float = Field(0.01, ge=0, description="mu; the term has the factor mu / 2")

    def start_round(self, local: LocalRound) -> StepLoss:
        trained = [p for p in local.client.model.online.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in trained]

        def term(step: Step) -> Tensor:
            squared = step.loss.new_zeros(())
            for now, before in zip(trained, start, strict=True):
                squared = squared + (now - before).square().sum()
            local.log("proximal_distance", squared.detach().double().sqrt())
            return 0.5 * self.weight * squared

        return term
