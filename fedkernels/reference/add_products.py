"""The sums over a block of samples of which CKA of all samples is made, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

STRIP = 128  # rows of a symmetric product that are formed together, from their diagonal on


def add_products(
    block: Tensor, widths: Sequence[int], first: int, cross: Tensor, own: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """[X | Y] with X and Y of some representations each: X'Y is added to `cross`, and z'z of each z to `own`.

    Of z'z the entries on and above the diagonal are valid. -> The squared norms of the rows [N + M, L], and the sums of
    rows weighted by each of these and by 1 [N + M + 1, D], float64.
    """
    parts = block.split(list(widths), dim=1)
    columns = sum(widths[:first])
    cross += block[:, :columns].mT @ block[:, columns:]
    for sums, z in zip(own, parts, strict=True):
        for start in range(0, len(sums), STRIP):
            sums[start : start + STRIP, start:] += z[:, start : start + STRIP].mT @ z[:, start:]
    norms = torch.stack([z.square().sum(dim=1) for z in parts]).double()
    # Norms are divided by the largest, since the cubes of entries may be out of float32's range where their squares are
    # in it.
    weights = torch.cat([norms, norms.new_ones(1, len(block))])
    largest = weights.amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, 1, largest)
    return norms, ((weights / largest).to(block.dtype) @ block).double() * largest
