"""Log-sum-exps of the inner products of queries and keys: what most contrastive losses consist of.

On the CPU the scale is applied to the rows before, at O(B d) operations, and autograd gives it its gradient. On CUDA
the rows stay what they are, for 16-bit rows are multiplied many times as fast as those in float32; the scale is a
number on the device that the kernels read.
"""

from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import native
from fedkernels.internal.autograd import keep_missing_as_none, register_no_derivative
from fedkernels.internal.contrastive import operator as operator_of
from fedkernels.internal.contrastive import scalar, scaled_rows
from fedkernels.internal.contrastive_cuda import inner_product
from fedkernels.reference import similarity_logsumexp as _reference
from fedkernels.reference._precision import compute_dtype

Labels = tuple[Tensor, Tensor]


def similarity_logsumexp(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    positives: Tensor | None = None,
    labels: Labels | None = None,
    excluded: Tensor | None = None,
    columns: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-sum-exps of scale q_i . k_j over the keys, over the queries, and the positives' scale q_i . k_p(i).

    The compiled operators form all of them from one pass over the B x N products, which they never hold; what they save
    for the backward pass is their inputs and results. Elsewhere the reference holds the B x N products.

    Args:
        query: [B, d], floating.
        key: [N, d].
        scale: a number, or a tensor of one entry.
        positives: [B], int64: p(i), from 0 to N - 1.
        labels: [B] and [N], int64: pairs whose labels are equal are left out, unless they are positives.
        excluded: [B, N], bool: pairs that are left out, unless they are positives.
        columns: are the sums over the queries wanted?

    Returns:
        [B], [N] or None without `columns`, [B] or None without `positives`; all float64, so that a small difference
        of two of them is not rounded to their size. -inf where all pairs are left out. Differentiable in query, key
        and scale.
    """
    operator = operator_of("similarity_logsumexp", query, key, scale)
    options = (*_as_tensors(query, positives, labels, excluded), columns)
    if operator is not None and query.is_cuda:
        scaled = torch.ops.fedkernels.scaled_similarity_logsumexp
        of_rows, of_columns, of_positives = scaled(query.contiguous(), key.contiguous(), *options, scalar(scale, query))
        return of_rows, of_columns if columns else None, None if positives is None else of_positives
    query = scaled_rows(query, scale, compute_dtype(query, key))
    if operator is None:
        of_rows, of_columns, of_positives = _reference.similarity_logsumexp(query, key, positives, labels, excluded)
        return of_rows, of_columns if columns else None, of_positives
    of_rows, of_columns, of_positives = operator(query.contiguous(), key.contiguous(), *options)
    return of_rows, of_columns if columns else None, None if positives is None else of_positives


def similarity_gradients(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    rows: Tensor | None = None,
    row_weights: Tensor | None = None,
    columns: Tensor | None = None,
    column_weights: Tensor | None = None,
    positives: Tensor | None = None,
    positive_weights: Tensor | None = None,
    labels: Labels | None = None,
    excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients in query and key of the results of `similarity_logsumexp`, each times its weight.

    `rows` [B] and `columns` [N] are log-sum-exps, of these keys and queries or of more: where the keys lie in several
    blocks, join the blocks' results by ``torch.logaddexp`` and give the joined ones here, block by block; the queries'
    gradients of the blocks add up. There must be a compiled operator. This function is not differentiable.

    Returns:
        [B, d] and [N, d], float64 where an input is float64, else float32.
    """
    with torch.no_grad():
        scaled = query if query.is_cuda else scaled_rows(query, scale, compute_dtype(query, key))
        results = (rows, columns, row_weights, column_weights, positive_weights)
        given = (query.new_empty(0) if one is None else one.double().contiguous() for one in results)
        tensors = _as_tensors(query, positives, labels, excluded)
        arguments = (scaled.contiguous(), key.contiguous(), *tensors, *given, True, True)
        if query.is_cuda:
            gradients: tuple[Tensor, Tensor] = torch.ops.fedkernels.scaled_similarity_logsumexp_gradients.default(
                *arguments, scalar(scale, query)
            )
            return gradients
        of_query, of_key = torch.ops.fedkernels.similarity_logsumexp_gradients.default(*arguments)
        return of_query * scale, of_key


def _as_tensors(
    query: Tensor, positives: Tensor | None, labels: Labels | None, excluded: Tensor | None
) -> tuple[Tensor, ...]:
    """The options as the operators take them: a missing one is empty."""
    given = (positives, *(labels or (None, None)), excluded)
    return tuple(query.new_empty(0) if one is None else one.contiguous() for one in given)


if native.module is not None:

    @torch.library.register_fake("fedkernels::scaled_similarity_logsumexp")
    @torch.library.register_fake("fedkernels::similarity_logsumexp")
    def _(
        query: Tensor,
        key: Tensor,
        positives: Tensor,
        query_labels: Tensor,
        key_labels: Tensor,
        excluded: Tensor,
        columns: bool,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = query.shape[0], key.shape[0] if columns else 0, positives.shape[0]
        return tuple(query.new_empty(size, dtype=torch.float64) for size in sizes)  # type: ignore[return-value]

    @torch.library.register_fake("fedkernels::scaled_similarity_logsumexp_gradients")
    @torch.library.register_fake("fedkernels::similarity_logsumexp_gradients")
    def _(query: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        dtype, (query_gradient, key_gradient) = compute_dtype(query, key), options[9:11]
        return (
            query.new_empty(query.shape if query_gradient else 0, dtype=dtype),
            key.new_empty(key.shape if key_gradient else 0, dtype=dtype),
        )

    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keep_missing_as_none(ctx)
        ctx.save_for_backward(*inputs[:6], *output[:2], *inputs[7:])  # the last: a scale, if there is one

    def _backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted, of_scale = ctx.needs_input_grad[:2], None
        scale_wanted = any(ctx.needs_input_grad[7:])
        query, key, *options = ctx.saved_tensors
        scale = options[6:]
        given = (query.new_empty(0) if weight is None else weight.double().contiguous() for weight in weights)
        operators = torch.ops.fedkernels
        operator = (
            operators.scaled_similarity_logsumexp_gradients if scale else operators.similarity_logsumexp_gradients
        )
        gradients = operator(query, key, *options[:6], *given, wanted[0] or scale_wanted, wanted[1], *scale)
        if scale_wanted:
            of_scale = inner_product(gradients[0], query) / scale[0]
        of_query, of_key = (
            gradient.to(one.dtype) if need else None
            for gradient, one, need in zip(gradients, (query, key), wanted, strict=True)
        )
        return of_query, of_key, *(None,) * 5, *(of_scale for _ in scale)

    for _name in ("similarity_logsumexp", "scaled_similarity_logsumexp"):
        torch.library.register_autograd(f"fedkernels::{_name}", _backward, setup_context=_setup_context)
        register_no_derivative(f"{_name}_gradients", "similarity_logsumexp")
