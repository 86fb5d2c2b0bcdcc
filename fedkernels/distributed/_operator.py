"""The losses of this rank's queries against the keys of all ranks, as an operator with its gradient.

It is an operator of torch.library, so that torch.compile takes it as a whole: what the ranks exchange depends on data.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedkernels.distributed import _gather, _ring
from fedkernels.distributed._block import block_gradients, block_logsumexp, block_sigmoid, block_sigmoid_gradients
from fedkernels.distributed._ranks import describe, exchange, named_group
from fedkernels.internal.autograd import keep_missing_as_none, needs_gradient
from fedkernels.reference._precision import compute_dtype, no_autocast

_TRANSPORTS: dict[str, ModuleType] = {"gather": _gather, "ring": _ring}

torch.library.define(
    "fedkernels::distributed_losses",
    "(Tensor query, Tensor key, Tensor scale, str loss, str method, str group, bool gradient, bool key_gradient)"
    " -> (Tensor losses, Tensor logsumexp, Tensor mean_weight, Tensor key_rows, Tensor key_gradient)",
)
torch.library.define(
    "fedkernels::distributed_gradients",
    "(Tensor query, Tensor key, Tensor scale, Tensor logsumexp, Tensor weights, Tensor key_rows, Tensor key_gradient,"
    " str loss, str method, str group) -> (Tensor, Tensor, Tensor)",
)


def distributed_loss(
    query: Tensor, key: Tensor, scale: Tensor, loss: str, method: str, group: str, reduction: str
) -> Tensor:
    """The losses of this rank's queries over the keys j of all ranks, reduced.

    ``logsumexp_j(scale q_i . k_j) - scale q_i . k_p(i)``, or ``-sum_j log sigmoid(z_ij scale q_i . k_j)`` with z_ij = 1
    for j = p(i) and else -1.

    Args:
        query: [B, d], this rank's queries.
        key: [M, d], this rank's keys, M >= B.
        scale: scalar tensor.
        loss: "info_nce" or "sigmoid_loss", the first or the second formula; the positive of query i is this rank's key
            i. For "nt_xent", the first formula, query and key are both [view1; view2]; the positive is the other view
            and a row leaves out itself.
        method: "gather" or "ring".
        group: the process group's name.
        reduction: "mean", "sum" or "none".
    """
    key_gradient = needs_gradient(key)
    gradient = key_gradient or needs_gradient(query) or needs_gradient(scale)
    losses, _, mean_weight, *_ = torch.ops.fedkernels.distributed_losses(
        query.contiguous(), key.contiguous(), scale, loss, method, group, gradient, key_gradient
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total * mean_weight.detach() if reduction == "mean" else total


@torch.library.impl("fedkernels::distributed_losses", ("cpu", "cuda"))
def _losses(
    query: Tensor, key: Tensor, scale: Tensor, loss: str, method: str, group: str, gradient: bool, of_key: bool
) -> tuple[Tensor, ...]:
    dtype, ranks = compute_dtype(query, key), named_group(group)
    call = describe(query, key, dtype, loss, method, gradient, of_key)
    calls = exchange(call, query.device, ranks)
    key_rows = [call.key_rows for call in calls]
    with no_autocast(query):
        scaled = query.to(dtype) * scale.to(dtype)
        logsumexp = scaled.new_full((len(query),), -torch.inf, dtype=torch.float64)
        of_positives = torch.empty_like(logsumexp)
        sums = torch.zeros_like(logsumexp)

        def merge(owner: int, keys: Tensor) -> None:
            if loss == "sigmoid_loss":
                sums.add_(block_sigmoid(scaled, keys.to(dtype), owner == ranks.rank()))
                return
            positives, excluded = _in_block(query, loss, owner == ranks.rank())
            of_block, positives_of_block = block_logsumexp(scaled, keys.to(dtype), positives, excluded)
            torch.logaddexp(logsumexp, of_block, out=logsumexp)
            if positives_of_block is not None:
                of_positives.copy_(positives_of_block)

        _TRANSPORTS[method].visit_keys(key, key_rows, ranks, merge)
        losses = (sums if loss == "sigmoid_loss" else logsumexp - of_positives).to(dtype)
    mean_weight = losses.new_full((), len(calls) / sum(call.query_rows for call in calls))
    needed = any(call.key_gradient for call in calls)
    return losses, logsumexp, mean_weight, torch.tensor(key_rows), torch.tensor(needed)


@torch.library.impl("fedkernels::distributed_gradients", ("cpu", "cuda"))
def _gradients(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    key_rows: Tensor,
    key_gradient: Tensor,
    loss: str,
    method: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, ranks, transport = compute_dtype(query, key), named_group(group), _TRANSPORTS[method]
    with no_autocast(query):
        wide, wide_scale = query.to(dtype), scale.to(dtype)
        scaled = wide * wide_scale
        by_scaled = torch.zeros_like(scaled)  # the gradient in `scaled`

        def of_block(owner: int, keys: Tensor, of_keys: bool) -> Tensor | None:
            own, keys = owner == ranks.rank(), keys.to(dtype)
            if loss == "sigmoid_loss":
                of_query, of_key = block_sigmoid_gradients(scaled, keys, weights, own, of_keys)
            else:
                positives, excluded = _in_block(query, loss, own)
                of_query, of_key = block_gradients(scaled, keys, logsumexp, weights, positives, excluded, of_keys)
            by_scaled.add_(of_query)
            return of_key

        if key_gradient.item():
            of_key = transport.sum_key_gradients(key, key_rows.tolist(), ranks, partial(of_block, of_keys=True))
        else:
            transport.visit_keys(key, key_rows.tolist(), ranks, partial(of_block, of_keys=False))
            of_key = torch.zeros_like(key, dtype=dtype)
        return by_scaled * wide_scale, of_key, (by_scaled * wide).sum()


def _in_block(query: Tensor, loss: str, own: bool) -> tuple[Tensor | None, bool]:
    """The index of each query's positive among a rank's keys, [B] int64, and whether query i leaves out key i.

    Both concern a rank's own keys alone.
    """
    if not own:
        return None, False
    index, two_views = torch.arange(len(query), device=query.device), loss == "nt_xent"
    return index.roll(len(query) // 2) if two_views else index, two_views


@torch.library.register_fake("fedkernels::distributed_losses")
def _(
    query: Tensor, key: Tensor, scale: Tensor, loss: str, method: str, group: str, gradient: bool, of_key: bool
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
def _(query: Tensor, key: Tensor, scale: Tensor, logsumexp: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = compute_dtype(query, key)
    return (
        query.new_empty(query.shape, dtype=dtype),
        key.new_empty(key.shape, dtype=dtype),
        query.new_empty((), dtype=dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    keep_missing_as_none(ctx)
    query, key, scale, *ctx.options = inputs[:6]
    ctx.dtypes = query.dtype, key.dtype, scale.dtype
    _, logsumexp, _, key_rows, key_gradient = output
    ctx.save_for_backward(query, key, scale, logsumexp, key_rows, key_gradient)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, scale, logsumexp, key_rows, key_gradient = ctx.saved_tensors
    dtype = compute_dtype(query, key)
    # Also without a gradient here: other ranks may have one, and they wait for this rank's keys.
    weights = logsumexp.new_zeros(query.shape[0], dtype=dtype) if grad is None else grad.to(dtype)
    gradients = torch.ops.fedkernels.distributed_gradients(
        query, key, scale, logsumexp, weights.contiguous(), key_rows, key_gradient, *ctx.options
    )
    wanted = zip(gradients, ctx.needs_input_grad[:3], ctx.dtypes, strict=True)
    return *(gradient.to(dtype) if need else None for gradient, need, dtype in wanted), *(None,) * 5


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError("the distributed losses have no second derivative")


torch.library.register_autograd("fedkernels::distributed_losses", _backward, setup_context=_setup_context)
torch.library.register_autograd("fedkernels::distributed_gradients", _refuse_second_derivative)
