"""The sums over a block of samples that CKAAccumulator adds up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.internal import native
from fedkernels.reference import add_products as _reference


def add_products(
    block: Tensor, widths: Sequence[int], first: int, cross: Tensor, own: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Adds the products of representations with one another to sums, in place and without gradients.

    The products of a block are summed in its dtype, and added to the sums in float64.

    Args:
        block: [L, D], the representations side by side, float32 or float64, contiguous.
        widths: of the representations, D together. The `first` of them, Dx together, meet the others, Dy together.
        first: how many.
        cross: [Dx, Dy] float64, contiguous. It gets ``x'y``.
        own: of each representation z, [d, d] float64, contiguous. It gets ``z'z`` on and above the diagonal; entries
            below are undefined afterwards.

    Returns:
        The squared norms of the rows [N + M, L], and the sums of rows weighted by each of these and by 1
        [N + M + 1, D], float64.
    """
    operator = native.operator("add_products", block, cross, *own)
    if operator is None:
        return _reference.add_products(block, widths, first, cross, own)
    norms, weighted = operator(block, list(widths), first, cross, list(own))
    return norms, weighted


if native.module is not None:

    @torch.library.register_fake("fedkernels::add_products")
    def _(
        block: Tensor, widths: Sequence[int], first: int, cross: Tensor, own: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        return cross.new_empty(len(widths), len(block)), cross.new_empty(len(widths) + 1, block.shape[1])
