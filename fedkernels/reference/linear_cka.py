"""Linear CKA in plain PyTorch (Kornblith et al. 2019, Eq. 3 and 4; Hetero-SSFL, Eq. 1).

CKA = |y'x|_F^2 / (|x'x|_F |y'y|_F). With the Gram matrices K = xx' and L = yy' the same three numbers are
<K, L>, |K|_F and |L|_F, so each product is formed in whichever space is smaller.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._sizes import holds


def linear_cka(x: Tensor, y: Tensor, centered: bool = False) -> Tensor:
    """x [..., L, d1], y [..., L, d2] -> [...]."""
    dtype = compute_dtype(x, y)
    with no_autocast(x):
        x, y = _prepare(x.to(dtype), centered), _prepare(y.to(dtype), centered)
        xx, yy = _self_product(x), _self_product(y)
        return ratio(_cross(x, y, xx, yy), inner(xx, xx), inner(yy, yy)).to(dtype)


def linear_cka_to_kernel(x: Tensor, kernel: Tensor, centered: bool = False) -> Tensor:
    """tr(x'Kx) / (|x'x|_F |K|_F), x [..., L, d], kernel [..., L, L] -> [...]; HKH takes K's place if centred."""
    dtype = compute_dtype(x, kernel)
    with no_autocast(x):
        x = _prepare(x.to(dtype), centered)
        kernel = scale(kernel.to(dtype))
        if centered:
            kernel = center(center(kernel).mT).mT  # HKH, H = I - 11'/L
        xx = _self_product(x)
        return ratio(inner(x, kernel @ x), inner(xx, xx), inner(kernel, kernel)).to(dtype)


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool = False) -> Tensor:
    """Lists of [L, d_i] -> [N, M]: CKA of xs[n] with ys[m]."""
    dtype = compute_dtype(*xs, *ys)
    with no_autocast(xs[0]):
        xs, ys = ([_prepare(z.to(dtype), centered) for z in zs] for zs in (xs, ys))
        xxs, yys = ([_self_product(z) for z in zs] for zs in (xs, ys))
        cross = [_cross(x, y, xx, yy) for x, xx in zip(xs, xxs, strict=True) for y, yy in zip(ys, yys, strict=True)]
        x_norms, y_norms = (torch.stack([inner(zz, zz) for zz in zzs]) for zzs in (xxs, yys))
        return ratio(torch.stack(cross).view(len(xs), len(ys)), x_norms[:, None], y_norms).to(dtype)


def _prepare(x: Tensor, centered: bool) -> Tensor:
    return center(scale(x)) if centered else scale(x)


def scale(x: Tensor) -> Tensor:
    # CKA does not depend on the scale, which is treated as a constant. Without it 1e15 would overflow in float32.
    largest = x.detach().abs().amax(dim=(-2, -1), keepdim=True)
    return x / torch.where(largest == 0, 1, largest)


def center(x: Tensor) -> Tensor:
    # The shift by the first row changes only the rounding: a constant column becomes exactly 0. Noise of 1e-9 in its
    # place would give an arbitrary similarity.
    x = x - x[..., :1, :].detach()
    return x - x.mean(dim=-2, keepdim=True)


def _self_product(x: Tensor) -> Tensor:
    """x'x or xx', whichever is smaller: their Frobenius norms are equal."""
    rows, columns = x.shape[-2:]
    return x @ x.mT if holds(rows <= columns) else x.mT @ x


def _cross(x: Tensor, y: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """|y'x|_F^2 = <xx', yy'>."""
    rows = x.shape[-2]
    if holds(rows <= x.shape[-1]) and holds(rows <= y.shape[-1]):  # xx and yy are Gram matrices
        # Equal to a sum of squares: a negative number is rounding, and the gradient is 0 there.
        return inner(xx, yy).clamp(min=0)
    product = y.mT @ x
    return inner(product, product)


def inner(p: Tensor, q: Tensor) -> Tensor:
    # float64, because a float32 norm over 5000^2 entries is wrong by 1e-3.
    return (p.double() * q.double()).sum(dim=(-2, -1))


def ratio(cross: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """cross / sqrt(xx yy), and 0 with gradient 0 where a matrix is zero. NaN stays NaN."""
    zero, none = (xx == 0) | (yy == 0), 0 * (xx + yy).detach()  # NaN beside a matrix that is not finite
    # Both branches of `where` are differentiated, so the root of 0 must not be computed at all.
    xx, yy = torch.where(zero, 1, xx), torch.where(zero, 1, yy)
    return torch.where(zero, none, cross / (xx.sqrt() * yy.sqrt()))
