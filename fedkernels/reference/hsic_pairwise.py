"""The unbiased HSIC of all pairs of representations in plain PyTorch (Song et al. 2007, Eq. 5)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference.debiased_cka import rounding_of_products, zero_up_to
from fedkernels.reference.linear_cka import center

ENTRIES_AT_A_TIME = 2**13  # of each Gram matrix that are widened to float64, so that they stay in the cache


def hsic_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of N and M representations [n, d] -> n (n - 3) times the HSIC of pairs [N, M], of each x [N] and y [M].

    Eq. 5 is ``<K, L> + sum K sum L / ((n - 1) (n - 2)) - 2 / (n - 2) <K 1, L 1>``. Its sums are float64, as they cancel
    out where the representations are wide and the samples few.
    """
    dtype = compute_dtype(*xs, *ys)
    with no_autocast(xs[0]):
        return _hsic(*(_grams([center(z.to(dtype)) for z in zs]) for zs in (xs, ys)))


def _grams(centered: list[Tensor]) -> Tensor:
    """N matrices [n, d] -> their Gram matrices [N, n, n] with diagonals of 0."""
    rows = len(centered[0])
    grams = centered[0].new_empty(len(centered), rows, rows)
    for z, gram in zip(centered, grams, strict=True):
        torch.mm(z, z.mT, out=gram)
    grams.diagonal(dim1=1, dim2=2).zero_()
    return grams


def _hsic(of_x: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gram matrices [N, n, n] and [M, n, n] -> float64 [N, M], [N] and [M]."""
    n = of_x.shape[1]
    cross, xx, yy = (
        of_x.new_zeros(size, dtype=torch.float64) for size in ((len(of_x), len(of_y)), len(of_x), len(of_y))
    )
    x_sums, y_sums = [], []
    rows = max(1, ENTRIES_AT_A_TIME // n)
    for start in range(0, n, rows):
        x, y = (grams[:, start : start + rows].double() for grams in (of_x, of_y))
        x_sums.append(x.sum(dim=2))
        y_sums.append(y.sum(dim=2))
        x, y = x.flatten(1), y.flatten(1)
        cross.addmm_(x, y.mT)
        xx += torch.linalg.vecdot(x, x)
        yy += torch.linalg.vecdot(y, y)
    k, l = torch.cat(x_sums, dim=1), torch.cat(y_sums, dim=1)

    def corrected(inner: Tensor, totals: Tensor, of_sums: Tensor) -> Tensor:
        return inner + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * of_sums

    def own(squares: Tensor, sums: Tensor) -> Tensor:
        total = sums.sum(dim=1)  # less the sum of all squared norms, as the columns are centred
        rounding = (rounding_of_products(of_x.dtype) * total).square() + rounding_of_products(
            torch.float64, n
        ) * squares
        return zero_up_to(rounding, corrected(squares, total.square(), sums.square().sum(dim=1)))

    totals = torch.outer(k.sum(dim=1), l.sum(dim=1))
    return corrected(cross, totals, k @ l.mT), own(xx, k), own(yy, l)
