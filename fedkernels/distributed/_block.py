"""One rank's queries against the keys of one rank: log-sum-exps or sigmoid terms, and their gradients.

Where there is no compiled operator the logits are formed for some queries at a time: no matrix of all
of them is held.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedkernels.internal import native
from fedkernels.internal.contrastive import stays_narrow
from fedkernels.internal.contrastive_cuda import add_weighted, in_units, product
from fedkernels.internal.similarity_logsumexp import similarity_gradients, similarity_logsumexp
from fedkernels.reference._precision import compute_dtype

_LOGITS_AT_A_TIME = 2**20  # 4 MiB in float32


def block_logsumexp(
    query: Tensor, key: Tensor, scale: Tensor, positives: Tensor | None, exclude_diagonal: bool
) -> tuple[Tensor, Tensor | None]:
    """``logsumexp_j scale q_i . k_j`` and ``scale q_i . k_p(i)`` for each query, [B] float64.

    Args:
        query: [B, d].
        key: [M, d].
        scale: [], on the device.
        positives: [B] int64, p(i); None if this block holds no positives, and then the second result is None.
        exclude_diagonal: query i leaves out key i.
    """
    if native.operator("similarity_logsumexp", query, key) is not None:
        labels = _left_out(query, key) if exclude_diagonal else None
        of_rows, _, of_positives = similarity_logsumexp(query, key, scale, positives=positives, labels=labels)
        return of_rows, of_positives
    values, positive_values = query.new_empty(len(query), dtype=torch.float64), None
    if positives is not None:
        positive_values = torch.empty_like(values)
    for rows, logits in _logits(query, key, scale, exclude_diagonal=exclude_diagonal):
        values[rows] = logits.logsumexp(dim=1)
        if positives is not None and positive_values is not None:
            positive_values[rows] = logits.gather(1, positives[rows, None])[:, 0].double()
    return values, positive_values


def block_gradients(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    positives: Tensor | None,
    exclude_diagonal: bool,
    key_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """What this block adds to the gradients of ``sum_i weights_i loss_i`` in query [B, d] and key [M, d].

    Args:
        query: [B, d].
        key: [M, d].
        scale: [], on the device.
        logsumexp: [B] float64, over the keys of all blocks.
        weights: [B].
        positives: [B] int64, as for `block_logsumexp`.
        exclude_diagonal: query i leaves out key i.
        key_gradient: False gives None for the gradient in key.
    """
    if native.operator("similarity_logsumexp", query, key) is not None:
        of_query, of_key = similarity_gradients(
            query,
            key,
            scale,
            rows=logsumexp,
            row_weights=weights,
            positives=positives,
            positive_weights=None if positives is None else -weights,
            labels=_left_out(query, key) if exclude_diagonal else None,
        )
        return of_query, of_key if key_gradient else None
    logsumexp = logsumexp.to(compute_dtype(query, key))

    def by_logits() -> Iterator[tuple[slice, Tensor]]:
        for rows, logits in _logits(query, key, scale, exclude_diagonal=exclude_diagonal):
            logits.sub_(logsumexp[rows, None]).exp_()
            if positives is not None:
                logits.scatter_add_(1, positives[rows, None], logits.new_full((1, 1), -1.0).expand(len(logits), 1))
            yield rows, logits

    return _in_rows(query, key, scale, by_logits(), weights, key_gradient)


def block_sigmoid(query: Tensor, key: Tensor, numbers: Tensor, own: bool) -> Tensor:
    """``-sum_j log sigmoid(z_ij (scale q_i . k_j + bias))`` for each query, [B] float64.

    Args:
        query: [B, d].
        key: [M, d].
        numbers: [2], scale and bias, on the device.
        own: key i is the positive of query i, so that z_ii is 1; all other z_ij are -1.
    """
    losses = query.new_empty(len(query), dtype=torch.float64)
    for rows, logits in _signed(query, key, numbers, own):
        losses[rows] = -logsigmoid(logits).sum(dim=1, dtype=torch.float64)
    return losses


def block_sigmoid_gradients(
    query: Tensor, key: Tensor, numbers: Tensor, weights: Tensor, own: bool, key_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What this block adds to the gradients of ``sum_i weights_i loss_i`` in query [B, d], key [M, d] and the bias.

    Args:
        query: [B, d].
        key: [M, d].
        numbers: [2], scale and bias, on the device.
        weights: [B].
        own: as for `block_sigmoid`.
        key_gradient: False gives None for the gradient in key.
    """

    of_bias = weights.new_zeros((), dtype=torch.float64)

    def by_logits() -> Iterator[tuple[slice, Tensor]]:
        for rows, logits in _signed(query, key, numbers, own):
            logits.neg_().sigmoid_()  # times -z_ij, which is 1 but for positives
            if own:
                logits.diagonal(rows.start).neg_()
            of_bias.add_((logits.sum(dim=1, dtype=torch.float64) * weights[rows]).sum())
            yield rows, logits

    return *_in_rows(query, key, numbers[0], by_logits(), weights, key_gradient), of_bias


def block_positives(
    labels: Tensor, key_labels: Tensor, own: bool, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """1 where a key has a query's label and is not the query itself, else 0: for some queries at a time, [b, M]."""
    for rows in _rows(len(labels), len(key_labels)):
        equal = (labels[rows, None] == key_labels).to(dtype)
        if own:
            equal.diagonal(rows.start).zero_()
        yield rows, equal


def _in_rows(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    by_logits: Iterator[tuple[slice, Tensor]],
    weights: Tensor,
    key_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients in query and key, given those of the queries' losses in the logits."""
    dtype = compute_dtype(query, key)
    of_query, of_key = torch.zeros_like(query, dtype=dtype), torch.zeros_like(key, dtype=dtype)
    weights, unit = in_units(weights)
    query, key = _as_multiplied(query, key)
    for rows, gradients in by_logits:
        gradients *= weights[rows, None]
        add_weighted(of_query[rows], gradients, key)
        if key_gradient:
            add_weighted(of_key, gradients.T, query[rows])
    unit = (unit * scale).to(dtype)
    return of_query.mul_(unit), of_key.mul_(unit) if key_gradient else None


def _as_multiplied(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """On CUDA rows of the same 16 bits stay what they are."""
    dtype = compute_dtype(query, key)
    return (query, key) if stays_narrow(query, key) else (query.to(dtype), key.to(dtype))


def _left_out(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Labels by which query i leaves out key i alone."""
    return torch.arange(len(query), device=query.device), torch.arange(len(key), device=key.device)


def _logits(
    query: Tensor, key: Tensor, scale: Tensor, bias: Tensor | float = 0.0, exclude_diagonal: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    dtype, (query, key) = compute_dtype(query, key), _as_multiplied(query, key)
    for rows in _rows(len(query), len(key)):
        logits = product(query[rows], key.T, dtype).mul_(scale).add_(bias)
        if exclude_diagonal:
            logits.diagonal(rows.start).fill_(-torch.inf)
        yield rows, logits


def _rows(queries: int, keys: int) -> Iterator[slice]:
    at_a_time = max(1, _LOGITS_AT_A_TIME // keys)
    for start in range(0, queries, at_a_time):
        yield slice(start, min(start + at_a_time, queries))


def _signed(query: Tensor, key: Tensor, numbers: Tensor, own: bool) -> Iterator[tuple[slice, Tensor]]:
    """The logits times z_ij."""
    for rows, logits in _logits(query, key, numbers[0], numbers[1]):
        logits.neg_()
        if own:
            logits.diagonal(rows.start).neg_()
        yield rows, logits
