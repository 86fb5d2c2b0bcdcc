"""Alignment of Wang & Isola 2020: how near the representations of two views of one image lie."""

from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from .features import check_features


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean over images of |z - z'|^2, z and z' the l2-normalised representations of two views of an image.

    Wang & Isola 2020, section 4.1.1, with alpha = 2. Between 0, views that are represented alike, and 4. A collapsed
    representation is perfectly aligned: read it beside `uniformity`. A zero vector stays zero.

    Args:
        first: floating point [n, d], finite; one view of each image.
        second: floating point [n, d], finite; another view of the same images in the same order.

    Raises:
        UserError: shapes that do not fit, non-finite features.
    """
    check_features("first", first)
    check_features("second", second)
    if first.shape != second.shape:
        raise UserError(f"second: expected the shape of first, {list(first.shape)}, got {list(second.shape)}")
    difference = F.normalize(first.detach().double(), dim=1) - F.normalize(second.detach().double(), dim=1)
    return float(difference.square().sum(dim=1).mean())
