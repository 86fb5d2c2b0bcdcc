"""The labels of all ranks' rows, and what they say about this rank's."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedkernels.distributed._gather import gather


class Labels(NamedTuple):
    """Of all ranks, for this rank's queries."""

    of_ranks: list[Tensor]  # int64 [rows of the rank] each
    positives: Tensor  # int64 [B], how many other rows have a query's label
    counted: int  # how many rows of all ranks have a positive


def gather_labels(labels: Tensor, rows: list[int], group: dist.ProcessGroup) -> Labels:
    """All ranks' labels; this rank's are `labels` [B], and `rows` are the numbers of rows of all ranks."""
    of_ranks = [some[:count, 0] for some, count in zip(gather(labels[:, None], rows, group), rows, strict=True)]
    _, classes, counts = torch.cat(of_ranks).unique(return_inverse=True, return_counts=True)
    positives = counts[classes] - 1
    return Labels(of_ranks, positives.split(rows)[group.rank()], int((positives > 0).sum()))
