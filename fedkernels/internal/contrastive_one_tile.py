"""A contrastive loss whose pairs all lie in one tile, on CUDA: few launches and little Python, for the host is slower.

torch forms the products, csrc/cuda/contrastive_tiles.cu the rest. The forward pass leaves the pairs' weights, of which
two products make gradients in the backward pass. It is an autograd function of its own, for the operators that
torch.library registers take longer to call than all of this.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedkernels.internal import contrastive_cuda
from fedkernels.internal.autograd import is_batched, is_without_data, refuse_second_derivative
from fedkernels.reference._precision import compute_dtype

_ops = torch.ops.fedkernels


class Loss(NamedTuple):
    """What tells the losses apart: the mean, or a sum, of terms of rows (and columns) without the positives' logits."""

    name: str
    of_rows: float = 1.0
    of_columns: float = 0.0
    symmetric: bool = False  # of rows against themselves; a row is no pair with itself
    shift: int = 0  # the positive of row i is key i + shift, or none if it is negative
    divides: bool = False  # a scale that is a tensor is a temperature
    number: float = 1.0  # what the logits are multiplied with beside that
    divisor: float = 1.0  # of the sum; 0: how many rows have a positive


def serves(query: Tensor, key: Tensor, reduction: str, pairs: int) -> bool:
    """Is this for a loss of so many pairs of these rows, which has a compiled operator?"""
    if not query.is_cuda or torch.compiler.is_compiling() or is_without_data(query):
        return False
    one_tile = pairs * compute_dtype(query).itemsize <= contrastive_cuda.TILE_BYTES
    return one_tile and reduction != "none" and query.dtype == key.dtype


def value(
    loss: Loss,
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float | None,
    bias: Tensor | float | None = None,
    left_out: Sequence[Tensor | None] = (None, None, None),
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
    if scale is not None and not isinstance(scale, Tensor):
        loss, scale = loss._replace(number=1 / scale if loss.divides else scale, divides=False), None
    if bias is not None and not isinstance(bias, Tensor):
        bias = query.new_full((), bias, dtype=torch.float64)
    result: Tensor = _OneTile.apply(query, key, scale, bias, loss, (*left_out, classes))
    return result


class _OneTile(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        loss: Loss,
        given: Sequence[Tensor | None],
    ) -> Tensor:
        rows = query.contiguous()
        keys = rows if key is None else key.contiguous()
        empty, count, key_count = rows.new_empty(0), rows.shape[0], keys.shape[0]
        *left_out, classes = (empty if one is None else one.contiguous() for one in given)
        shift = loss.shift if given[-1] is None else -1
        place = [0, 0, key_count, shift, int(loss.symmetric), int(loss.divides)]
        options = [empty, *left_out, empty if scale is None else scale, classes]
        products = contrastive_cuda.multiplied(rows, keys.T, compute_dtype(rows))
        weights, factor = empty, 1.0
        if any(ctx.needs_input_grad):
            weights = products
            if rows.dtype != products.dtype:
                weights, factor = torch.empty_like(products, dtype=rows.dtype), contrastive_cuda.WEIGHT_SCALE
        numbers = [loss.of_rows, loss.of_columns, loss.divisor, factor]
        of_scale = ctx.needs_input_grad[2]
        result, memory = _ops.contrastive_one_tile(
            products, place, loss.number, options, numbers, empty if bias is None else bias, weights, of_scale
        )
        ctx.loss, ctx.place, ctx.factor = loss, place, factor
        ctx.formed = weights, memory, options
        ctx.save_for_backward(rows, keys, scale, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (*_Gradients.apply(ctx, grad, *ctx.saved_tensors), None, None)
        return (*_gradients(ctx, grad), None, None)


def _gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    if is_batched(grad):  # the kernel takes one
        found = _gradients(ctx, ctx.formed[1].new_ones(()))
        return [
            None if one is None else (one * grad.view(*grad.shape, *(1,) * one.ndim)).to(one.dtype) for one in found
        ]
    (rows, keys, scale, bias), (weights, memory, options) = ctx.saved_tensors, ctx.formed
    empty = options[0]
    of_query, of_key, of_scale, of_bias = ctx.needs_input_grad[:4]
    sums, to = [empty, empty], [empty, empty]
    for side, (wanted, first, second) in enumerate(((of_query, weights, keys), (of_key, weights.T, rows))):
        if wanted:
            sums[side] = contrastive_cuda.multiplied(first, second, compute_dtype(rows))
            same = rows.dtype == sums[side].dtype  # then in place
            to[side] = sums[side] if same else torch.empty_like(sums[side], dtype=rows.dtype)
    of_numbers = [
        torch.empty_like(one) if one is not None and wanted else empty
        for one, wanted in ((scale, of_scale), (bias, of_bias))
    ]
    _ops.contrastive_finish(
        *(weights, ctx.place, ctx.loss.number, options, [rows, keys], sums, to),
        *(ctx.factor, grad.contiguous(), memory, of_numbers),
    )
    formed = (*to, *of_numbers)
    return [one if wanted else None for one, wanted in zip(formed, ctx.needs_input_grad, strict=False)]


class _Gradients(torch.autograd.Function):
    """The gradients where a second derivative may be asked for, which there is not."""

    @staticmethod
    def forward(ctx: Any, first: Any, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        ctx.name = first.loss.name
        return tuple(_gradients(first, grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative(ctx.name, *grads)
