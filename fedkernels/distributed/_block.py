"""One rank's queries against the keys of one rank: log-sum-exps or sigmoid terms, and their gradients.

Where there is no compiled operator the logits are formed for some queries at a time: no matrix of all
of them is held.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedkernels.internal import native
from fedkernels.internal.similarity_logsumexp import similarity_gradients, similarity_logsumexp

_LOGITS_AT_A_TIME = 2**20  # 4 MiB in float32


def block_logsumexp(
    query: Tensor, key: Tensor, positives: Tensor | None, exclude_diagonal: bool
) -> tuple[Tensor, Tensor | None]:
    """``logsumexp_j q_i . k_j`` and ``q_i . k_p(i)`` for each query, [B] float64.

    Args:
        query: [B, d].
        key: [M, d] in the same dtype.
        positives: [B] int64, p(i); None if this block holds no positives, and then the second result is None.
        exclude_diagonal: query i leaves out key i.
    """
    if native.operator("similarity_logsumexp", query, key) is not None:
        labels = _left_out(query, key) if exclude_diagonal else None
        of_rows, _, of_positives = similarity_logsumexp(query, key, positives=positives, labels=labels)
        return of_rows, of_positives
    values, positive_values = query.new_empty(len(query), dtype=torch.float64), None
    if positives is not None:
        positive_values = torch.empty_like(values)
    for rows, logits in _logits(query, key, exclude_diagonal):
        values[rows] = logits.logsumexp(dim=1)
        if positives is not None and positive_values is not None:
            positive_values[rows] = logits.gather(1, positives[rows, None])[:, 0].double()
    return values, positive_values


def block_gradients(
    query: Tensor,
    key: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    positives: Tensor | None,
    exclude_diagonal: bool,
    key_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """What this block adds to the gradients of ``sum_i weights_i loss_i`` in query [B, d] and key [M, d].

    Args:
        query: [B, d].
        key: [M, d] in the same dtype.
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
            rows=logsumexp,
            row_weights=weights,
            positives=positives,
            positive_weights=None if positives is None else -weights,
            labels=_left_out(query, key) if exclude_diagonal else None,
        )
        return of_query, of_key if key_gradient else None
    logsumexp = logsumexp.to(query.dtype)

    def by_logits() -> Iterator[tuple[slice, Tensor]]:
        for rows, logits in _logits(query, key, exclude_diagonal):
            logits.sub_(logsumexp[rows, None]).exp_()
            if positives is not None:
                logits.scatter_add_(1, positives[rows, None], logits.new_full((1, 1), -1.0).expand(len(logits), 1))
            yield rows, logits

    return _in_rows(query, key, by_logits(), weights, key_gradient)


def block_sigmoid(query: Tensor, key: Tensor, own: bool) -> Tensor:
    """``-sum_j log sigmoid(z_ij q_i . k_j)`` for each query, [B] float64.

    Args:
        query: [B, d].
        key: [M, d] in the same dtype.
        own: key i is the positive of query i, so that z_ii is 1; all other z_ij are -1.
    """
    losses = query.new_empty(len(query), dtype=torch.float64)
    for rows, logits in _signed(query, key, own):
        losses[rows] = -logsigmoid(logits).sum(dim=1, dtype=torch.float64)
    return losses


def block_sigmoid_gradients(
    query: Tensor, key: Tensor, weights: Tensor, own: bool, key_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """What this block adds to the gradients of ``sum_i weights_i loss_i`` in query [B, d] and key [M, d].

    Args:
        query: [B, d].
        key: [M, d] in the same dtype.
        weights: [B].
        own: as for `block_sigmoid`.
        key_gradient: False gives None for the gradient in key.
    """

    def by_logits() -> Iterator[tuple[slice, Tensor]]:
        for rows, logits in _signed(query, key, own):
            logits.neg_().sigmoid_()  # times -z_ij, which is 1 but for positives
            if own:
                logits.diagonal(rows.start).neg_()
            yield rows, logits

    return _in_rows(query, key, by_logits(), weights, key_gradient)


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
    query: Tensor, key: Tensor, by_logits: Iterator[tuple[slice, Tensor]], weights: Tensor, key_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients in query and key, given those of the queries' losses in the logits."""
    of_query, of_key = torch.zeros_like(query), torch.zeros_like(key)
    for rows, gradients in by_logits:
        gradients *= weights[rows, None]
        of_query[rows].addmm_(gradients, key)
        if key_gradient:
            of_key.addmm_(gradients.T, query[rows])
    return of_query, of_key if key_gradient else None


def _left_out(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Labels by which query i leaves out key i alone."""
    return torch.arange(len(query), device=query.device), torch.arange(len(key), device=key.device)


def _logits(query: Tensor, key: Tensor, exclude_diagonal: bool) -> Iterator[tuple[slice, Tensor]]:
    for rows in _rows(len(query), len(key)):
        logits = query[rows] @ key.T
        if exclude_diagonal:
            logits.diagonal(rows.start).fill_(-torch.inf)
        yield rows, logits


def _rows(queries: int, keys: int) -> Iterator[slice]:
    at_a_time = max(1, _LOGITS_AT_A_TIME // keys)
    for start in range(0, queries, at_a_time):
        yield slice(start, min(start + at_a_time, queries))


def _signed(query: Tensor, key: Tensor, own: bool) -> Iterator[tuple[slice, Tensor]]:
    """The logits times z_ij."""
    for rows, logits in _logits(query, key, exclude_diagonal=False):
        logits.neg_()
        if own:
            logits.diagonal(rows.start).neg_()
        yield rows, logits
