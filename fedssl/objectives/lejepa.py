"""LeJEPA: equal projections of two views, whose distribution over the batch is an isotropic Gaussian."""

import torch
from pydantic import Field
from torch import Tensor, nn

from fedkernels import sigreg

from ..models.model import Model, with_projector
from .base import Objective, Step


class LeJEPA(Objective):
    """Balestriero & LeCun 2025, LeJEPA, Algorithm 2, on two views of each image.

        (1 - weight) * mean over views, images and features of (z - mean over views of z)^2
            + weight * mean over views of `fedkernels.sigreg`(Z)

    There is no target network, predictor or other image to compare with. New random directions come from torch's
    global generator in each step, which the client seeds. The projector has three layers with BatchNorm and ReLU
    before the last. The paper compares views of several sizes (DINO's crops) with the mean of the large ones.

    As in the paper the statistic is that of each view alone, and the two terms are weighted by 1 - weight and weight.
    """

    hidden_features: int = Field(2048, ge=1, description="width of the projector's hidden layers")
    output_features: int = Field(64, ge=2, description="dimension of the projections")
    weight: float = Field(0.05, ge=0, le=1, description="lambda; weight of the distance to the Gaussian")
    directions: int = Field(1024, ge=1, description="random directions along which each step compares")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return with_projector(encoder, self.hidden_features, self.output_features, layers=3)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections = model.outputs_of_views(views)
        z = torch.stack(projections)
        directions = torch.randn(z.shape[2], self.directions).to(z.device, non_blocking=True)
        distances = torch.stack([sigreg(one, directions) for one in projections])
        equal = (z - z.mean(dim=0)).square().mean()
        return Step((1 - self.weight) * equal + self.weight * distances.mean(), representations, projections)
