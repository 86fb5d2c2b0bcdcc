"""Debiased linear CKA in plain PyTorch (Song et al. 2007, Eq. 5; Nguyen et al. 2021, Eq. 3; Murphy et al. 2024).

CKA = H(x, y) / sqrt(H(x, x) H(y, y)) with the unbiased estimate H of HSIC, whose factor 1 / (n (n - 3)) cancels. H is
the inner product of the U-centred Gram matrices (Szekely and Rizzo 2014), so that H(x, x) is a sum of squares. With
centred columns and a_i = |x_i|^2, b_i = |y_i|^2 the same number is

    |y'x|_F^2 - n / (n - 2) sum_i a_i b_i + sum a sum b / ((n - 1) (n - 2))

which needs no n by n matrix. The product is formed in whichever space is smaller.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._sizes import holds
from fedkernels.reference.linear_cka import center, inner, ratio, scale


def rounding_of_products(dtype: torch.dtype, rows: int = 0) -> float:
    """Up to this part of the biased self-HSIC the debiased one counts as zero: sums of `rows` may be off by it.

    It is zero where one sample differs. The others add 1 / rows^2 each, which vanishes in a sum from sqrt(2 / eps) on.
    """
    eps = torch.finfo(dtype).eps
    return (16 + torch.sym_min(rows, int(math.sqrt(2 / eps)))) * eps  # type: ignore[return-value]


def debiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """x [..., n, d1], y [..., n, d2] -> [...]."""
    dtype = compute_dtype(x, y)
    with no_autocast(x):
        x, y = center(scale(x.to(dtype))), center(scale(y.to(dtype)))
        if holds(x.shape[-2] < x.shape[-1] + y.shape[-1]):
            k, l = u_centered_gram(x), u_centered_gram(y)
            return ratio(inner(k, l), _own_of_samples(k, x), _own_of_samples(l, y)).to(dtype)
        return ratio(_of_features(x, y), _own_of_features(x), _own_of_features(y)).to(dtype)


def debiased_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Lists of [n, d_i] -> [N, M]: debiased CKA of xs[n] with ys[m]."""
    dtype = compute_dtype(*xs, *ys)
    values = [debiased_cka(x.to(dtype), y.to(dtype)) for x in xs for y in ys]
    return torch.stack(values).view(len(xs), len(ys))


def u_centered_gram(x: Tensor) -> Tensor:
    """[..., n, d] -> [..., n, n]: xx' with the diagonal 0 and every row and column sum 0."""
    n = x.shape[-2]
    gram = x @ x.mT
    diagonal = torch.eye(n, dtype=torch.bool, device=x.device)
    gram = gram.masked_fill(diagonal, 0)
    sums = gram.sum(dim=-1, keepdim=True, dtype=torch.float64)
    shifts = sums / (n - 2) - sums.sum(dim=-2, keepdim=True) / (2 * (n - 1) * (n - 2))
    return (gram - shifts - shifts.mT).to(x.dtype).masked_fill(diagonal, 0)


def _of_features(x: Tensor, y: Tensor) -> Tensor:
    """n (n - 3) times the unbiased HSIC of centred x and y, from their product in feature space."""
    n = x.shape[-2]
    product = y.mT @ x
    a, b = _squared_row_norms(x), _squared_row_norms(y)
    correction = n / (n - 2) * (a * b).sum(dim=-1) - a.sum(dim=-1) * b.sum(dim=-1) / ((n - 1) * (n - 2))
    return inner(product, product) - correction


def _squared_row_norms(x: Tensor) -> Tensor:
    return x.double().square().sum(dim=-1)


def _own_of_features(x: Tensor) -> Tensor:
    product = (x.mT @ x).detach()
    rounding = rounding_of_products(x.dtype, x.shape[-2]) * inner(product, product)
    return zero_up_to(rounding, _of_features(x, x))


def _own_of_samples(gram: Tensor, x: Tensor) -> Tensor:
    rounding = rounding_of_products(x.dtype) * _squared_row_norms(x.detach()).sum(dim=-1)
    return zero_up_to(rounding.square(), inner(gram, gram))


def zero_up_to(rounding: Tensor, own: Tensor) -> Tensor:
    """A self-HSIC that is not above its rounding becomes 0."""
    return torch.where(own <= rounding, 0, own)
