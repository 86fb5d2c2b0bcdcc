"""Places for thumbnails on a map: near their points in the plane, and never one over another."""

import torch
from torch import Tensor


def grid_cells(points: Tensor, columns: int) -> Tensor:
    """A cell of a square grid for each point, no two in one: the free cell nearest to the point, in the points' order.

    Args:
        points: floating point [n, 2], finite.
        columns: cells along each side; at least n cells in all.

    Returns:
        int64 [n, 2], column and row of each point's cell, from the lower left.
    """
    low, high = points.min(dim=0).values, points.max(dim=0).values
    placed = (points - low) / (high - low).clamp(min=1e-9) * (columns - 1)
    across, up = torch.meshgrid(torch.arange(columns), torch.arange(columns), indexing="xy")
    cells = torch.stack([across.flatten(), up.flatten()], dim=1)
    free = torch.ones(len(cells), dtype=torch.bool)
    taken = []
    for point in placed:
        distance = (cells - point).square().sum(dim=1)
        distance[~free] = torch.inf
        cell = int(distance.argmin())
        free[cell] = False
        taken.append(cells[cell])
    return torch.stack(taken)
