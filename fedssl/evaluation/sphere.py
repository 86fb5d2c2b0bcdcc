"""Representations as points on the unit sphere in three dimensions, and how much of it they cover."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def sphere_points(features: Tensor) -> Tensor:
    """The l2-normalised representations, projected onto their three main directions and normalised again.

    This is for FedU2's Figure 4, whose text does not say how 512 dimensions become three. Here they are the first right
    singular vectors of the normalised representations, without centring, as the sphere has its centre at 0. A
    representation that collapses to a point stays a point, and one that varies along one direction becomes an arc. The
    sign of each direction is that of the mean, so the first axis points at the middle of the cloud.

    Args:
        features: floating point [n, d], finite.

    Returns:
        float64 [n, 3] of norm 1. Where d < 3 the last coordinates are 0. A row orthogonal to the three directions is 0.
    """
    rows = F.normalize(features.detach().double(), dim=1)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:3]
    points = rows @ directions.T
    points = points * torch.where(points.mean(dim=0) < 0, -1.0, 1.0)
    return F.normalize(F.pad(points, (0, 3 - points.shape[1])), dim=1)


def sphere_coverage(points: Tensor, cells: int = 200) -> float:
    """Share of the sphere's cells that hold a point, 0 to 1; a low share means that much of the sphere is blank.

    Each cell has the positions nearest to one point of a Fibonacci lattice; the cells' areas are equal to a few
    percent. n points drawn uniformly reach about 1 - (1 - 1/cells)^n, so compare only figures with the same n.

    Args:
        points: floating point [n, 3], of norm 1.
        cells: number of cells.
    """
    index = torch.arange(cells, dtype=torch.float64)
    height = 1 - (2 * index + 1) / cells
    angle = index * math.pi * (3 - math.sqrt(5))
    radius = (1 - height.square()).sqrt()
    lattice = torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=1)
    nearest = (points.detach().cpu().double() @ lattice.T).argmax(dim=1)
    return len(nearest.unique()) / cells
