"""FedX's local relational distillation: both views of an image have the same similarities to other images."""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss, endless_views


def relational_loss(first: Tensor, second: Tensor, others: Tensor, temperature: float) -> Tensor:
    """Return the Jensen-Shannon divergence of two views' similarity distributions over `others`, mean over images.

    It is (KL(r1 | m) + KL(r2 | m)) / 2, between 0 and ln 2, with m = (r1 + r2) / 2 and
    r1 = softmax_j(cos(first_i, others_j) / temperature), r2 the same of `second`; first, second [n, d], others [m, d].
    """
    others = F.normalize(others, dim=1)
    logs = [F.log_softmax(F.normalize(v, dim=1) @ others.T / temperature, dim=1) for v in (first, second)]
    mixture = torch.logaddexp(logs[0], logs[1]) - math.log(2.0)
    divergences = [(log.exp() * (log - mixture)).sum(dim=1) for log in logs]
    return ((divergences[0] + divergences[1]) / 2).mean()


class RelationalDistillation(Regularizer):
    """The local relational loss of FedX (Han et al. 2022, FedX: Unsupervised Federated Learning with Cross Knowledge
    Distillation): `relational_loss` of the projections of the two views, over projections of random images of the
    client.

    The paper names the Jensen-Shannon divergence. The authors' released code computes (KL(m | r1) + KL(m | r2)) / 2,
    which agrees with it to second order. As in the code, the weight is 1, the temperature is 0.1, there are 64 random
    images (a batch there), and gradients flow through both views and the random images. The code passes these through
    the network together with the views; here they are a batch of their own. Logs `local_relational_loss`, the term
    without its weight.
    """

    needs_head = "projector"
    needs_two_views = True

    weight: float = Field(1.0, ge=0, description="factor of the term")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities")
    batch_size: int = Field(64, ge=2, description="random images of the client a step")

    def start_round(self, local: LocalRound) -> StepLoss:
        model = local.client.model
        others = endless_views(local, local.client.images, self.batch_size, "relational_distillation", count=1)

        def term(step: Step) -> Tensor:
            first, second = step.projections
            projected = model.online["projector"](model.encoder(*next(others)))
            loss = relational_loss(first, second, projected, self.temperature)
            local.log("local_relational_loss", loss.detach())
            return self.weight * loss

        return term
