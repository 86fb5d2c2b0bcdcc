"""Log-sum-exps of inner products in plain PyTorch, with the pairs that a contrastive loss leaves out."""

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast


def similarity_logsumexp(
    query: Tensor,
    key: Tensor,
    positives: Tensor | None = None,
    labels: tuple[Tensor, Tensor] | None = None,
    excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logsumexp_j(q_i . k_j) [B], logsumexp_i(q_i . k_j) [N] and q_i . k_p(i) [B] or None, all float64.

    query [B, d], key [N, d], positives [B]: p(i); labels [B] and [N]: pairs of equal labels are left out; excluded
    [B, N]: so are those where it is True. A positive is never left out.
    """
    logits = similarities(query, key)
    left_out = pairs_left_out(positives, labels, excluded)
    of_positives = None if positives is None else logits.gather(1, positives[:, None])[:, 0].double()
    if left_out is not None:
        logits = logits.masked_fill(left_out, -torch.inf)
    logits = logits.double()
    return logits.logsumexp(dim=1), logits.logsumexp(dim=0), of_positives


def similarities(query: Tensor, key: Tensor) -> Tensor:
    """q_i . k_j [B, N], summed in float32 or wider."""
    dtype = compute_dtype(query, key)
    with no_autocast(query):
        return query.to(dtype) @ key.to(dtype).T


def pairs_left_out(
    positives: Tensor | None, labels: tuple[Tensor, Tensor] | None, excluded: Tensor | None
) -> Tensor | None:
    """Which pairs [B, N] are left out, or None if none are."""
    left_out = excluded
    if labels is not None:
        equal = labels[0][:, None] == labels[1][None, :]
        left_out = equal if left_out is None else equal | left_out
    if left_out is not None and positives is not None:
        left_out = left_out.scatter(1, positives[:, None], False)
    return left_out
