"""The regularizer that FedU2's authors released in place of FUR: sliced Wasserstein distance to the uniform sphere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..errors import UserError
from ..models.model import Model
from ..objectives.base import Step
from .base import Regularizer, StepLoss
from .uniformity import sphere_samples


def tangent_coordinates(points: Tensor, base: Tensor, direction: Tensor) -> Tensor:
    """<Log_base(z), direction> for unit vectors z: the coordinate of a point of the sphere along a tangent direction.

    Log_base(z) = angle * (z - cos(angle) base) / sin(angle) with cos(angle) = <z, base>, in radians. As base and
    direction are orthogonal, the coordinate is angle / sin(angle) * <z, direction>.

    Args:
        points: unit vectors [..., n, d].
        base: unit vectors [p, d].
        direction: unit vectors [p, d], each orthogonal to its base.

    Returns:
        [..., n, p].
    """
    cosine = points @ base.T
    # The logarithm has no gradient at the base itself and at the point opposite to it.
    sine = (1 - cosine.square()).clamp_min(1e-12).sqrt()
    return torch.atan2(sine, cosine) / sine * (points @ direction.T)


def sliced_distance(points: Tensor, samples: Tensor, base: Tensor, direction: Tensor) -> Tensor:
    """Mean over the slices of the squared 2-Wasserstein distance between the coordinates of two sets of n points.

    In one dimension the optimal plan matches the sorted values, so it is the mean squared difference of these.

    Args:
        points: unit vectors [..., n, d].
        samples: unit vectors [n, d].
        base, direction: see `tangent_coordinates`.

    Returns:
        [...].
    """
    point_values = tangent_coordinates(points, base, direction).sort(dim=-2).values
    sample_values = tangent_coordinates(samples, base, direction).sort(dim=-2).values
    return (point_values - sample_values).square().mean(dim=(-2, -1))


class SlicedUniformity(Regularizer):
    """weight * sum over views of a sliced Wasserstein distance between projections and uniform points of the sphere.

    Each step draws B uniform points of the unit sphere, and `slices` random pairs of a point of the sphere and a unit
    tangent direction there. The sphere's logarithm maps the l2-normalised projector outputs of each view and the B
    points into the tangent spaces, where they are compared along the directions (`sliced_distance`).

    The released code of FedU2 (Liao et al. 2024) computes this kind of distance where the paper describes unbalanced
    optimal transport (Eq. 4; that is `uniformity`). This is written from a description of the code, "a sliced
    Wasserstein distance on tangent spaces at random points of the sphere, 6 projections, projector output of both
    views, weight 0.01", and not from the code itself. The order (squared 2-Wasserstein), one direction a tangent space,
    and new draws for each step are chosen here. Unlike FUR it matches all mass.

    Logs `sliced_distance`, the mean over the views.
    """

    weight: float = Field(0.01, ge=0, description="factor of the distances")
    slices: int = Field(6, ge=1, description="tangent directions a step")

    def check_model(self, model: Model) -> None:
        if "projector" not in model.online:
            raise UserError("sliced_uniformity works on the projector's output, and this objective has no projector")

    def start_round(self, local: LocalRound) -> StepLoss:
        generator = local.generator("sliced_uniformity")

        def term(step: Step) -> Tensor:
            z = F.normalize(torch.stack(step.projections).float(), dim=-1)
            _, rows, features = z.shape
            samples = sphere_samples(rows, features, generator).to(z.device)
            base = sphere_samples(self.slices, features, generator)
            direction = torch.randn(self.slices, features, generator=generator)
            direction = F.normalize(direction - (direction * base).sum(1, keepdim=True) * base, dim=1)
            distances = sliced_distance(z, samples, base.to(z.device), direction.to(z.device))
            local.log("sliced_distance", float(distances.detach().mean()))
            return self.weight * distances.sum()

        return term
