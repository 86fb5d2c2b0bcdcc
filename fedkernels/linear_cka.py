"""Linear centred kernel alignment (CKA): how similar two representations of the same L samples are, from 0 to 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkernels import _checks, _native
from fedkernels._autograd import has_tangent, keep_missing, needs_gradient, refuse_second_derivative
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
    operator = None if has_tangent(x, y) else _native.operator("linear_cka", x, y)
    if operator is None:
        return _reference.linear_cka(x, y, centered)
    # Products over samples or over features, whichever are smaller; kept for the gradients.
    sample_space = x.shape[-2] < x.shape[-1] + y.shape[-1]
    keep = needs_gradient(x) or needs_gradient(y)
    value: Tensor = operator(x.contiguous(), y.contiguous(), centered, sample_space, keep)[0]
    return value


def linear_cka_to_kernel(x: Tensor, kernel: Tensor, centered: bool = False) -> Tensor:
    """CKA of a representation with a given kernel: ``tr(x'Kx) / (|x'x|_F |K|_F)``.

    With ``kernel = yy'`` this is ``linear_cka(x, y)``. ``centered=True`` takes ``HKH`` for the kernel and ``Hx`` for x,
    with ``H = I - 11'/L``. Source: Hetero-SSFL (Makhija et al. 2022), Eq. 1 and 2, where K is the clients' mean kernel.

    Where the kernel is known as ``FF'`` with F [..., L, r], ``linear_cka(x, F)`` is the same number without an L by L
    matrix, and cheaper where ``(d + r)^2`` is below ``L (L + d)``.

    Args:
        x: [..., L, d], float16, bfloat16, float32 or float64, any strides.
        kernel: [..., L, L], symmetric (not checked: the gradient in x is that of a symmetric kernel); leading
            dimensions broadcast against x's. Usually a constant; it gets a gradient where it asks for one, from the
            reference.
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
    operator = None if has_tangent(x, kernel) else _native.operator("linear_cka_to_kernel", x, kernel)
    if operator is None or needs_gradient(kernel):
        return _reference.linear_cka_to_kernel(x, kernel, centered)
    keep = needs_gradient(x)
    # xx' costs half of what Kx does and gives the value too; but with it the gradient costs an L x L product of its own.
    sample_space = not keep or rows < 3 * x.shape[-1]
    value: Tensor = operator(x.contiguous(), kernel.contiguous(), centered, sample_space, keep)[0]
    return value


def linear_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool = False) -> Tensor:
    """CKA of every representation in ``xs`` with every one in ``ys``, say the layers of two networks.

    Meant for measuring: where an input asks for a gradient the reference serves, which keeps all products.

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
    everything = [*xs, *ys]
    operator = _native.operator("linear_cka_pairwise", *everything)
    if operator is None or any(needs_gradient(z) for z in everything) or has_tangent(*everything):
        return _reference.linear_cka_pairwise(xs, ys, centered)
    same = len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))
    values: Tensor = operator([x.contiguous() for x in xs], [] if same else [y.contiguous() for y in ys], centered)
    return values


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


if _native.module is not None:
    # What an operator returns beside the value is for its gradients: norms, scales and centers ("state"), and products.
    _NUMBERS = 5  # of the state, without the centers

    @torch.library.register_fake("fedkernels::linear_cka")
    def _(
        x: Tensor, y: Tensor, centered: bool, sample_space: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype, batch = compute_dtype(x, y), torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        rows, d1, d2 = x.shape[-2], x.shape[-1], y.shape[-1]
        side1, side2 = (rows, rows) if sample_space else (d1, d2)
        return (
            x.new_empty(batch, dtype=dtype),
            x.new_empty((*batch, _NUMBERS + (d1 + d2 if centered else 0)), dtype=torch.float64),
            x.new_empty((*batch, d2, d1) if keep and not sample_space else 0, dtype=dtype),
            x.new_empty((*batch, side1, side1) if keep else 0, dtype=dtype),
            x.new_empty((*batch, side2, side2) if keep else 0, dtype=dtype),
        )

    @torch.library.register_fake("fedkernels::linear_cka_gradients")
    def _(
        grad: Tensor,
        x: Tensor,
        y: Tensor,
        state: Tensor,
        cross: Tensor,
        xx: Tensor,
        yy: Tensor,
        centered: bool,
        sample_space: bool,
        x_gradient: bool,
        y_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        return (
            xx.new_empty((*grad.shape, *x.shape[-2:]) if x_gradient else 0),
            yy.new_empty((*grad.shape, *y.shape[-2:]) if y_gradient else 0),
        )

    @torch.library.register_fake("fedkernels::linear_cka_to_kernel")
    def _(
        x: Tensor, kernel: Tensor, centered: bool, sample_space: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, batch = compute_dtype(x, kernel), torch.broadcast_shapes(x.shape[:-2], kernel.shape[:-2])
        rows, width = x.shape[-2:]
        side = rows if sample_space else width
        return (
            x.new_empty(batch, dtype=dtype),
            x.new_empty((*batch, _NUMBERS + (width + 2 * rows if centered else 0)), dtype=torch.float64),
            x.new_empty((*batch, rows, width) if keep and not sample_space else 0, dtype=dtype),
            x.new_empty((*batch, side, side) if keep else 0, dtype=dtype),
        )

    @torch.library.register_fake("fedkernels::linear_cka_to_kernel_gradient")
    def _(
        grad: Tensor,
        x: Tensor,
        kernel: Tensor,
        state: Tensor,
        product: Tensor,
        xx: Tensor,
        centered: bool,
        sample_space: bool,
    ) -> Tensor:
        return xx.new_empty((*grad.shape, *x.shape[-2:]))

    @torch.library.register_fake("fedkernels::linear_cka_pairwise")
    def _(xs: Sequence[Tensor], ys: Sequence[Tensor], centered: bool) -> Tensor:
        return xs[0].new_empty((len(xs), len(ys) or len(xs)), dtype=compute_dtype(*xs, *ys))

    def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep_missing(ctx)
        first, second, ctx.centered, ctx.sample_space, keep = inputs
        if keep:
            ctx.save_for_backward(first, second, *output[1:])

    def _of_input(gradient: Tensor, given: Tensor) -> Tensor:
        """The gradient in an input that may have been broadcast, in its dtype."""
        return gradient.sum_to_size(given.shape).to(given.dtype)

    def _backward(ctx: Any, grad: Tensor | None, *of_products: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cka", *of_products)
        if grad is None:
            return (None,) * 5
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[:2]
        gradients = torch.ops.fedkernels.linear_cka_gradients(
            grad.double().contiguous(), *inputs, ctx.centered, ctx.sample_space, *wanted
        )
        of_x, of_y = (
            _of_input(gradient, given) if need else None
            for gradient, given, need in zip(gradients, inputs[:2], wanted, strict=True)
        )
        return of_x, of_y, None, None, None

    def _backward_to_kernel(ctx: Any, grad: Tensor | None, *of_products: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cka_to_kernel", *of_products)
        if grad is None or not ctx.needs_input_grad[0]:
            return (None,) * 5
        inputs = ctx.saved_tensors
        gradient = torch.ops.fedkernels.linear_cka_to_kernel_gradient(
            grad.double().contiguous(), *inputs, ctx.centered, ctx.sample_space
        )
        return _of_input(gradient, inputs[0]), None, None, None, None

    def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        refuse_second_derivative("linear_cka", *grads)
        return (None,) * 11

    def _refuse_to_kernel(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        refuse_second_derivative("linear_cka_to_kernel", *grads)
        return (None,) * 8

    torch.library.register_autograd("fedkernels::linear_cka", _backward, setup_context=_keep)
    torch.library.register_autograd("fedkernels::linear_cka_gradients", _refuse)
    torch.library.register_autograd("fedkernels::linear_cka_to_kernel", _backward_to_kernel, setup_context=_keep)
    torch.library.register_autograd("fedkernels::linear_cka_to_kernel_gradient", _refuse_to_kernel)
