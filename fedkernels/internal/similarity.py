"""What the similarities of representations share: checks of their arguments, and gradients that an operator returns."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedkernels.internal import checks
from fedkernels.internal.autograd import keep_missing_as_none
from fedkernels.reference._precision import compute_dtype

FEWEST_DEBIASED_ROWS = 4  # the unbiased HSIC divides by n - 3


def check_representation(name: str, x: Tensor) -> None:
    checks.floating(name, x, at_least=2, layout="[..., L, d]")
    checks.not_empty(name, x, (-2, -1), "L or d")


def check_broadcast(name: str, other: Tensor, x: Tensor) -> None:
    try:
        torch.broadcast_shapes(x.shape[:-2], other.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{name} must have leading dimensions that broadcast against {list(x.shape[:-2])} of x, "
            f"got {list(other.shape[:-2])}"
        ) from None
    checks.same_device(**{"x": x, name: other})


def check_pair(x: Tensor, y: Tensor) -> None:
    """Both are floating [..., L, d] of the same L, their leading dimensions broadcast."""
    check_representation("x", x)
    check_representation("y", y)
    check_rows(x, y)
    check_broadcast("y", y, x)


def check_rows(x: Tensor, y: Tensor) -> None:
    if y.shape[-2] != x.shape[-2]:
        raise ValueError(f"y must have the L = {x.shape[-2]} rows of x, got {y.shape[-2]}")


def check_lists(xs: Sequence[Tensor], ys: Sequence[Tensor], names: tuple[str, str] = ("xs", "ys")) -> None:
    """Both are lists of floating [L, d] of the same L, on one device."""
    first = f"{names[0]}[0]"
    for name, matrices in zip(names, (xs, ys), strict=True):
        if isinstance(matrices, Tensor) or not isinstance(matrices, Sequence):
            raise TypeError(f"{name} must be a list of tensors [L, d], got {type(matrices).__name__}")
        if len(matrices) == 0:
            raise ValueError(f"{name} must hold at least one tensor, got an empty list")
        for index, matrix in enumerate(matrices):
            label = f"{name}[{index}]"
            checks.floating(label, matrix, ndim=2, layout="[L, d]")
            checks.not_empty(label, matrix, (0, 1), "L or d")
            if matrix.shape[0] != xs[0].shape[0]:
                raise ValueError(f"{label} must have the L = {xs[0].shape[0]} rows of {first}, got {matrix.shape[0]}")
            checks.same_device(**{first: xs[0], label: matrix})


def check_batch(x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Two tensors [L, d], or two lists of such -> two lists."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        for name, z in (("x", x), ("y", y)):
            checks.floating(name, z, ndim=2, layout="[L, d]")
            checks.not_empty(name, z, (0, 1), "L or d")
        check_rows(x, y)
        checks.same_device(x=x, y=y)
        return [x], [y]
    xs, ys = cast("tuple[Sequence[Tensor], Sequence[Tensor]]", (x, y))  # a tensor beside a list is refused there
    check_lists(xs, ys, ("x", "y"))
    return list(xs), list(ys)


def fake_values(x: Tensor, other: Tensor) -> Tensor:
    """The values of an operator for meta and fake tensors."""
    return x.new_empty(torch.broadcast_shapes(x.shape[:-2], other.shape[:-2]), dtype=compute_dtype(x, other))


def fake_gradients(values: Tensor, given: Tensor, wanted: bool) -> Tensor:
    """The gradients beside them: one for each value, or an empty tensor."""
    return values.new_empty((*values.shape, *given.shape[-2:]) if wanted else 0)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For an operator of two tensors that returns its values and the gradients in both or in the first."""
    keep_missing_as_none(ctx)
    ctx.given = [(tensor.shape, tensor.dtype) for tensor in inputs[:2]]
    ctx.save_for_backward(*output[1:])


def in_inputs(ctx: Any, grad: Tensor | None) -> list[Tensor | None]:
    """The gradients in the inputs, which may have been broadcast, in their dtypes."""
    if grad is None:
        return [None, None]
    return [
        (gradients * grad[..., None, None]).sum_to_size(shape).to(dtype) if need else None
        for gradients, (shape, dtype), need in zip(ctx.saved_tensors, ctx.given, ctx.needs_input_grad, strict=False)
    ]
