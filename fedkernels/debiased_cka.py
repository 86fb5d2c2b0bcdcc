"""Debiased linear CKA: the similarity of two representations from few samples, without the bias of plain CKA."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import native
from fedkernels.internal.autograd import has_tangent, needs_gradient, refuse_second_derivative
from fedkernels.internal.similarity import (
    FEWEST_DEBIASED_ROWS,
    check_lists,
    check_pair,
    fake_gradients,
    fake_values,
    in_inputs,
    setup_context,
)
from fedkernels.reference import debiased_cka as _reference
from fedkernels.reference._precision import compute_dtype


def debiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """CKA with the unbiased estimate of HSIC: ``H(x, y) / sqrt(H(x, x) H(y, y))``.

    Plain CKA of unrelated representations tends to 1 as their widths grow beyond the number of samples. Debiased CKA of
    them is near 0, of either sign, for any number of samples.

    Source: H is Song et al. 2007, "Supervised Feature Selection via Dependence Estimation", Eq. 5. The ratio is
    debiased CKA as in Nguyen et al. 2021, "Do Wide and Deep Networks Learn the Same Things?", and Murphy et al. 2024,
    "Correcting Biased Centered Kernel Alignment Measures in Biological and Artificial Neural Networks".

    Args:
        x: [..., L, d1], float16, bfloat16, float32 or float64, any strides; L >= 4.
        y: [..., L, d2]; leading dimensions broadcast against x's.

    Returns:
        [...], from -1 to 1 up to rounding; float64 where an input is float64, else float32. H does not depend on the
        means of the columns, so there is no option for centring. Precision, gradients and scales are as in
        ``linear_cka``. H(x, x) is a sum of squares, so it cannot be negative. Where it is zero, up to the rounding of
        the products, the value is 0 and its gradient is 0: constant representations, a single sample that differs from
        the others, representations whose samples are all equally far apart. NaN or inf in gives NaN out.
        On a GPU it runs on its reference in plain PyTorch.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: L < 4, d1 = 0, d2 = 0, unequal L, leading dimensions that do not broadcast, unequal devices.
    """
    check_pair(x, y)
    _check_rows("x", x)
    operator = None if has_tangent(x, y) else native.operator("debiased_cka", x, y)
    if operator is None:
        return _reference.debiased_cka(x, y)
    value: Tensor = operator(x.contiguous(), y.contiguous(), needs_gradient(x), needs_gradient(y))[0]
    return value


def debiased_cka_pairwise(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Debiased CKA of every representation in ``xs`` with every one in ``ys``, say the layers of two networks.

    It is meant for measuring. If an input requires a gradient the reference is used, which keeps all products.

    Args:
        xs: N >= 1 tensors [L, d_n] of L >= 4 samples, float16, bfloat16, float32 or float64, any strides; the d_n may
            differ.
        ys: M >= 1 tensors [L, d_m] of the same L samples. May be the list ``xs`` itself.

    Returns:
        [N, M] with entry (n, m) = ``debiased_cka(xs[n], ys[m])``, float64 where any input is float64, else float32.
        Near the rounding up to which a self-HSIC counts as zero, an entry may depend on the other representations.

    Raises:
        TypeError: an argument is not a list of floating tensors.
        ValueError: an empty list, L < 4, d = 0, unequal L or devices.
    """
    check_lists(xs, ys)
    _check_rows("xs[0]", xs[0])
    everything = [*xs, *ys]
    operator = native.operator("debiased_cka_pairwise", *everything)
    if operator is None or any(needs_gradient(z) for z in everything) or has_tangent(*everything):
        return _reference.debiased_cka_pairwise(xs, ys)
    same = len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))
    values: Tensor = operator([x.contiguous() for x in xs], [] if same else [y.contiguous() for y in ys])
    return values


def _check_rows(name: str, x: Tensor) -> None:
    if x.shape[-2] < FEWEST_DEBIASED_ROWS:
        raise ValueError(f"{name} must have at least {FEWEST_DEBIASED_ROWS} rows for debiased CKA, got {x.shape[-2]}")


if native.module is not None:

    @torch.library.register_fake("fedkernels::debiased_cka")
    def _(x: Tensor, y: Tensor, x_gradient: bool, y_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        values = fake_values(x, y)
        return values, fake_gradients(values, x, x_gradient), fake_gradients(values, y, y_gradient)

    @torch.library.register_fake("fedkernels::debiased_cka_pairwise")
    def _(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        return xs[0].new_empty((len(xs), len(ys) or len(xs)), dtype=compute_dtype(*xs, *ys))

    def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("debiased_cka", *of_gradients)
        return *in_inputs(ctx, grad), None, None

    torch.library.register_autograd("fedkernels::debiased_cka", _backward, setup_context=setup_context)
