"""The losses of this rank's queries against the keys of all ranks, as an operator with its gradient.

It is an operator of torch.library, so that torch.compile takes it as a whole: what the ranks exchange depends on data.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed import _gather, _ring
from fedkernels.distributed._block import (
    block_gradients,
    block_logsumexp,
    block_positives,
    block_sigmoid,
    block_sigmoid_gradients,
)
from fedkernels.distributed._labels import gather_labels
from fedkernels.distributed._ranks import METHODS, describe, exchange, name_of_group, named_group
from fedkernels.internal import checks
from fedkernels.internal.autograd import has_tangent, keep_missing_as_none, needs_gradient
from fedkernels.internal.contrastive_cuda import add_weighted, in_units, inner_product, product
from fedkernels.reference._precision import compute_dtype, no_autocast

_TRANSPORTS: dict[str, ModuleType] = {"gather": _gather, "ring": _ring}

torch.library.define(
    "fedkernels::distributed_losses",
    "(Tensor query, Tensor key, Tensor scale, Tensor labels, str loss, str method, str group, bool gradient,"
    " bool key_gradient)"
    " -> (Tensor losses, Tensor logsumexp, Tensor mean_weight, Tensor key_rows, Tensor key_gradient)",
)
torch.library.define(
    "fedkernels::distributed_gradients",
    "(Tensor query, Tensor key, Tensor scale, Tensor labels, Tensor logsumexp, Tensor weights, Tensor key_rows,"
    " Tensor key_gradient, str loss, str method, str group) -> (Tensor, Tensor, Tensor)",
)


def distributed_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    loss: str,
    reduction: str,
    method: str,
    group: ProcessGroup | None,
    labels: Tensor | None = None,
) -> Tensor:
    """The losses of this rank's queries over the keys j of all ranks, reduced.

    ``logsumexp_j(scale q_i . k_j) - scale q_i . k_p(i)``, or ``-sum_j log sigmoid(z_ij (scale q_i . k_j + bias))`` with
    z_ij = 1 for j = p(i) and else -1.

    Args:
        query: [B, d], this rank's queries.
        key: [M, d], this rank's keys, M >= B.
        scale: scalar tensor; for "sigmoid_loss" [2], scale and bias.
        loss: "info_nce" or "sigmoid_loss", the first or the second formula; the positive of query i is this rank's key
            i. For "nt_xent", the first formula, query and key are both [view1; view2]; the positive is the other view
            and a row leaves out itself. For "supervised_contrastive_loss" query and key are both the rows; a row leaves
            out itself, and the second term is the mean over all rows of its label.
        reduction: "mean", "sum" or "none".
        method: "gather" or "ring".
        group: the process group; None is the default group.
        labels: int64 [B], for "supervised_contrastive_loss".
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("method", method, METHODS)
    name = name_of_group(group)
    if has_tangent(query, key, scale):
        raise RuntimeError("the distributed losses have no forward mode: autograd would take the derivative for zero")
    key_gradient = needs_gradient(key)
    gradient = key_gradient or needs_gradient(query) or needs_gradient(scale)
    labels = query.new_empty(0, dtype=torch.int64) if labels is None else labels.contiguous()
    losses, _, mean_weight, *_ = torch.ops.fedkernels.distributed_losses(
        query.contiguous(), key.contiguous(), scale, labels, loss, method, name, gradient, key_gradient
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total * mean_weight.detach() if reduction == "mean" else total


@torch.library.impl("fedkernels::distributed_losses", ("cpu", "cuda"))
def _losses(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    labels: Tensor,
    loss: str,
    method: str,
    group: str,
    gradient: bool,
    of_key: bool,
) -> tuple[Tensor, ...]:
    dtype, ranks = compute_dtype(query, key), named_group(group)
    call = describe(query, key, dtype, loss, method, gradient, of_key)
    calls = exchange(call, query.device, ranks)
    key_rows = [call.key_rows for call in calls]
    all_labels = gather_labels(labels, key_rows, ranks) if loss == "supervised_contrastive_loss" else None
    with no_autocast(query):
        logsumexp = query.new_full((len(query),), -torch.inf, dtype=torch.float64)
        of_positives = torch.zeros_like(logsumexp)
        sums = torch.zeros_like(logsumexp)

        def merge(owner: int, keys: Tensor) -> None:
            if loss == "sigmoid_loss":
                sums.add_(block_sigmoid(query, keys, scale, owner == ranks.rank()))
                return
            positives, excluded = _in_block(query, loss, owner == ranks.rank())
            of_block, positives_of_block = block_logsumexp(query, keys, scale, positives, excluded)
            torch.logaddexp(logsumexp, of_block, out=logsumexp)
            if positives_of_block is not None:
                of_positives.copy_(positives_of_block)
            if all_labels is not None:
                for rows, mask in block_positives(
                    labels, all_labels.of_ranks[owner], owner == ranks.rank(), keys.dtype
                ):
                    of_positives[rows] += (product(mask, keys, dtype) * query[rows]).sum(dim=1) * scale

        _TRANSPORTS[method].visit_keys(key, key_rows, ranks, merge)
        counted = sum(call.query_rows for call in calls)
        if all_labels is not None:
            counted = max(1, all_labels.counted)
            of_positives /= all_labels.positives.clamp(min=1)
            logsumexp.masked_fill_(logsumexp == -torch.inf, 0)  # of a row without any other: no -inf - -inf later
        losses = (sums if loss == "sigmoid_loss" else logsumexp - of_positives).to(dtype)
        if all_labels is not None:
            losses.masked_fill_(all_labels.positives == 0, 0)
    mean_weight = losses.new_full((), len(calls) / counted)
    needed = any(call.key_gradient for call in calls)
    return losses, logsumexp, mean_weight, torch.tensor(key_rows), torch.tensor(needed)


@torch.library.impl("fedkernels::distributed_gradients", ("cpu", "cuda"))
def _gradients(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    key_rows: Tensor,
    key_gradient: Tensor,
    loss: str,
    method: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, ranks, transport = compute_dtype(query, key), named_group(group), _TRANSPORTS[method]
    all_labels, by_positives = None, weights
    if loss == "supervised_contrastive_loss":
        all_labels = gather_labels(labels, key_rows.tolist(), ranks)
        weights = weights.masked_fill(all_labels.positives == 0, 0)
        by_positives, unit = in_units((weights / all_labels.positives.clamp(min=1))[:, None])
    with no_autocast(query):
        of_queries, of_bias = torch.zeros_like(query, dtype=dtype), scale.new_zeros((), dtype=torch.float64)

        def of_block(owner: int, keys: Tensor, of_keys: bool) -> Tensor | None:
            own = owner == ranks.rank()
            if loss == "sigmoid_loss":
                of_query, of_key, more = block_sigmoid_gradients(query, keys, scale, weights, own, of_keys)
                of_bias.add_(more)
            else:
                positives, excluded = _in_block(query, loss, own)
                of_query, of_key = block_gradients(query, keys, scale, logsumexp, weights, positives, excluded, of_keys)
            if all_labels is not None:
                for rows, mask in block_positives(labels, all_labels.of_ranks[owner], own, dtype):
                    mask *= by_positives[rows]
                    factor = (unit * scale).to(dtype)
                    of_positives = torch.zeros_like(of_query[rows])
                    add_weighted(of_positives, mask, keys)
                    of_query[rows] -= of_positives * factor
                    if of_key is not None:
                        of_positives = torch.zeros_like(of_key)
                        add_weighted(of_positives, mask.T, query[rows])
                        of_key -= of_positives * factor
            of_queries.add_(of_query)
            return of_key

        if key_gradient.item():
            of_key = transport.sum_key_gradients(key, key_rows.tolist(), ranks, partial(of_block, of_keys=True))
        else:
            transport.visit_keys(key, key_rows.tolist(), ranks, partial(of_block, of_keys=False))
            of_key = torch.zeros_like(key, dtype=dtype)
        of_scale = inner_product(of_queries, query) / scale.flatten()[0]
        of_numbers = of_scale if scale.ndim == 0 else torch.stack([of_scale, of_bias])
        return of_queries, of_key, of_numbers


def _in_block(query: Tensor, loss: str, own: bool) -> tuple[Tensor | None, bool]:
    """The index of each query's positive among a rank's keys, [B] int64, and whether query i leaves out key i.

    Both concern a rank's own keys alone.
    """
    if not own:
        return None, False
    if loss == "supervised_contrastive_loss":
        return None, True
    index, two_views = torch.arange(len(query), device=query.device), loss == "nt_xent"
    return index.roll(len(query) // 2) if two_views else index, two_views


@torch.library.register_fake("fedkernels::distributed_losses")
def _(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    labels: Tensor,
    loss: str,
    method: str,
    group: str,
    gradient: bool,
    of_key: bool,
) -> tuple[Tensor, ...]:
    losses = query.new_empty(query.shape[0], dtype=compute_dtype(query, key))
    ranks = named_group(group).size()
    return (
        losses,
        torch.empty_like(losses, dtype=torch.float64),
        losses.new_empty(()),
        torch.empty(ranks, dtype=torch.int64, device="cpu"),
        torch.empty((), dtype=torch.bool, device="cpu"),
    )


@torch.library.register_fake("fedkernels::distributed_gradients")
def _(query: Tensor, key: Tensor, numbers: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = compute_dtype(query, key)
    return (
        query.new_empty(query.shape, dtype=dtype),
        key.new_empty(key.shape, dtype=dtype),
        query.new_empty(numbers.shape, dtype=torch.float64),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    keep_missing_as_none(ctx)
    query, key, scale, labels, *ctx.options = inputs[:7]
    ctx.dtypes = query.dtype, key.dtype, scale.dtype
    _, logsumexp, _, key_rows, key_gradient = output
    ctx.save_for_backward(query, key, scale, labels, logsumexp, key_rows, key_gradient)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, scale, labels, logsumexp, key_rows, key_gradient = ctx.saved_tensors
    dtype = compute_dtype(query, key)
    # Also without a gradient here: other ranks may have one, and they wait for this rank's keys.
    weights = logsumexp.new_zeros(query.shape[0], dtype=dtype) if grad is None else grad.to(dtype)
    gradients = torch.ops.fedkernels.distributed_gradients(
        query, key, scale, labels, logsumexp, weights.contiguous(), key_rows, key_gradient, *ctx.options
    )
    wanted = zip(gradients, ctx.needs_input_grad[:3], ctx.dtypes, strict=True)
    return *(gradient.to(dtype) if need else None for gradient, need, dtype in wanted), *(None,) * 6


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("the distributed losses have no second derivative")


torch.library.register_autograd("fedkernels::distributed_losses", _backward, setup_context=_setup_context)
torch.library.register_autograd("fedkernels::distributed_gradients", _refuse_second_derivative)
