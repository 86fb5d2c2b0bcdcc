"""Mini-batches in a seeded random order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def epoch_batches(samples: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Row numbers of one epoch's full batches, int64 [batch_size] each; the rest of the order is left out.

    A smaller last batch would give BatchNorm and contrastive losses other statistics, one of a single image none.
    """
    order = torch.randperm(samples, generator=generator)
    return list(order[: samples // batch_size * batch_size].split(batch_size))


def endless_batches(samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of full batches without end, a new order for each pass; all rows where there are fewer."""
    size = min(batch_size, samples)
    while True:
        yield from epoch_batches(samples, size, generator)
