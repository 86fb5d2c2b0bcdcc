"""Singular-value spectrum and effective rank of a set of representations: whether they have collapsed."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .features import require_finite


def singular_values(features: Tensor) -> Tensor:
    """Singular values of the column-centred representation matrix divided by sqrt(n).

    They are the standard deviations of the representation along its principal axes, so they do not grow with
    the number of samples: their squares are the eigenvalues of the covariance matrix (with divisor n).

    Args:
        features: floating point [n, d], finite, one representation a row.

    Returns:
        float64 [min(n, d)], descending, on the device of `features`.

    Raises:
        UserError: a feature is not finite.
    """
    require_finite("features", features)
    matrix = features.detach().to(torch.float64)
    return torch.linalg.svdvals((matrix - matrix.mean(dim=0)) / len(matrix) ** 0.5)


def log_covariance_singular_values(features: Tensor, top: int = 100) -> Tensor:
    """Natural logarithms of the largest singular values of the covariance matrix, for FedU2's Figure 3.

    The covariance (divisor n) is that of the l2-normalised representations, which the paper works with. Its singular
    values sum to at most 1, so models of different scales compare. Values below 1e-12, which float32 cannot resolve,
    are set to that.

    Args:
        features: floating point [n, d], finite, one representation a row.
        top: the most values to return.

    Returns:
        float64 [min(n, d, top)], descending, between log(1e-12) = -27.6 and 0.

    Raises:
        UserError: a feature is not finite.
    """
    values = singular_values(F.normalize(features.detach().to(torch.float64), dim=1))[:top]
    return values.square().log().clamp(min=math.log(1e-12))


def effective_rank(features: Tensor) -> float:
    """Effective rank of Roy & Vetterli 2007: exp of the entropy of the singular values normalised to sum one.

    effective rank = exp(-sum_i p_i log p_i) with p_i = s_i / sum_j s_j, s = `singular_values(features)`. It
    lies between 1 (all variation along one axis) and min(n - 1, d) (all axes vary alike), and does not change
    when the representation is scaled, shifted or rotated.

    Roy & Vetterli leave it undefined where nothing varies. Here it is then 1.0, the lowest value, as the
    representation has fully collapsed. That includes one sample, and representations that differ by no more
    than the rounding of their dtype, whose directions would be noise.

    Args:
        features: floating point [n, d], finite, one representation a row.

    Raises:
        UserError: a feature is not finite.
    """
    values = singular_values(features)
    root_mean_square_norm = features.detach().to(torch.float64).norm() / len(features) ** 0.5
    rounding = 16 * torch.finfo(features.dtype).eps * root_mean_square_norm
    if values.norm() <= rounding:  # the norm of the spectrum is the root mean square distance from the mean
        return 1.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())
