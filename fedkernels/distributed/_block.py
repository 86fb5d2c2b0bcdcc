"""One rank's queries against the keys of one rank: log-sum-exp, and gradients given that of all keys.

The logits are formed for some queries at a time, so that no matrix of all of them is held.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_LOGITS_AT_A_TIME = 2**20  # 4 MiB in float32


def block_logsumexp(query: Tensor, key: Tensor, exclude_diagonal: bool) -> Tensor:
    """``logsumexp_j q_i . k_j`` for each query, [B]; query [B, d] and key [M, d] in one dtype.

    With `exclude_diagonal` query i leaves out key i.
    """
    values = query.new_empty(len(query))
    for rows, logits in _logits(query, key, exclude_diagonal):
        torch.logsumexp(logits, dim=1, out=values[rows])
    return values


def block_gradients(
    query: Tensor,
    key: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    positive: Tensor | None,
    exclude_diagonal: bool,
    *,
    of_query: Tensor | None,
    of_key: Tensor | None,
) -> None:
    """Adds to `of_query` [B, d] and `of_key` [M, d] the gradients of ``sum_i weights_i loss_i`` by this block's logits.

    Args:
        query: [B, d].
        key: [M, d].
        logsumexp: [B], over the keys of all blocks.
        weights: [B].
        positive: [B] int64, the index of each query's positive key in this block; None if it is in another block.
        exclude_diagonal: query i leaves out key i.
        of_query: [B, d], or None where this gradient is not needed.
        of_key: [M, d], or None where this gradient is not needed.
    """
    for rows, logits in _logits(query, key, exclude_diagonal):
        by_logits = logits.sub_(logsumexp[rows, None]).exp_()
        if positive is not None:
            by_logits.scatter_add_(1, positive[rows, None], by_logits.new_full((1, 1), -1.0).expand(len(logits), 1))
        by_logits *= weights[rows, None]
        if of_query is not None:
            of_query[rows].addmm_(by_logits, key)
        if of_key is not None:
            of_key.addmm_(by_logits.T, query[rows])


def _logits(query: Tensor, key: Tensor, exclude_diagonal: bool) -> Iterator[tuple[slice, Tensor]]:
    at_a_time = max(1, _LOGITS_AT_A_TIME // len(key))
    for start in range(0, len(query), at_a_time):
        rows = slice(start, min(start + at_a_time, len(query)))
        logits = query[rows] @ key.T
        if exclude_diagonal:
            logits.diagonal(start).fill_(-torch.inf)
        yield rows, logits
