"""InfoNCE: the contrastive loss of queries against keys."""

from typing import Any, cast

import torch
from torch import Tensor

from fedkernels.internal import checks, contrastive, contrastive_cuda, contrastive_one_tile, native
from fedkernels.internal.autograd import (
    keep_missing_as_none,
    needs_gradient,
    refuse_second_derivative,
    register_no_derivative,
)
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._reduce import reduce
from fedkernels.reference.info_nce import info_nce as _reference

_MANY_PAIRS = 6 << 20  # below, what calls the kernel that forms its products itself takes longer than that kernel saves


def info_nce(
    query: Tensor,
    key: Tensor,
    temperature: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    positives: int | Tensor = 0,
    negatives: Tensor | None = None,
    labels: tuple[Tensor, Tensor] | None = None,
    excluded: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """InfoNCE loss of B queries against N keys; the positive of query i is key i, unless `positives` names others.

    ``loss_i = logsumexp_j(q_i . k_j / temperature) - q_i . k_p(i) / temperature``

    The rows are used as given: normalise them first (``torch.nn.functional.normalize``) if the similarity is to be
    the cosine, as MoCo v3 does. Source: van den Oord et al. 2018, "Representation Learning with Contrastive
    Predictive Coding", Eq. 4.

    `labels` and `excluded` leave out pairs that are known to be false negatives; a positive is never left out. With
    them, or with a tensor of positives, the compiled operators form the logits once more in the backward pass.

    Args:
        query: [B, d], float16, bfloat16, float32 or float64, any strides.
        key: [N, d]; keys that are nobody's positive are further negatives.
        temperature: a positive, finite Python number, or a tensor of one entry, which gets its gradient; the queries
            are then divided by it in float32 or wider.
        reduction: "mean" or "sum" over the B queries, or "none".
        positives: an offset, so that p(i) = i + offset and N >= B + offset, or int64 [B], each from 0 to N - 1.
        negatives: [M, d], further keys that are nobody's positive, as from a queue: they follow the rows of `key`.
        labels: int64 [B] and [N + M], of the queries and of the keys: pairs of equal labels are left out.
        excluded: bool [B, N + M]: pairs that are left out where it is True.
        recompute: form the logits again in the backward pass, and the gradients only then. By default the gradients are
            formed with the loss, while the logits are at hand, and are kept in float32 or wider (on CUDA the weights of
            all pairs are kept, if they fit into 256 MB). True saves that memory: on the CPU it takes N x d x 4 bytes
            and, for B = N = 65,536, 34 MB beside the gradients. It takes one product of B x N x d more than the usual
            two or three, and on CUDA another where an input has 16 bits: its gradient has no float32 sums of all rows.

    Returns:
        A scalar, or [B] for "none"; float64 where query, key or negatives is float64, else float32. Products and sums
        have that precision too, under autocast as well. Gradients come back in each input's dtype. NaN in gives NaN
        out. On CUDA float32 products use tf32, 1e-3 relative, where torch's setting for matrices allows it
        (``torch.backends.cuda.matmul.fp32_precision``).

    Raises:
        TypeError: an input is not a tensor of the right dtype, or temperature neither a number nor a floating tensor.
        ValueError: B = 0, d = 0, N too small, shapes or devices that do not agree, a temperature, a reduction or (on
            the CPU, outside of torch.compile) a positive out of range.
    """
    checks.floating("query", query, ndim=2, layout="[B, d]")
    checks.floating("key", key, ndim=2, layout="[N, d]")
    checks.not_empty("query", query, (0, 1), "B or d")
    (rows, columns), (keys, key_columns) = query.shape, key.shape
    if key_columns != columns:
        raise ValueError(f"key must have the d = {columns} columns of query, got {key_columns}")
    if key.device != query.device:
        checks.same_device(query=query, key=key)  # raises
    temperature = checks.positive_number_or_tensor("temperature", temperature, query.device)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    recompute = checks.boolean("recompute", recompute)
    positives = _check_positives(positives, query, rows, keys)
    if negatives is not None:
        key = contrastive.with_negatives(query, key, negatives)
        keys = key.shape[0]
    leaves_out = labels is not None or excluded is not None
    if leaves_out:
        _check_left_out(labels, excluded, query, key)
    if (
        not (recompute or isinstance(positives, Tensor))
        and not (_one_kernel_is_faster(query, key) and not leaves_out and not isinstance(temperature, Tensor))
        and contrastive_one_tile.serves(query, key, reduction, rows * keys)
        and contrastive.operator("info_nce", query, key, temperature) is not None
    ):
        divisor = rows if reduction == "mean" else 1.0
        loss = contrastive_one_tile.Loss("info_nce", 1.0, 0.0, False, positives, True, divisor)
        left_out = contrastive_one_tile.NOTHING
        if leaves_out:
            left_out = *(labels or (None, None)), excluded
        return contrastive_one_tile.value(loss, query, key, temperature, left_out=left_out)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(query, key, temperature))  # before it is inverted
    narrow = isinstance(temperature, Tensor) and contrastive.stays_narrow(query, key)
    if leaves_out or isinstance(positives, Tensor) or narrow:
        return by_similarities(query, key, 1 / temperature, reduction, positives, labels, excluded)
    if positives > 0:
        with no_autocast(key):  # under autocast to bfloat16 roll of float16 raises an error
            key = key.roll(-positives, 0)  # so that key i is the positive of query i
    if isinstance(temperature, Tensor):
        query, temperature = contrastive.scaled_rows(query, 1 / temperature, compute_dtype(query, key)), 1.0
    wanted = (False, False) if recompute else (needs_gradient(query), needs_gradient(key))
    operator = contrastive.operator("info_nce", query, key)
    if operator is None:
        return _reference(query, key, temperature, reduction)
    result: Tensor = operator(query.contiguous(), key.contiguous(), temperature, reduction, *wanted)[0]
    return result


def _one_kernel_is_faster(query: Tensor, key: Tensor) -> bool:
    """Is there a kernel that forms its products itself, for more pairs than its launch takes the host?"""
    if not query.is_cuda or needs_gradient(key) or query.shape[0] * key.shape[0] < _MANY_PAIRS:
        return False
    return contrastive_cuda.in_one(query, key)


def by_similarities(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    reduction: str,
    positives: int | Tensor,
    labels: tuple[Tensor, Tensor] | None,
    excluded: Tensor | None = None,
) -> Tensor:
    """The loss, which forms the logits once more in the backward pass."""
    if not isinstance(positives, Tensor):
        positives = torch.arange(positives, positives + query.shape[0], device=query.device)
    of_queries, _, of_positives = similarity_logsumexp(
        query, key, scale, positives=positives, labels=labels, excluded=excluded
    )
    return reduce(of_queries - cast(Tensor, of_positives), reduction).to(compute_dtype(query, key))


def _check_positives(positives: object, query: Tensor, queries: int, keys: int) -> int | Tensor:
    """An offset or int64 [B], within the rows of key."""
    if isinstance(positives, Tensor):
        checks.integers("positives", positives, (queries,), "[B]")
        checks.same_device(query=query, positives=positives)
        if keys == 0:
            raise ValueError(f"key must not be empty in N, got shape [0, {query.shape[1]}]")
        if checks.has_values(positives):
            lowest, highest = positives.aminmax()
            # Under a FakeTensorMode they are without values, even those of a tensor that has values.
            if checks.has_values(lowest) and not 0 <= int(lowest) <= int(highest) < keys:
                raise ValueError(f"positives must be from 0 to N - 1 = {keys - 1}, got {int(lowest)} to {int(highest)}")
        return positives
    if type(positives) is not int:
        positives = checks.integer("positives", positives, "an integer or an int64 tensor [B]")
    if positives < 0:
        raise ValueError(f"positives must be an offset of at least 0, got {checks.short(positives)}")
    if keys < queries + positives:
        beyond = f" from row {positives} on" if positives else ""
        raise ValueError(f"key must have at least the B = {queries} rows of query{beyond}, got {keys}")
    return positives


def _check_left_out(labels: object, excluded: Tensor | None, query: Tensor, key: Tensor) -> None:
    """Labels [B] and [N + M], and a mask [B, N + M]."""
    if labels is not None:
        if not isinstance(labels, (tuple, list)) or len(labels) != 2:
            raise TypeError("labels must be a pair of tensors: the queries' labels [B] and the keys' labels [N + M]")
        for name, tensor, rows, layout in (("[0]", labels[0], query, "[B]"), ("[1]", labels[1], key, "[N + M]")):
            checks.integers(f"labels{name}", tensor, (rows.shape[0],), layout)
            checks.same_device(**{"query": query, f"labels{name}": tensor})
    if excluded is not None:
        if not isinstance(excluded, Tensor):
            raise TypeError(f"excluded must be a torch.Tensor, got {type(excluded).__name__}")
        if excluded.dtype != torch.bool:
            raise TypeError(f"excluded must be bool, got {excluded.dtype}")
        checks.dense("excluded", excluded)
        if excluded.shape != (query.shape[0], key.shape[0]):
            expected = [query.shape[0], key.shape[0]]
            raise ValueError(f"excluded must have shape [B, N + M] = {expected}, got {list(excluded.shape)}")
        checks.same_device(query=query, excluded=excluded)


if native.module is not None:

    @torch.library.register_fake("fedkernels::info_nce")
    def _(
        query: Tensor,
        key: Tensor,
        temperature: float,
        reduction: str,
        query_gradient: bool,
        key_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, (of_query, of_key) = compute_dtype(query, key), _formed(reduction, query_gradient, key_gradient)
        return (
            query.new_empty(query.shape[:1] if reduction == "none" else (), dtype=dtype),
            query.new_empty(query.shape if of_query else 0, dtype=dtype),
            key.new_empty(key.shape if of_key else 0, dtype=dtype),
        )

    @torch.library.register_fake("fedkernels::info_nce_gradients")
    def _(
        query: Tensor,
        key: Tensor,
        temperature: float,
        weights: Tensor,
        query_gradient: bool,
        key_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        return query.new_empty(query.shape if query_gradient else 0), key.new_empty(key.shape if key_gradient else 0)

    def _formed(reduction: str, query_gradient: bool, key_gradient: bool) -> tuple[bool, bool]:
        """Which gradients are computed together with the losses.

        The gradient in the keys sums over the queries, so it depends on the losses' weights. One weight for all losses
        can be applied later; a weight for each loss cannot.
        """
        if reduction == "none" and key_gradient:
            return False, False
        return query_gradient, key_gradient

    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keep_missing_as_none(ctx)
        query, key, ctx.temperature, ctx.reduction, *wanted = inputs
        ctx.formed = _formed(ctx.reduction, *wanted)
        ctx.rows, ctx.dtypes = query.shape[0], (query.dtype, key.dtype)
        ctx.save_for_backward(*(output[1:] if any(ctx.formed) else (query, key)))

    def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("info_nce", *of_gradients)
        if grad is None:
            return (None,) * 6
        wanted = ctx.needs_input_grad[:2]
        if ctx.reduction == "mean":
            grad = grad / ctx.rows
        if any(ctx.formed):
            factor = grad[:, None] if ctx.reduction == "none" else grad
            of_query, of_key = (
                contrastive.scaled(gradient, factor, dtype) if need else None
                for gradient, need, dtype in zip(ctx.saved_tensors, wanted, ctx.dtypes, strict=True)
            )
        else:
            weights = grad.expand(ctx.rows).double().contiguous()
            operator = torch.ops.fedkernels.info_nce_gradients
            gradients = operator(*ctx.saved_tensors, ctx.temperature, weights, *wanted)
            of_query, of_key = (gradient if need else None for gradient, need in zip(gradients, wanted, strict=True))
        return of_query, of_key, None, None, None, None

    torch.library.register_autograd("fedkernels::info_nce", _backward, setup_context=_setup_context)
    register_no_derivative("info_nce_gradients", "info_nce")
