"""The unbiased HSIC of all pairs of representations, whose average over batches MinibatchCKA takes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.internal import native
from fedkernels.reference import hsic_pairwise as _reference


def hsic_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``n (n - 3)`` times the unbiased HSIC, without gradients. Its arguments have been checked.

    Source: Song et al. 2007, "Supervised Feature Selection via Dependence Estimation", Eq. 5.

    Args:
        xs: N >= 1 representations [n, d_n] of n >= 4 samples.
        ys: M >= 1 representations of the same samples.

    Returns:
        Of the pairs [N, M], of each x with itself [N] and of each y [M], float64. One with itself that is not above the
        rounding of its products is 0.
    """
    operator = native.operator("hsic_pairwise", *xs, *ys)
    if operator is None:
        return _reference.hsic_pairwise(xs, ys)
    cross, of_xs, of_ys = operator([x.contiguous() for x in xs], [y.contiguous() for y in ys])
    return cross, of_xs, of_ys


if native.module is not None:

    @torch.library.register_fake("fedkernels::hsic_pairwise")
    def _(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        n, m = len(xs), len(ys)
        empty = xs[0].new_empty
        return empty(n, m, dtype=torch.float64), empty(n, dtype=torch.float64), empty(m, dtype=torch.float64)
