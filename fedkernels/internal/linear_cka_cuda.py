"""Linear CKA on CUDA: torch's BLAS forms the products, csrc/cuda/linear_cka_*.cu what stands around those of a pair.

Let z = [x y] be both matrices side by side, scaled and centred, and v the value. The gradient is

    dv/dx = 2 y (y'x) / (|x'x| |y'y|) - 2 v x (x'x) / |x'x|^2

Its two terms are one product of z and z'x = [x'x; y'x] with a factor for each block, and the norms of these blocks give
the value. With fewer rows than columns xx' and yy' take the place of these products. The functions have the schemas of
the operators and run below autograd: fedkernels/linear_cka.py registers them together with the gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference import linear_cka as _reference
from fedkernels.reference._precision import compute_dtype, no_autocast

_MATRICES = 16  # CKA_MATRICES of csrc/cuda/linear_cka.h
_MOST_ENTRIES = 1 << 24  # of one product in linear_cka_pairwise

_ops = torch.ops.fedkernels


def linear_cka(
    x: Tensor, y: Tensor, centered: bool, x_gradient: bool, y_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., L, d1], y [..., L, d2] of the same leading dimensions -> values [...] and the gradients, if wanted."""
    rows, x_width = x.shape[-2:]
    with no_autocast(x):
        z, scales = _ops.linear_cka_prepare([x, y], centered)
        samples = rows < z.shape[-1]
        z = _single(z)
        zx, zy = z[..., :x_width], z[..., x_width:]
        own, other = (zx @ zx.mT, zy @ zy.mT) if samples else (z.mT @ zx, zy.mT @ zy)
        values, of_x, of_y = _ops.linear_cka_combine(
            _batch(own), _batch(other), scales, samples, x_gradient, y_gradient
        )
        if x_gradient:
            of_x = (_single(of_x) @ zx if samples else z @ _single(of_x)).reshape(x.shape)
        if y_gradient:
            of_y = (_single(of_y) @ zy if samples else z @ _single(of_y)).reshape(y.shape)
    return values.reshape(x.shape[:-2]), of_x, of_y


def linear_cka_to_kernel(x: Tensor, kernel: Tensor, centered: bool, gradient: bool) -> tuple[Tensor, Tensor]:
    """x [..., L, d], kernel [..., L, L] of the same leading dimensions -> values [...] and the gradient in x.

    K x serves the value and the gradient, 2 K x / (|x'x| |K|) - 2 v x (x'x) / |x'x|^2.
    """
    rows, width = x.shape[-2:]
    dtype = compute_dtype(x, kernel)
    with no_autocast(x):
        z, scales = _ops.linear_cka_prepare([x.to(dtype)], centered)
        kernels = _reference.scale(kernel.to(dtype).reshape(len(z), rows, rows))
        if centered:
            kernels = _reference.center(_reference.center(kernels).mT).mT
        z, samples = _single(z), rows < width
        product, own = _batch(_single(kernels) @ z), _batch(z @ z.mT if samples else z.mT @ z)
        cross, xx, kk = _reference.inner(_batch(z), product), _squared_norm(own), _squared_norm(kernels)
        values = _reference.ratio(cross, xx, kk)
        result = values.to(dtype).reshape(x.shape[:-2])
        if not gradient:
            return result, result.new_empty(0)
        # 0 where a matrix is zero. The scale comes last: its product with a factor may leave the range.
        of_product, of_own = (
            torch.where((xx == 0) | (kk == 0), 0, factor).to(dtype)[:, None, None]
            for factor in (2 / (xx.sqrt() * kk.sqrt()), -2 * values / xx)
        )
        own = _single(own * of_own)
        of_x = (product * of_product + (own @ z if samples else z @ own)) * scales.to(dtype)[..., None]
        return result, of_x.reshape(x.shape)


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool) -> Tensor:
    """[L, d_n] and [L, d_m] -> [N, M]; without ys the xs are compared with one another.

    All y'x for one x are one product, or a few if that would be too large. If a matrix has more columns than rows the
    reference computes all pairs, because it chooses the smaller products for each pair.
    """
    matrices, count = [*xs, *ys], len(xs)
    if any(one.shape[1] > len(xs[0]) for one in matrices):
        return _reference.linear_cka_pairwise(xs, ys or xs, centered)
    widths = [one.shape[1] for one in matrices]
    dtype = compute_dtype(*matrices)
    with no_autocast(xs[0]):
        groups = [
            _ops.linear_cka_prepare([one.to(dtype) for one in matrices[start : start + _MATRICES]], centered)[0][0]
            for start in range(0, len(matrices), _MATRICES)
        ]
        z = torch.cat(groups, dim=1) if len(groups) > 1 else groups[0]
        parts = z.split(widths, dim=1)
        # Of all columns; those before the ys, or before x itself, are not needed and stay 0.
        of_columns = z.new_zeros((count, z.shape[1]), dtype=torch.float64)
        for n, x in enumerate(parts[:count]):
            start = sum(widths[: count if ys else n])
            step = max(_MOST_ENTRIES // widths[n], 1)
            for first in range(start, z.shape[1], step):
                product = z[:, first : first + step].mT @ x
                of_columns[n, first : first + step] = product.double().square().sum(1)
        cross = torch.stack([some.sum(1) for some in of_columns.split(widths, dim=1)], dim=1)
        if ys:
            norms = torch.stack([_squared_norm(one.mT @ one) for one in parts])
            cross, x_norms, y_norms = cross[:, count:], norms[:count], norms[count:]
        else:
            cross = cross + cross.triu(1).T
            x_norms = y_norms = cross.diagonal()
        return _reference.ratio(cross, x_norms[:, None], y_norms).to(dtype)


def _squared_norm(matrices: Tensor) -> Tensor:
    return matrices.double().square().sum((-2, -1))


def _single(matrices: Tensor) -> Tensor:
    """[1, R, C] -> [R, C]: one product then goes to torch.mm, which parallelises a long sum, and not to torch.bmm."""
    return matrices[0] if len(matrices) == 1 else matrices


def _batch(matrices: Tensor) -> Tensor:
    return matrices[None] if matrices.dim() == 2 else matrices
