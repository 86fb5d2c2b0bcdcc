"""Mini-batches in a seeded random order."""

from __future__ import annotations

import itertools
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


def round_batches(
    samples: int, batch_size: int, epochs: int, steps: int | None, generator: torch.Generator
) -> Iterator[Tensor]:
    """Row numbers of a round's full batches, int64 [batch_size] each; no batch if there are fewer samples.

    Args:
        samples, batch_size, generator: see `epoch_batches`.
        epochs: passes over the samples; not read where `steps` is given.
        steps: number of batches, whatever the number of samples; a new order begins wherever one is used up.
    """
    if steps is None:
        for _ in range(epochs):
            yield from epoch_batches(samples, batch_size, generator)
    elif samples >= batch_size:
        yield from itertools.islice(endless_batches(samples, batch_size, generator), steps)


def batches_of_epoch(samples: int, batch_size: int) -> int:
    """How many batches one pass over the samples has, in `round_batches` and in `endless_batches`; at least 1."""
    return max(1, samples // batch_size)


def endless_batches(samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of full batches without end, a new order for each pass; all rows where there are fewer."""
    size = min(batch_size, samples)
    while True:
        yield from epoch_batches(samples, size, generator)
