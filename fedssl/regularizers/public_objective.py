"""A control: train on the public images too, without any federation."""

import torch
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..models.model import untouched_running_statistics
from ..objectives.base import Step
from .base import Regularizer, StepLoss, endless_views


class PublicObjective(Regularizer):
    """weight * the client's own objective on two views of a mini-batch of the public images a step.

    What a client gains from seeing public images alone is no gain from its peers; this control measures it. It takes as
    many steps, and as many public images a step, as `cka_alignment`, and leaves BatchNorm's running statistics alone as
    that does. Logs `public_loss`, the term without its weight.
    """

    needs_public_images = True
    runs_objective = True

    weight: float = Field(1.0, ge=0, description="factor of the term")
    batch_size: int = Field(100, ge=2, description="public images a step")

    def start_round(self, local: LocalRound) -> StepLoss:
        assert local.client.public_images is not None
        model, public = local.client.model, local.client.public_images
        views_of_batches = endless_views(local, public, self.batch_size, "public_objective")
        no_labels = torch.zeros(min(self.batch_size, len(public)), dtype=torch.int64, device=model.device)

        def term(step: Step) -> Tensor:
            views = next(views_of_batches)
            with untouched_running_statistics(model):
                loss = local.objective.step(model, views, no_labels).loss
            local.log("public_loss", loss.detach())
            return self.weight * loss

        return term
