"""The reductions of a loss that has one term per row."""

from torch import Tensor


def reduce(losses: Tensor, reduction: str) -> Tensor:
    """ "mean" and "sum" over the rows; "none" gives the rows."""
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    return losses
