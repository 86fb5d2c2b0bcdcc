"""FedCA's alignment: keep representations near those of a model trained on public data."""

import copy

import torch
from pydantic import Field
from torch import Tensor

from ..aggregators.base_model import BASE
from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss


class BaseAlignment(Regularizer):
    """The alignment module of FedCA (Zhang et al. 2023, Federated unsupervised representation learning):

        weight * mean over images and views of |encoder's output - the base model's for the same view|_2^2

    A client keeps the base model in its memory. It runs in evaluation mode without gradients. This follows the paper's
    abstract, as there is no released code. The kind of distance, its place at the encoder's output, and the weight are
    chosen here. Logs `base_distance`, the term without its weight.
    """

    needs_aggregator = "base_model"

    weight: float = Field(0.01, ge=0, description="factor of the term")

    def start_round(self, local: LocalRound) -> StepLoss:
        memory = local.client.memory.tensors
        memory.update({name: t.clone() for name, t in local.received.tensors.items() if name.startswith(BASE)})
        base = copy.deepcopy(local.client.model.encoder)
        received = {name.removeprefix(BASE): t for name, t in memory.items() if name.startswith(BASE)}
        base.load_state_dict(received, strict=False)  # frozen entries do not travel
        base.requires_grad_(False).eval()

        def term(step: Step) -> Tensor:
            with torch.no_grad():
                targets = [base(view) for view in step.online_views]
            views = zip(step.representations, targets, strict=True)
            distances = [(own - target).square().sum(dim=1).mean() for own, target in views]
            loss = sum(distances[1:], distances[0]) / len(distances)
            local.log("base_distance", loss.detach())
            return self.weight * loss

        return term
