"""The regularizer that FedU2's authors released in place of FUR: sliced Wasserstein distance to the uniform sphere."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss
from .uniformity import sphere_samples

#: the released code divides its sum over the tangent spaces by this number, however many there are
RELEASED_DIVISOR = 6


def tangent_coordinates(points: Tensor, base: Tensor, direction: Tensor) -> Tensor:
    """Return <Log_base(z), direction> for unit vectors z: a point's coordinate along a direction.

    Log_base(z) = angle * (z - cos(angle) base) / sin(angle) with cos(angle) = <z, base>, in radians. It lies in the
    tangent space at the base, so the part of a direction along the base does not count. From points [..., n, d], base
    [p, d] and q directions of any length for each, [p, q, d], the result is [..., n, p, q].
    """
    cosine = points @ base.T
    # The logarithm has no gradient at the base itself and at the point opposite to it.
    sine = (1 - cosine.square()).clamp_min(1e-12).sqrt()
    along = (points @ direction.flatten(0, 1).T).unflatten(-1, direction.shape[:2])
    along_base = (direction * base.unsqueeze(1)).sum(-1)
    return (torch.atan2(sine, cosine) / sine).unsqueeze(-1) * (along - cosine.unsqueeze(-1) * along_base)


def sliced_distance(points: Tensor, samples: Tensor, base: Tensor, direction: Tensor) -> Tensor:
    """Return, per tangent space, the squared 2-Wasserstein distance of the coordinates of two sets of n points.

    In one dimension the optimal plan matches the sorted values, so the distance along a direction is the mean squared
    difference of these. The result, [..., p] from unit points [..., n, d] and samples [n, d], is its mean over the
    directions of the tangent space (see `tangent_coordinates`).
    """
    point_values = tangent_coordinates(points, base, direction).sort(dim=-3).values
    sample_values = tangent_coordinates(samples, base, direction).sort(dim=-3).values
    return (point_values - sample_values).square().mean(dim=(-3, -1))


class SlicedUniformity(Regularizer):
    """weight * sum over views of a sliced Wasserstein distance between projections and uniform points of the sphere.

    Each step draws B uniform points s_j of the unit sphere and B tangent spaces, at uniform points t_p, each with
    `directions` Gaussian directions v_pq; all are drawn on the model's device, and a GPU draws others than the CPU. The
    sphere's logarithm maps the l2-normalised projector outputs of each view and the points s_j into the tangent spaces,
    where they are compared along the directions (`sliced_distance`):

        1/6 * sum over p of the mean over q and j of (sorted <Log_t_p(z), v_pq> - sorted <Log_t_p(s), v_pq>)^2_j

    This is what the released code of FedU2 (Liao et al. 2024, `RepresentationTagentCollapse`) computes where the paper
    describes unbalanced optimal transport (Eq. 4; that is `uniformity`), with weight 0.01. Its class takes 6 as the
    number of tangent spaces and draws one an image, so the 6 only divides. Unlike FUR the term matches all mass. Its
    BYOL loss is a sum over two directions and ours their mean, so beside `byol` the released weight is 0.005.

    So the term grows with the batch and the width of the projections: it is about B (d - 1) / 6 times the mean over the
    tangent spaces along unit directions, 10,900 times for B = 128 and d = 512.

    Deviation: BYOL's and SimSiam's projections are l2-normalised here, as SimCLR's are in the released code. There the
    others are passed on as they are, and the logarithm of a vector off the sphere has no meaning. Logs
    `sliced_distance`: the sum above, as the mean over the views.
    """

    needs_head = "projector"

    weight: float = Field(0.01, ge=0, description="factor of the distances")
    directions: int = Field(6, ge=1, description="directions in each tangent space")

    def start_round(self, local: LocalRound) -> StepLoss:
        generator = local.generator("sliced_uniformity", local.client.model.device)

        def term(step: Step) -> Tensor:
            z = F.normalize(torch.stack(step.projections).float(), dim=-1)
            _, rows, features = z.shape
            samples = sphere_samples(rows, features, generator)
            base = sphere_samples(rows, features, generator)
            direction = torch.randn(rows, self.directions, features, generator=generator, device=generator.device)
            view_distances = sliced_distance(z, samples, base, direction).sum(-1) / RELEASED_DIVISOR
            local.log("sliced_distance", view_distances.detach().mean())
            return self.weight * view_distances.sum()

        return term
