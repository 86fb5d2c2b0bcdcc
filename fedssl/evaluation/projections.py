"""Places for thumbnails on a map: near their points in the plane, and never one over another."""

import torch
from torch import Tensor
from torch.nn import functional as F


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


def nearest_images(features: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest images to some of them, by the cosine of their representations; an image is not its own neighbour.

    Args:
        features: floating point [n, d], finite; a zero vector has similarity 0 to everything.
        queries: int64 [q], rows of `features`.
        count: the most neighbours of each; there are at most n - 1.

    Returns:
        int64 [q, k] rows of `features` and float64 [q, k] cosines, the nearest first.
    """
    rows = F.normalize(features.detach().double(), dim=1)
    similarity = rows[queries] @ rows.T
    similarity[torch.arange(len(queries)), queries] = -torch.inf
    nearest = similarity.topk(min(count, len(rows) - 1), dim=1)
    return nearest.indices, nearest.values


def spread_queries(features: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Images that are unlike each other: each next one is that whose nearest chosen image is farthest.

    Farthest-point sampling on the l2-normalised representations (Gonzalez 1985) among a random tenth of the images, so
    that not only outliers are chosen; the first is drawn.

    Args:
        features: floating point [n, d], finite, n at least 1.
        count: the most images to choose.
        generator: on the CPU.

    Returns:
        int64 [min(count, n)], rows of `features`, all different.
    """
    candidates = torch.randperm(len(features), generator=generator)[: max(count, len(features) // 10)]
    rows = F.normalize(features[candidates].detach().double(), dim=1)
    chosen = [0]
    distance = torch.full((len(rows),), torch.inf, dtype=torch.float64)
    while len(chosen) < min(count, len(rows)):
        distance = torch.minimum(distance, (rows - rows[chosen[-1]]).square().sum(dim=1))
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
    return candidates[chosen]


def tsne(features: Tensor, seed: int) -> Tensor:
    """The l2-normalised representations, embedded in the plane.

    van der Maaten & Hinton 2008, by scikit-learn: perplexity 30 (a third of the points where they are few), started
    from the first two principal components. Points that are near each other were near before. The distances between
    groups and the groups' sizes mean nothing.

    Args:
        features: floating point [n, d], finite, n above 3.
        seed: the same seed gives the same points on one machine.

    Returns:
        float64 [n, 2].
    """
    from sklearn.manifold import TSNE

    rows = F.normalize(features.detach().cpu().double(), dim=1)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    # a collapsed representation has no principal components to start from, and scikit-learn would divide by 0
    start = "pca" if (rows - rows[0]).abs().max() > 1e-6 and rows.shape[1] > 1 else "random"
    points = TSNE(perplexity=perplexity, init=start, random_state=seed % 2**32).fit_transform(rows.numpy())
    return torch.from_numpy(points).double()


def tsne_together(first: Tensor, second: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Both models' representations, embedded in the plane by one t-SNE, for FedU2's Figure 5.

    Args:
        first: floating point [n, d], finite.
        second: floating point [m, d], finite, of the same space.
        seed: see `tsne`.

    Returns:
        float64 [n, 2] and [m, 2].
    """
    joined = tsne(torch.cat([first, second]), seed)
    return joined[: len(first)], joined[len(first) :]
