"""Representations as points on the unit sphere in three dimensions, and how much of it they cover."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from .features import check_features


def sphere_points(features: Tensor) -> Tensor:
    """The l2-normalised representations, projected onto their three main directions and normalised again.

    For FedU2's Figure 4, whose text does not say how 512 dimensions become three. Here they are the first right
    singular vectors of the normalised representations without centring, since the sphere has its centre at 0: a
    representation that collapses to a point stays a point, and one that varies along one direction becomes an arc. The
    sign of each direction is that of the mean, so the first axis points at the middle of the cloud.

    Args:
        features: floating point [n, d], finite.

    Returns:
        float64 [n, 3] of norm 1; coordinates beyond d are 0, and so is a row without any part in the three directions.

    Raises:
        UserError: not a floating-point matrix, empty, or non-finite.
    """
    check_features("features", features)
    rows = F.normalize(features.detach().double(), dim=1)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:3]
    points = rows @ directions.T
    points = points * torch.where(points.mean(dim=0) < 0, -1.0, 1.0)
    return F.normalize(F.pad(points, (0, 3 - points.shape[1])), dim=1)


def sphere_coverage(points: Tensor, cells: int = 200) -> float:
    """Share of the sphere's cells that hold a point, 0 to 1: the less, the more of the sphere is blank.

    The cells are those nearest to each point of a Fibonacci lattice, equal in area to a few percent. n points drawn
    uniformly reach about 1 - (1 - 1/cells)^n: compare figures of one n.

    Args:
        points: floating point [n, 3], of norm 1.
        cells: number of cells.

    Raises:
        UserError: not a floating-point matrix with three columns, or non-finite.
    """
    check_features("points", points)
    if points.shape[1] != 3:
        raise UserError(f"points: expected three columns, got {list(points.shape)}")
    index = torch.arange(cells, dtype=torch.float64)
    height = 1 - (2 * index + 1) / cells
    angle = index * math.pi * (3 - math.sqrt(5))
    radius = (1 - height.square()).sqrt()
    lattice = torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=1)
    nearest = (points.detach().cpu().double() @ lattice.T).argmax(dim=1)
    return len(nearest.unique()) / cells
