"""Measures of representations for the pictures of a report: neighbours, maps and t-SNE."""

import torch
from torch import Tensor
from torch.nn import functional as F


def grid_cells(points: Tensor, columns: int) -> Tensor:
    """Choose a cell of a square grid for each point [n, 2], no cell twice, so that the squared distances sum to least.

    Return the cells' columns and rows, int64 [n, 2], from the lower left. The grid has `columns` cells along each side,
    at least n in all.
    """
    from scipy.optimize import linear_sum_assignment  # here, as importing it takes time

    low, high = points.aminmax(dim=0)
    placed = (points - low) / (high - low).clamp(min=1e-9) * (columns - 1)
    cells = torch.cartesian_prod(torch.arange(columns), torch.arange(columns)).flip(1)
    _, chosen = linear_sum_assignment(torch.cdist(placed.double(), cells.double()).square().numpy())
    return cells[torch.from_numpy(chosen)]


def nearest_images(features: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the images nearest to some of them, by the cosine of their representations, without the image itself.

    Of each of `queries`, int64 [q] rows of `features` [n, d], they are the k = min(count, n - 1) nearest ones: int64
    [q, k] rows and float64 [q, k] cosines, the nearest first. A zero vector has similarity 0 to everything.
    """
    rows = F.normalize(features.detach().double(), dim=1)
    similarity = rows[queries] @ rows.T
    similarity[torch.arange(len(queries)), queries] = -torch.inf
    nearest = similarity.topk(min(count, len(rows) - 1), dim=1)
    return nearest.indices, nearest.values


def tsne(features: Tensor, seed: int) -> Tensor:
    """Embed the l2-normalised representations [n, d], n above 3, in the plane: float64 [n, 2].

    van der Maaten & Hinton 2008, by scikit-learn: perplexity 30 (a third of the points if they are few), started from
    the first two principal components. The distances between groups and the groups' sizes mean nothing. The same seed
    gives the same points on one machine.
    """
    from sklearn.manifold import TSNE

    rows = F.normalize(features.detach().cpu().double(), dim=1)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    # a collapsed representation has no principal components to start from, and scikit-learn would divide by 0
    start = "pca" if (rows - rows[0]).abs().max() > 1e-6 and rows.shape[1] > 1 else "random"
    points = TSNE(perplexity=perplexity, init=start, random_state=seed % 2**32).fit_transform(rows.numpy())
    return torch.from_numpy(points).double()
