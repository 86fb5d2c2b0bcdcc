"""Linear CKA of large matrices on CUDA: torch's BLAS forms the products, csrc/cuda/linear_cka_large_*.cu the rest.

Let z = [x y] be both matrices side by side, scaled and centred, and v the value. The gradient is

    dv/dx = 2 y (y'x) / (|x'x| |y'y|) - 2 v x (x'x) / |x'x|^2

Its two terms are one product of z and z'x = [x'x; y'x] with a factor for each block, and the norms of these blocks give
the value. With fewer rows than columns xx' and yy' take the place of these products. The functions have the schemas of
the operators and run below autograd: fedkernels/linear_cka.py registers them together with the gradients.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedkernels.reference import linear_cka as _reference
from fedkernels.reference._precision import no_autocast

_SEGMENTS = 16  # CKA_SEGMENTS of csrc/cuda/linear_cka_large.h
_MOST_ENTRIES = 1 << 26  # of one product in linear_cka_pairwise

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
    """x [..., L, d], kernel [..., L, L] of the same leading dimensions -> values [...] and the gradient in x."""
    rows, width = x.shape[-2:]
    with no_autocast(x):
        z, scales, hkh = _ops.linear_cka_prepare_to_kernel(x, kernel, centered)
        kernels = _single(hkh if centered else kernel.to(z.dtype).reshape(hkh.shape[0], rows, rows))
        z = _single(z)
        samples = rows < width
        product, own = kernels @ z, z @ z.mT if samples else z.mT @ z
        values = _ops.linear_cka_combine_to_kernel(_batch(product), _batch(own), _batch(z), scales, gradient)
        if gradient:
            add = product.addmm_ if product.dim() == 2 else product.baddbmm_
            add(own, z) if samples else add(z, own)
    return values.reshape(x.shape[:-2]), product.reshape(x.shape) if gradient else values.new_empty(0)


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool) -> Tensor:
    """[L, d_n] and [L, d_m] -> [N, M]; without ys the xs are compared with one another.

    All y'x for one x are one product, or a few if that would be too large. If a matrix has more columns than rows the
    reference computes all pairs, because it chooses the smaller products for each pair.
    """
    rows = len(xs[0])
    if any(one.shape[1] > rows for one in (*xs, *ys)):
        return _reference.linear_cka_pairwise(xs, ys or xs, centered)
    with no_autocast(xs[0]):
        z = _ops.linear_cka_prepare([*xs, *ys], centered)[0][0]
        parts = z.split([one.shape[1] for one in (*xs, *ys)], dim=1)
        of_xs, of_ys = parts[: len(xs)], parts[len(xs) :]
        if ys:
            cross = torch.stack([_squares(of_ys, x) for x in of_xs])
            x_norms, y_norms = (torch.cat([_squares([one], one) for one in some]) for some in (of_xs, of_ys))
        else:
            cross = _cross_of_one_list(of_xs)
            x_norms = y_norms = cross.diagonal()
        return _reference.ratio(cross, x_norms[:, None], y_norms).to(z.dtype)


def _cross_of_one_list(xs: Sequence[Tensor]) -> Tensor:
    """|x_m'x_n|^2 of all pairs [N, N]; each is computed once."""
    upper = xs[0].new_zeros((len(xs), len(xs)), dtype=torch.float64)
    for n, x in enumerate(xs):
        upper[n, n:] = _squares(xs[n:], x)
    return upper + upper.triu(1).T


def _squares(matrices: Sequence[Tensor], x: Tensor) -> Tensor:
    """|m'x|_F^2 for each matrix m -> float64 [len(matrices)]. The matrices are neighbouring columns of z."""
    squares = []
    for some in _groups(matrices, x.shape[1]):
        widths = [one.shape[1] for one in some]
        start = some[0]
        side_by_side = start.as_strided((len(start), sum(widths)), start.stride())
        squares.append(_ops.linear_cka_squares(side_by_side.mT @ x, [width * x.shape[1] for width in widths]))
    return torch.cat(squares)


def _groups(matrices: Sequence[Tensor], columns: int) -> Iterator[list[Tensor]]:
    """Groups of matrices for one product each: as many as one call takes and as keep the product small enough."""
    group: list[Tensor] = []
    entries = 0
    for one in matrices:
        size = one.shape[1] * columns
        if group and (len(group) == _SEGMENTS or entries + size > _MOST_ENTRIES):
            yield group
            group, entries = [], 0
        group.append(one)
        entries += size
    yield group


def _single(matrices: Tensor) -> Tensor:
    """[1, R, C] -> [R, C]: one product then goes to torch.mm, which parallelises a long sum, and not to torch.bmm."""
    return matrices[0] if len(matrices) == 1 else matrices


def _batch(matrices: Tensor) -> Tensor:
    return matrices[None] if matrices.dim() == 2 else matrices
