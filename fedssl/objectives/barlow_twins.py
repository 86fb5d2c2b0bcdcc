"""Barlow Twins: make the features of two views' projections correlate with themselves and not with each other."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.model import Model, with_projector
from .base import Objective, Step


def redundancy_loss(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """Return sum_i (1 - C_ii)^2 + weight * sum over i != j of C_ij^2, a scalar.

    C_ij is the correlation over the batch of feature i of `first` and feature j of `second`, both [n, d]. Features are
    normalised as BatchNorm does, with the variance divided by n and 0.00001 added to it.
    """
    first, second = (F.batch_norm(projections, None, None, training=True) for projections in (first, second))
    correlations = first.T @ second / len(first)
    diagonal = correlations.diagonal()
    off_diagonal = correlations.square().sum() - diagonal.square().sum()
    return (1.0 - diagonal).square().sum() + weight * off_diagonal


class BarlowTwins(Objective):
    """Zbontar et al. 2021, Barlow Twins: Self-Supervised Learning via Redundancy Reduction, Eq. 1 and 2.

        `redundancy_loss`(projections of view 1, projections of view 2, off_diagonal_weight)

    The weight is the paper's best. The projector has three layers with BatchNorm and ReLU before the last. Its widths
    are 8192 in the paper; 2048 here, as the head travels in each round. The loss is a sum over the features, and SGD at
    a usual rate diverges with some hundreds of them. The paper trains with LARS, whose steps hardly depend on the size
    of the loss. Those of AdamW do not either, which the presets take for this objective.

    The correlations are those of one batch of one client. They do not travel.
    """

    hidden_features: int = Field(2048, ge=1, description="width of the projector's hidden layers")
    output_features: int = Field(2048, ge=2, description="dimension of the projections")
    off_diagonal_weight: float = Field(5e-3, ge=0, description="lambda; weight of the correlations to be removed")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return with_projector(encoder, self.hidden_features, self.output_features, layers=3)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections = model.outputs_of_views(views)
        first, second = projections
        return Step(redundancy_loss(first, second, self.off_diagonal_weight), representations, projections)
