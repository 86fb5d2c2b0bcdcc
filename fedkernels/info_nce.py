"""InfoNCE: the contrastive loss of queries against keys."""

from typing import Any

import torch
from torch import Tensor

from fedkernels import _checks, _contrastive, _native
from fedkernels._autograd import keep_missing_as_none, needs_gradient, refuse_second_derivative
from fedkernels.reference._precision import compute_dtype
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
        On CUDA float32 products use tf32, 1e-3 relative, where torch's setting for matrices allows it
        (``torch.backends.cuda.matmul.fp32_precision``) and the rows fit the device's shared memory (d <= 512 on an
        H100, 400 on an A100, 240 where a block has 99 KB).

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
    wanted = needs_gradient(query), needs_gradient(key)
    operator = _contrastive.operator("info_nce", query, key)
    if operator is None:
        return _reference(query, key, temperature, reduction)
    options = temperature, reduction, *wanted, _contrastive.allows_tf32()
    loss: Tensor = operator(query.contiguous(), key.contiguous(), *options)[0]
    return loss


if _native.module is not None:

    @torch.library.register_fake("fedkernels::info_nce")
    def _(
        query: Tensor,
        key: Tensor,
        temperature: float,
        reduction: str,
        query_gradient: bool,
        key_gradient: bool,
        tf32: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = query.shape[:1] if reduction == "none" else ()
        return query.new_empty(rows, dtype=compute_dtype(query, key)), *_gradients(
            query, key, *_formed(reduction, query_gradient, key_gradient)
        )

    @torch.library.register_fake("fedkernels::info_nce_gradients")
    def _(
        query: Tensor,
        key: Tensor,
        temperature: float,
        weights: Tensor,
        query_gradient: bool,
        key_gradient: bool,
        tf32: bool,
    ) -> tuple[Tensor, Tensor]:
        return _gradients(query, key, query_gradient, key_gradient)

    def _gradients(query: Tensor, key: Tensor, query_gradient: bool, key_gradient: bool) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(query, key)
        return (
            query.new_empty(query.shape if query_gradient else 0, dtype=dtype),
            key.new_empty(key.shape if key_gradient else 0, dtype=dtype),
        )

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
        query, key, ctx.temperature, ctx.reduction, *wanted, ctx.tf32 = inputs
        ctx.formed = _formed(ctx.reduction, *wanted)
        ctx.rows, ctx.dtypes = query.shape[0], (query.dtype, key.dtype)
        ctx.save_for_backward(*(output[1:] if any(ctx.formed) else (query, key)))

    def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("info_nce", *of_gradients)
        if grad is None:
            return (None,) * 7
        wanted = ctx.needs_input_grad[:2]
        if ctx.reduction == "mean":
            grad = grad / ctx.rows
        if any(ctx.formed):
            factor = grad[:, None] if ctx.reduction == "none" else grad
            of_query, of_key = (
                _contrastive.scaled(gradient, factor, dtype) if need else None
                for gradient, need, dtype in zip(ctx.saved_tensors, wanted, ctx.dtypes, strict=True)
            )
        else:
            weights = grad.expand(ctx.rows).double().contiguous()
            operator = torch.ops.fedkernels.info_nce_gradients
            gradients = operator(*ctx.saved_tensors, ctx.temperature, weights, *wanted, ctx.tf32)
            of_query, of_key = (
                gradient.to(dtype) if need else None
                for gradient, need, dtype in zip(gradients, wanted, ctx.dtypes, strict=True)
            )
        return of_query, of_key, None, None, None, None, None

    def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        refuse_second_derivative("info_nce", *grads)
        return (None,) * 7

    torch.library.register_autograd("fedkernels::info_nce", _backward, setup_context=_setup_context)
    torch.library.register_autograd("fedkernels::info_nce_gradients", _refuse_second_derivative)
