"""t-SNE of representations in the plane."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
