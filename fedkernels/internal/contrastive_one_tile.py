"""A contrastive loss whose pairs all lie in one tile, on CUDA: few launches and little Python, for the host is slower.

torch forms the products, csrc/cuda/contrastive_tiles.cu the rest. The forward pass leaves the pairs' weights, of which
two products make gradients in the backward pass. It is an autograd function of its own, for the operators that
torch.library registers take longer to call than all of this.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkernels.internal import contrastive_cuda
from fedkernels.internal.autograd import is_batched, is_without_data, refuse_second_derivative
from fedkernels.reference._precision import no_autocast

_ops = torch.ops.fedkernels


class Loss(NamedTuple):
    """What tells the losses apart: the mean, or a sum, of terms of rows (and columns) without the positives' logits."""

    name: str
    of_rows: float = 1.0
    of_columns: float = 0.0
    symmetric: bool = False  # of rows against themselves; a row is no pair with itself
    shift: int = 0  # the positive of row i is key i + shift, or none if it is negative
    divides: bool = False  # a scale that is a tensor is a temperature
    divisor: float = 1.0  # of the sum; 0: how many rows have a positive


NOTHING = (None, None, None)  # is left out
MOST_WITH_CLASSES = 6 << 20  # pairs: each entry of a gradient looks through all rows for those of its class


def serves(query: Tensor, key: Tensor, reduction: str, pairs: int) -> bool:
    """Is this for a loss of so many pairs of these rows, which has a compiled operator?"""
    if not query.is_cuda or reduction == "none" or query.dtype != key.dtype:
        return False
    one_tile = pairs * max(query.dtype.itemsize, 4) <= contrastive_cuda.TILE_BYTES
    return one_tile and not torch.compiler.is_compiling() and not is_without_data(query)


def value(
    loss: Loss,
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float | None,
    bias: Tensor | float | None = None,
    left_out: Sequence[Tensor | None] = NOTHING,
    classes: Tensor | None = None,
) -> Tensor:
    """The loss [], differentiable in query, key and what of scale and bias is a tensor.

    Args:
        loss: which one.
        query: [B, d].
        key: [N, d] of the same dtype; None for a symmetric loss.
        scale: of the logits, or their temperature.
        bias: that of a sigmoid loss.
        left_out: labels of queries and keys, and pairs [B, N], as `info_nce` takes them.
        classes: [B], of a symmetric loss: all rows of a row's class are its positives.
    """
    number = 1.0  # what the logits are multiplied with beside a scale that is a tensor
    if scale is not None and not isinstance(scale, Tensor):
        number, scale = 1 / scale if loss.divides else scale, None
    if bias is not None and not isinstance(bias, Tensor):
        bias = query.new_full((), bias, dtype=torch.float64)
    # Here, not in `forward`: of what is saved, a copy made there would lead to no input, nor a second derivative to it.
    query, key = query.contiguous(), None if key is None else key.contiguous()
    given = loss, number, left_out, classes, torch.is_grad_enabled()
    if not torch.is_autocast_enabled("cuda"):  # to look takes the host less long than to enter a region without
        result: Tensor = _OneTile.apply(query, key, scale, bias, given)
        return result
    with no_autocast(query):
        result = _OneTile.apply(query, key, scale, bias, given)
        return result


class _OneTile(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        key: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        given: tuple[Loss, float, Sequence[Tensor | None], Tensor | None, bool],
    ) -> Tensor:
        loss, number, left_out, classes, with_graph = given
        keys = rows if key is None else key
        factor = contrastive_cuda.WEIGHT_SCALE if rows.dtype.itemsize == 2 else 1.0
        shift = loss.shift if classes is None else -1
        kind = shift, loss.symmetric, loss.divides and scale is not None
        if left_out is not NOTHING:
            left_out = [None if one is None else one.contiguous() for one in left_out]
        if classes is not None:
            classes = classes.contiguous()
        wants = ctx.needs_input_grad if with_graph else (False,) * 4  # of a leaf it is True without a graph too
        result, memory, weights = _ops.contrastive_one_tile(
            *(rows, keys, *kind, loss.of_rows, loss.of_columns, loss.divisor, factor, number),
            *(*left_out, scale, classes, bias, contrastive_cuda.returns_wide(rows), True in wants, wants[2]),
        )
        ctx.name, ctx.formed = loss.name, (weights, kind, factor, number, classes, memory)
        ctx.save_for_backward(rows, keys, scale, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            found = _Gradients.apply(ctx, grad, *ctx.saved_tensors)
        elif not torch.is_autocast_enabled("cuda"):
            found = _gradients(ctx, grad)
        else:
            with no_autocast(grad):
                found = _gradients(ctx, grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.formed = None  # the loss holds it; of a second pass the saved tensors are torch's error
        return (*found, None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rows, keys, scale, bias), (weights, kind, factor, number, classes, memory) = ctx.saved_tensors, ctx.formed
    if is_batched(grad):  # the kernel takes one
        found = _gradients(ctx, memory.new_ones(()))
        return tuple(
            None if one is None else (one * grad.view(*grad.shape, *(1,) * one.ndim)).to(one.dtype) for one in found
        )
    of_query, of_key, of_scale, of_bias = ctx.needs_input_grad[:4]
    to_scale, to_bias = torch.empty_like(scale) if of_scale else None, torch.empty_like(bias) if of_bias else None
    wide = contrastive_cuda.returns_wide(weights)
    to_query, to_key = _ops.contrastive_finish(
        *(weights, *kind, factor, number, scale, classes, rows, keys, wide),
        *(of_query, of_key, grad.contiguous(), memory, to_scale, to_bias),
    )
    return to_query if of_query else None, to_key if of_key else None, to_scale, to_bias


class _Gradients(torch.autograd.Function):
    """The gradients where a second derivative may be asked for, which there is not."""

    @staticmethod
    def forward(ctx: Any, first: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        ctx.name = first.name
        with no_autocast(grad):
            return _gradients(first, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative(ctx.name, *grads)
