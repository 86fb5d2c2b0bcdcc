"""Uniformity of Wang & Isola 2020: how evenly representations fill the unit sphere."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError


def uniformity(features: Tensor) -> float:
    """log of the mean over pairs i < j of exp(-2 |z_i - z_j|^2), z the l2-normalised representations.

    Wang & Isola 2020, section 4.1.2, with t = 2. The lower, the more uniform: 0 where all representations are one
    point, about -4 for uniform ones in many dimensions, where squared distances are near 2. A zero vector stays zero.

    Args:
        features: floating point [n, d], finite, n at least 2.

    Raises:
        UserError: fewer than two representations.
    """
    if len(features) < 2:
        raise UserError(f"features: expected at least two representations, got {len(features)}; raise data.test_limit")
    distances = torch.pdist(F.normalize(features.detach().double(), dim=1))
    return float((-2 * distances.square()).logsumexp(dim=0)) - math.log(len(distances))
