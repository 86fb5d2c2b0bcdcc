"""Alignment of Wang & Isola 2020: how near the representations of two views of one image lie."""

from torch import Tensor
from torch.nn import functional as F


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean over images of |z - z'|^2, z and z' the l2-normalised representations of two views of an image.

    Wang & Isola 2020, section 4.1.1, with alpha = 2. The value is between 0 (both
    views have the same representation) and 4. A collapsed representation is perfectly aligned, so read it beside
    `uniformity`. A zero vector stays zero.

    Args:
        first: floating point [n, d], finite; one view of each image.
        second: floating point [n, d], finite; another view of the same images in the same order.
    """
    difference = F.normalize(first.detach().double(), dim=1) - F.normalize(second.detach().double(), dim=1)
    return float(difference.square().sum(dim=1).mean())
