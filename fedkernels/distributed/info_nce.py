"""InfoNCE against the keys of all ranks."""

from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._operator import distributed_loss
from fedkernels.distributed._ranks import Method
from fedkernels.internal import checks
from fedkernels.internal.contrastive import scalar, with_negatives


def info_nce(
    query: Tensor,
    key: Tensor,
    temperature: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    negatives: Tensor | None = None,
    method: Method = "gather",
    group: ProcessGroup | None = None,
) -> Tensor:
    """InfoNCE loss of this rank's B queries against the keys of all ranks; query i's positive is this rank's key i.

    ``loss_i = logsumexp_j(q_i . k_j / temperature) - q_i . k_i / temperature``, j over the keys of all ranks

    Values and gradients are those of ``fedkernels.info_nce`` on the ranks' concatenated batches: see
    ``fedkernels.distributed`` for gradients, memory and what all ranks have to do alike.

    Args:
        query: [B, d], float16, bfloat16, float32 or float64, any strides. B may differ from rank to rank.
        key: [N, d], N >= B; rows B to N are further negatives. One dtype on all ranks, with `negatives`.
        temperature: positive, finite Python number, or a floating tensor with one element, which gets a gradient.
        reduction: "none" for the B losses of this rank, "sum" for their sum. "mean" is that sum divided by the mean
            number of queries of a rank, so that the mean over the ranks is the mean over all queries. Where all ranks
            have B queries it is this rank's mean.
        negatives: [M, d], this rank's further keys that are nobody's positive: they follow the rows of `key`, and the
            queries of all ranks see them. Of a queue that all ranks hold alike, each rank gives a part of its own.
        method: "gather" or "ring", the same on all ranks.
        group: the process group; None is the default group.

    Returns:
        A scalar, or [B] for "none"; float64 where an input is float64, else float32. Products and sums have that
        precision too, under autocast as well. A loss is the difference of two logits' sizes: it is rounded to theirs.

    Raises:
        TypeError: an input is not a floating tensor, or temperature neither a number nor a tensor.
        ValueError: unequal d or devices, a temperature, reduction or method out of range; on all ranks if their d,
            dtypes, methods or need of gradients differ, or if a rank has no queries or fewer keys than queries.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    checks.floating("query", query, ndim=2, layout="[B, d]")
    checks.floating("key", key, ndim=2, layout="[N, d]")
    checks.not_empty("query", query, (1,), "d")
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have the d = {query.shape[1]} columns of query, got {key.shape[1]}")
    checks.same_device(query=query, key=key)
    if negatives is not None:
        if key.shape[0] < query.shape[0]:  # else negatives would be taken for positives
            raise ValueError(f"key must have at least the B = {query.shape[0]} rows of query, got {key.shape[0]}")
        key = with_negatives(query, key, negatives)
    temperature = scalar(checks.positive_number_or_tensor("temperature", temperature, query.device), query)
    return distributed_loss(query, key, 1 / temperature, "info_nce", reduction, method, group)
