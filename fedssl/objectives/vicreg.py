"""VICReg: equal projections of two views, whose features vary over the batch and do not correlate."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.model import Model, with_projector
from .base import Objective, Step

#: below the square root of a variance; epsilon of Eq. 2, as in the released code
_SMALL_VARIANCE = 1e-4


def variance_loss(projections: Tensor) -> Tensor:
    """Return the mean over features of max(0, 1 - sqrt(variance + 0.0001)), a scalar (Eq. 1); projections are [n, d].

    The variance is that of the batch, divided by n - 1.
    """
    return F.relu(1.0 - torch.sqrt(projections.var(dim=0) + _SMALL_VARIANCE)).mean()


def covariance_loss(projections: Tensor) -> Tensor:
    """Return the sum of the squared covariances of different features, divided by d (Eq. 4); projections are [n, d].

    Covariances are those of the batch, divided by n - 1.
    """
    centred = projections - projections.mean(dim=0)
    covariances = centred.T @ centred / (len(centred) - 1)
    return (covariances.square().sum() - covariances.diagonal().square().sum()) / projections.shape[1]


class VICReg(Objective):
    """Bardes, Ponce & LeCun 2022, VICReg: Variance-Invariance-Covariance Regularization, Eq. 6.

        invariance_weight * mean squared difference + variance_weight * mean over both views of `variance_loss`
            + covariance_weight * sum over both views of `covariance_loss`

    Where the paper and its released code differ, this follows the code: the invariance term is the mean over the
    features too (Eq. 5 has their sum), and the variance terms of the two views are averaged (Eq. 6 has their sum). The
    weights are those of both. The projector has three layers with BatchNorm and ReLU before the last. Its widths are
    8192 in the paper; 2048 here, as the head travels in each round.

    The statistics are those of one batch of one client. They do not travel, so features may still correlate over the
    clients together.
    """

    hidden_features: int = Field(2048, ge=1, description="width of the projector's hidden layers")
    output_features: int = Field(2048, ge=2, description="dimension of the projections")
    invariance_weight: float = Field(25.0, ge=0, description="lambda; weight of the distance between the two views")
    variance_weight: float = Field(25.0, ge=0, description="mu; weight of the term that keeps each feature's spread")
    covariance_weight: float = Field(1.0, ge=0, description="nu; weight of the covariances of different features")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return with_projector(encoder, self.hidden_features, self.output_features, layers=3)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections = model.outputs_of_views(views)
        first, second = projections
        loss = self.invariance_weight * F.mse_loss(first, second)
        loss = loss + self.variance_weight * (variance_loss(first) + variance_loss(second)) / 2
        loss = loss + self.covariance_weight * (covariance_loss(first) + covariance_loss(second))
        return Step(loss, representations, projections)
