"""InfoNCE: the contrastive loss of queries against keys."""

from torch import Tensor

from fedkernels import _checks
from fedkernels.reference.info_nce import info_nce as _reference


def info_nce(query: Tensor, key: Tensor, temperature: float, reduction: str = "mean") -> Tensor:
    """InfoNCE loss of B queries against N keys; the positive of query i is key i.

    ``loss_i = logsumexp_j(q_i . k_j / temperature) - q_i . k_i / temperature``

    The rows are used as given: normalise them first (``torch.nn.functional.normalize``) if the similarity is to be
    the cosine, as MoCo v3 does. Source: van den Oord et al. 2018, "Representation Learning with Contrastive
    Predictive Coding", Eq. 4.

    Args:
        query: [B, d], float16, bfloat16, float32 or float64, any strides.
        key: [N, d], N >= B; rows B to N are further negatives.
        temperature: positive, finite Python number.
        reduction: "mean" or "sum" over the B queries, or "none".

    Returns:
        A scalar, or [B] for "none": float64 where an input is float64, else float32. Products and sums have that
        precision too, under autocast as well. Gradients come back in each input's dtype. NaN in gives NaN out.

    Raises:
        TypeError: an input is not a floating tensor, or temperature not a number.
        ValueError: B = 0, d = 0, N < B, unequal d or devices, a temperature or reduction out of range.
    """
    _checks.floating("query", query, ndim=2, layout="[B, d]")
    _checks.floating("key", key, ndim=2, layout="[N, d]")
    _checks.not_empty("query", query, (0, 1), "B or d")
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have the d = {query.shape[1]} columns of query, got {key.shape[1]}")
    if key.shape[0] < query.shape[0]:
        raise ValueError(f"key must have at least the B = {query.shape[0]} rows of query, got {key.shape[0]}")
    _checks.same_device(query=query, key=key)
    temperature = _checks.positive("temperature", temperature)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    return _reference(query, key, temperature, reduction)
