"""Mini-batches in a seeded random order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def epoch_batches(samples: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Row numbers of one epoch's full batches, int64 [batch_size] each; no batch if there are fewer samples.

    The rest of the order is left out: a smaller batch would give BatchNorm and contrastive losses other statistics.
    """
    order = torch.randperm(samples, generator=generator)
    batches = samples // batch_size
    return list(order[: batches * batch_size].split(batch_size)) if batches else []


def endless_batches(samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of full batches without end, a new order for each pass; all rows where there are fewer."""
    size = min(batch_size, samples)
    while True:
        yield from epoch_batches(samples, size, generator)
