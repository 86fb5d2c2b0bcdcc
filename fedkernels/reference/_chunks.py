"""Models as chunks of neighbouring entries, so that a model of many small tensors takes few calls of torch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedkernels.reference._precision import no_autocast


def chunks(models: Sequence[Sequence[Tensor]], entries: int) -> Iterator[list[list[Tensor]]]:
    """Yields, chunk by chunk, a list of flat pieces for each model: together at most `entries`, on one device.

    The models are lists of tensors of the same shapes. A piece of a contiguous tensor is a view of it. An exported
    program takes each tensor at once, because it may not depend on sizes.
    """
    if torch.compiler.is_exporting():
        yield from ([[tensor.detach().reshape(-1)] for tensor in versions] for versions in zip(*models, strict=True))
        return
    pieces: list[list[Tensor]] = [[] for _ in models]
    filled = 0
    for versions in zip(*models, strict=True):
        flat = [tensor.detach().reshape(-1) for tensor in versions]
        start, end = 0, len(flat[0])
        while start < end:
            if filled == entries or (filled and pieces[0][0].device != flat[0].device):
                yield pieces
                pieces, filled = [[] for _ in models], 0
            count = min(entries - filled, end - start)
            for of_model, tensor in zip(pieces, flat, strict=True):
                of_model.append(tensor.narrow(0, start, count))
            start += count
            filled += count
    if filled:
        yield pieces


def join(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces one after another, in the widest of their dtypes; a single piece as it is."""
    with no_autocast(pieces[0]):  # which joins no other half precision than its own
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
