"""Equal-size clustering of unit vectors, on a client and on the server: what Orchestra is made of.

Source: Lubana et al. 2022, Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, section 4,
with the constants of the authors' released code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def equal_assignment(scores: Tensor, iterations: int, sharpness: float = 25.0) -> Tensor:
    """Sinkhorn-Knopp: soft assignments [n, c] whose rows sum to 1 and whose columns each sum to about n / c.

    softmax(sharpness * scores), scores [n, c], with columns and rows scaled in turn, until no row sum was off by more
    than 1 % or for `iterations`.
    """
    n, c = scores.shape
    plan = F.softmax(scores * sharpness, dim=1)
    for _ in range(iterations):
        plan = plan * (n / c / plan.sum(dim=0).clamp_min(1e-30))
        rows = plan.sum(dim=1, keepdim=True)
        plan = plan / rows.clamp_min(1e-30)
        if (rows - 1).abs().max() < 1e-2:
            break
    return plan


@torch.no_grad()
def cluster_locally(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centroids [clusters, d], unit rows, of points [n, d] with unit rows: five rounds of equal-size k-means.

    The first centroids are random points; so is one whose cluster came out empty.
    """
    n = len(points)
    centroids = points[torch.randperm(n, generator=generator)[:clusters]]
    for _ in range(5):
        chosen = equal_assignment(points @ centroids.T, 10).argmax(dim=1)
        spare = points[torch.randint(n, (clusters,), generator=generator)]
        centroids = torch.stack(
            [points[chosen == i].mean(dim=0) if (chosen == i).any() else spare[i] for i in range(clusters)]
        )
        centroids = F.normalize(centroids, dim=1)
    return centroids


def cluster_globally(points: Tensor, centroids: Tensor, temperature: float, steps: int) -> Tensor:
    """New centroids [c, d], unit rows, for the clients' centroids, points [n, d], starting from `centroids` [c, d].

    Each SGD step brings the assignment softmax(points C' / temperature) nearer, in cosine, to the equal-size one of the
    same scores, then normalises the centroids.
    """
    centroids = torch.nn.Parameter(centroids.clone())
    optimizer = torch.optim.SGD([centroids], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        scores = points @ centroids.T
        wanted = equal_assignment(scores.detach(), 100)
        loss = -F.cosine_similarity(wanted, F.softmax(scores / temperature, dim=1), dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            centroids.copy_(F.normalize(centroids, dim=1))
    return centroids.detach()
