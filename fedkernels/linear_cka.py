"""Linear centred kernel alignment (CKA): how similar two representations of the same L samples are, from 0 to 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks, linear_cka_cuda, native
from fedkernels.internal.autograd import has_tangent, needs_gradient, refuse_second_derivative
from fedkernels.internal.similarity import (
    check_broadcast,
    check_lists,
    check_pair,
    check_representation,
    fake_gradients,
    fake_values,
    in_inputs,
    setup_context,
)
from fedkernels.reference import linear_cka as _reference
from fedkernels.reference._precision import compute_dtype


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
        [...], float64 where an input is float64, else float32. Products have that precision, half inputs being widened
        first; their norms are summed in float64. On a GPU the products in float32 are torch's and follow its setting
        for tf32, which is off by default. Gradients come back in each input's dtype. The scale of x and y does not
        matter, overflow included.
        A matrix that is zero (for ``centered``: whose columns are constant) has CKA 0 and gradient 0. NaN or inf
        in gives NaN out.

    Raises:
        TypeError: an input is not a floating tensor, or centered not a bool.
        ValueError: L = 0, d1 = 0, d2 = 0, unequal L, leading dimensions that do not broadcast, unequal devices.
    """
    check_pair(x, y)
    centered = checks.boolean("centered", centered)
    operator = None if has_tangent(x, y) else native.operator("linear_cka", x, y)
    if x.is_cuda and x.shape[:-2] != y.shape[:-2]:
        operator = None  # the reference computes the product of a broadcast matrix with itself only once
    if operator is None:
        return _reference.linear_cka(x, y, centered)
    value: Tensor = operator(x.contiguous(), y.contiguous(), centered, needs_gradient(x), needs_gradient(y))[0]
    return value


def linear_cka_to_kernel(x: Tensor, kernel: Tensor, centered: bool = False) -> Tensor:
    """CKA of a representation with a given kernel: ``tr(x'Kx) / (|x'x|_F |K|_F)``.

    With ``kernel = yy'`` this is ``linear_cka(x, y)``. ``centered=True`` takes ``HKH`` for the kernel and ``Hx`` for x,
    with ``H = I - 11'/L``. Source: Hetero-SSFL (Makhija et al. 2022), Eq. 1 and 2, where K is the clients' mean kernel.

    For a kernel ``FF'`` with a known F [..., L, r], ``linear_cka(x, F)`` is the same number without an L by L
    matrix. It is cheaper if ``(d + r)^2`` is below ``L (L + d)``.

    Args:
        x: [..., L, d], float16, bfloat16, float32 or float64, any strides.
        kernel: [..., L, L], symmetric (not checked: the gradient in x is that of a symmetric kernel); leading
            dimensions broadcast against x's. Usually a constant; if it requires a gradient, the reference computes all.
        centered: centre x and the kernel.

    Returns:
        [...], float64 where an input is float64, else float32. Precision, gradients, zero matrices and NaN are as in
        ``linear_cka``. It lies between 0 and 1 where the kernel is positive semi-definite.

    Raises:
        TypeError: an input is not a floating tensor, or centered not a bool.
        ValueError: L = 0, d = 0, a kernel that is not L by L, leading dimensions that do not broadcast, unequal
            devices.
    """
    check_representation("x", x)
    checks.floating("kernel", kernel, at_least=2, layout="[..., L, L]")
    rows = x.shape[-2]
    if kernel.shape[-2:] != (rows, rows):
        raise ValueError(f"kernel must be [..., {rows}, {rows}] for the {rows} rows of x, got {list(kernel.shape)}")
    check_broadcast("kernel", kernel, x)
    centered = checks.boolean("centered", centered)
    operator = None if has_tangent(x, kernel) else native.operator("linear_cka_to_kernel", x, kernel)
    if x.is_cuda and x.shape[:-2] != kernel.shape[:-2]:
        operator = None
    if operator is None or needs_gradient(kernel):
        return _reference.linear_cka_to_kernel(x, kernel, centered)
    value: Tensor = operator(x.contiguous(), kernel.contiguous(), centered, needs_gradient(x))[0]
    return value


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool = False) -> Tensor:
    """CKA of every representation in ``xs`` with every one in ``ys``, say the layers of two networks.

    It is meant for measuring. If an input requires a gradient the reference is used, which keeps all products.

    Args:
        xs: N >= 1 tensors [L, d_n], float16, bfloat16, float32 or float64, any strides; the d_n may differ.
        ys: M >= 1 tensors [L, d_m] of the same L samples. May be the list ``xs`` itself.
        centered: as in ``linear_cka``.

    Returns:
        [N, M] with entry (n, m) = ``linear_cka(xs[n], ys[m], centered)``, float64 where any input is float64,
        else float32.

    Raises:
        TypeError: an argument is not a list of floating tensors, or centered not a bool.
        ValueError: an empty list, L = 0, d = 0, unequal L or devices.
    """
    check_lists(xs, ys)
    centered = checks.boolean("centered", centered)
    everything = [*xs, *ys]
    operator = native.operator("linear_cka_pairwise", *everything)
    if operator is None or any(needs_gradient(z) for z in everything) or has_tangent(*everything):
        return _reference.linear_cka_pairwise(xs, ys, centered)
    same = len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))
    values: Tensor = operator([x.contiguous() for x in xs], [] if same else [y.contiguous() for y in ys], centered)
    return values


if native.module is not None:
    if "linear_cka" in native.CUDA:
        torch.library.impl("fedkernels::linear_cka", "cuda", linear_cka_cuda.linear_cka)
        torch.library.impl("fedkernels::linear_cka_to_kernel", "cuda", linear_cka_cuda.linear_cka_to_kernel)
        torch.library.impl("fedkernels::linear_cka_pairwise", "cuda", linear_cka_cuda.linear_cka_pairwise)

    @torch.library.register_fake("fedkernels::linear_cka")
    def _(x: Tensor, y: Tensor, centered: bool, x_gradient: bool, y_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        values = fake_values(x, y)
        return values, fake_gradients(values, x, x_gradient), fake_gradients(values, y, y_gradient)

    @torch.library.register_fake("fedkernels::linear_cka_to_kernel")
    def _(x: Tensor, kernel: Tensor, centered: bool, gradient: bool) -> tuple[Tensor, Tensor]:
        values = fake_values(x, kernel)
        return values, fake_gradients(values, x, gradient)

    @torch.library.register_fake("fedkernels::linear_cka_pairwise")
    def _(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool) -> Tensor:
        return xs[0].new_empty((len(xs), len(ys) or len(xs)), dtype=compute_dtype(*xs, *ys))

    def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cka", *of_gradients)
        return *in_inputs(ctx, grad), None, None, None

    def _backward_to_kernel(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cka_to_kernel", *of_gradients)
        return in_inputs(ctx, grad)[0], None, None, None

    torch.library.register_autograd("fedkernels::linear_cka", _backward, setup_context=setup_context)
    torch.library.register_autograd(
        "fedkernels::linear_cka_to_kernel", _backward_to_kernel, setup_context=setup_context
    )
