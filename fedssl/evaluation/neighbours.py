"""The images whose representations lie nearest to those of other images."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
