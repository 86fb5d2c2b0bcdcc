"""Linear centred kernel alignment (CKA): how similar two representations of the same L samples are, from 0 to 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels import _checks
from fedkernels.reference import linear_cka as _reference


def linear_cka(x: Tensor, y: Tensor, centered: bool = False) -> Tensor:
    """CKA of two representations: ``|y'x|_F^2 / (|x'x|_F |y'y|_F)``.

    Source: ``centered=False`` is Eq. 1 of Hetero-SSFL (Makhija et al. 2022), ``centered=True`` is the linear CKA of
    Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", where each column's mean is
    subtracted first.

    Args:
        x: [..., L, d1], float16, bfloat16, float32 or float64, any strides.
        y: [..., L, d2]; leading dimensions broadcast against x's.
        centered: subtract each column's mean from x and y.

    Returns:
        [...], float64 where an input is float64, else float32. Products have that precision, their norms are summed in
        float64. Gradients come back in each input's dtype. The scale of x and y does not matter, overflow included.
        A matrix that is zero (for ``centered``: whose columns are constant) has CKA 0 and gradient 0. NaN or inf
        in gives NaN out.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: L = 0, d1 = 0, d2 = 0, unequal L, leading dimensions that do not broadcast, unequal devices.
    """
    _check_representation("x", x)
    _check_representation("y", y)
    if y.shape[-2] != x.shape[-2]:
        raise ValueError(f"y must have the L = {x.shape[-2]} rows of x, got {y.shape[-2]}")
    _check_broadcast("y", y, x)
    return _reference.linear_cka(x, y, centered)


def linear_cka_to_kernel(x: Tensor, kernel: Tensor, centered: bool = False) -> Tensor:
    """CKA of a representation with a given kernel: ``tr(x'Kx) / (|x'x|_F |K|_F)``.

    With ``kernel = yy'`` this is ``linear_cka(x, y)``. ``centered=True`` takes ``HKH`` for the kernel and ``Hx`` for x,
    with ``H = I - 11'/L``. Source: Hetero-SSFL (Makhija et al. 2022), Eq. 1 and 2, where K is the clients' mean kernel.

    Args:
        x: [..., L, d], float16, bfloat16, float32 or float64, any strides.
        kernel: [..., L, L], symmetric (not checked); leading dimensions broadcast against x's. Usually a constant; it
            gets a gradient where it asks for one.
        centered: centre x and the kernel.

    Returns:
        [...], float64 where an input is float64, else float32. Precision, gradients, zero matrices and NaN are as in
        ``linear_cka``. It lies between 0 and 1 where the kernel is positive semi-definite.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: L = 0, d = 0, a kernel that is not L by L, leading dimensions that do not broadcast, unequal
            devices.
    """
    _check_representation("x", x)
    _checks.floating("kernel", kernel, at_least=2, layout="[..., L, L]")
    rows = x.shape[-2]
    if kernel.shape[-2:] != (rows, rows):
        raise ValueError(f"kernel must be [..., {rows}, {rows}] for the {rows} rows of x, got {list(kernel.shape)}")
    _check_broadcast("kernel", kernel, x)
    return _reference.linear_cka_to_kernel(x, kernel, centered)


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool = False) -> Tensor:
    """CKA of every representation in ``xs`` with every one in ``ys``, say the layers of two networks.

    Args:
        xs: N >= 1 tensors [L, d_n], float16, bfloat16, float32 or float64, any strides; the d_n may differ.
        ys: M >= 1 tensors [L, d_m] of the same L samples. May be the list ``xs`` itself.
        centered: as in ``linear_cka``.

    Returns:
        [N, M] with entry (n, m) = ``linear_cka(xs[n], ys[m], centered)``: float64 where any input is float64,
        else float32.

    Raises:
        TypeError: an argument is not a list of floating tensors.
        ValueError: an empty list, L = 0, d = 0, unequal L or devices.
    """
    for name, matrices in (("xs", xs), ("ys", ys)):
        if isinstance(matrices, Tensor) or not isinstance(matrices, Sequence):
            raise TypeError(f"{name} must be a list of tensors [L, d], got {type(matrices).__name__}")
        if len(matrices) == 0:
            raise ValueError(f"{name} must hold at least one tensor, got an empty list")
        for index, matrix in enumerate(matrices):
            label = f"{name}[{index}]"
            _checks.floating(label, matrix, ndim=2, layout="[L, d]")
            _checks.not_empty(label, matrix, (0, 1), "L or d")
            if matrix.shape[0] != xs[0].shape[0]:
                raise ValueError(f"{label} must have the L = {xs[0].shape[0]} rows of xs[0], got {matrix.shape[0]}")
            _checks.same_device(**{"xs[0]": xs[0], label: matrix})
    return _reference.linear_cka_pairwise(xs, ys, centered)


def _check_representation(name: str, x: Tensor) -> None:
    _checks.floating(name, x, at_least=2, layout="[..., L, d]")
    _checks.not_empty(name, x, (-2, -1), "L or d")


def _check_broadcast(name: str, other: Tensor, x: Tensor) -> None:
    try:
        torch.broadcast_shapes(x.shape[:-2], other.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{name} must have leading dimensions that broadcast against {list(x.shape[:-2])} of x, "
            f"got {list(other.shape[:-2])}"
        ) from None
    _checks.same_device(**{"x": x, name: other})
