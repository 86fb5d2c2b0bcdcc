"""FedX's global distillation: predict the global model's projection of an image and its relations to other images."""

import torch
from pydantic import Field
from torch import Tensor

from fedkernels import nt_xent

from ..client import LocalRound
from ..models.model import frozen_copy
from ..objectives.base import Step
from .base import Regularizer, StepLoss, endless_views
from .relational_distillation import relational_loss


class GlobalDistillation(Regularizer):
    """The two global losses of FedX (Han et al. 2022, FedX: Unsupervised Federated Learning with Cross Knowledge
    Distillation). The global model is the one received at the start of the round:

        nt_xent(prediction of view 1, global projection of view 2)
        + `relational_loss` of the predictions of both views over global projections of random images

    As in the authors' released code, the weight is 1, the temperature of both losses is 0.1, and the global model runs
    in evaluation mode without gradients. The divergence is the paper's (see `relational_distillation`). Logs
    `global_contrastive_loss` and `global_relational_loss`.
    """

    needs_global_model = True
    needs_head = "predictor"
    needs_two_views = True

    weight: float = Field(1.0, ge=0, description="factor of the two losses")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities")
    batch_size: int = Field(64, ge=2, description="random images of the client a step")

    def start_round(self, local: LocalRound) -> StepLoss:
        unit_rows = local.client.model.unit_rows
        global_network = frozen_copy(local.client.model, local.received.tensors)
        others = endless_views(local, local.client.images, self.batch_size, "global_distillation", count=1)

        def term(step: Step) -> Tensor:
            with torch.no_grad():
                second = global_network(step.views[step.first_view + 1])
                projected = global_network(*next(others))
            contrast = nt_xent(unit_rows(step.predictions[0]), unit_rows(second), self.temperature)
            relation = relational_loss(step.predictions[0], step.predictions[1], projected, self.temperature)
            local.log("global_contrastive_loss", contrast.detach())
            local.log("global_relational_loss", relation.detach())
            return self.weight * (contrast + relation)

        return term
