"""NT-Xent: SimCLR's contrastive loss."""

from typing import Any

import torch
from torch import Tensor

from fedkernels.info_nce import by_similarities
from fedkernels.internal import checks, contrastive, contrastive_one_tile, native
from fedkernels.internal.autograd import (
    keep_missing_as_none,
    needs_gradient,
    refuse_second_derivative,
    register_no_derivative,
)
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference.nt_xent import nt_xent as _reference


def nt_xent(view1: Tensor, view2: Tensor, temperature: float | Tensor, reduction: checks.Reduction = "mean") -> Tensor:
    """SimCLR's loss over the 2B rows ``z = [view1; view2]``; the positive of a row is its other view.

    ``loss_i = logsumexp_{j != i}(z_i . z_j / temperature) - z_i . z_p(i) / temperature``

    A row's similarity to itself is left out (as -inf, not as 0). The rows are used as given: normalise them first
    (``torch.nn.functional.normalize``) if the similarity is to be the cosine, as SimCLR does. Source: Chen et al.
    2020, "A Simple Framework for Contrastive Learning of Visual Representations", Eq. 1.

    Args:
        view1: [B, d], float16, bfloat16, float32 or float64, any strides.
        view2: [B, d].
        temperature: a positive, finite Python number, or a tensor of one entry, which gets its gradient; the rows are
            then divided by its square root in float32 or wider.
        reduction: "mean" or "sum" over the 2B rows, or "none".

    Returns:
        A scalar, or [2B] for "none" (view1's rows, then view2's); float64 where an input is float64, else float32.
        Products and sums have that precision too, under autocast as well. Gradients come back in each input's dtype.
        NaN in gives NaN out. With B = 1 the positive is the only other row and the loss is 0. float32 may be multiplied
        in tf32 on CUDA, as in ``info_nce``.

    Raises:
        TypeError: an input is not a floating tensor, or temperature neither a number nor a floating tensor.
        ValueError: B = 0, d = 0, unequal shapes or devices, a temperature of several entries, a temperature or
            reduction out of range.
    """
    checks.paired_rows(view1=view1, view2=view2)
    temperature = checks.positive_number_or_tensor("temperature", temperature, view1.device)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    operator = contrastive.operator("nt_xent", view1, view2, temperature)
    if operator is not None and contrastive_one_tile.serves(view1, view2, reduction, 4 * view1.shape[0] ** 2):
        half, divisor = len(view1), 2.0 * len(view1) if reduction == "mean" else 1.0
        loss = contrastive_one_tile.Loss("nt_xent", symmetric=True, shift=half, divides=True, divisor=divisor)
        return contrastive_one_tile.value(loss, contrastive.rows_of(view1, view2), None, temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(view1, view2, temperature))  # before it is inverted
        if contrastive.stays_narrow(view1, view2):
            rows = contrastive.rows_of(view1, view2)
            numbers = torch.arange(len(rows), device=rows.device)
            positives, itself = numbers.roll(len(view1)), (numbers, numbers)
            return by_similarities(rows, rows, 1 / temperature, reduction, positives, itself)
        scale, dtype = temperature.rsqrt(), compute_dtype(view1, view2)
        view1, view2 = (contrastive.scaled_rows(view, scale, dtype) for view in (view1, view2))
        temperature = 1.0
    wanted = needs_gradient(view1) or needs_gradient(view2)
    if operator is None:
        return _reference(view1, view2, temperature, reduction)
    result: Tensor = operator(view1.contiguous(), view2.contiguous(), temperature, reduction, wanted)[0]
    return result


if native.module is not None:

    @torch.library.register_fake("fedkernels::nt_xent")
    def _(view1: Tensor, view2: Tensor, temperature: float, reduction: str, gradient: bool) -> tuple[Tensor, Tensor]:
        dtype, rows = compute_dtype(view1, view2), 2 * view1.shape[0]
        formed = gradient and reduction != "none"
        return (
            view1.new_empty((rows,) if reduction == "none" else (), dtype=dtype),
            view1.new_empty((rows, view1.shape[1]) if formed else 0, dtype=dtype),
        )

    @torch.library.register_fake("fedkernels::nt_xent_gradients")
    def _(view1: Tensor, view2: Tensor, temperature: float, weights: Tensor) -> Tensor:
        return view1.new_empty((2 * view1.shape[0], view1.shape[1]), dtype=compute_dtype(view1, view2))

    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        keep_missing_as_none(ctx)
        view1, view2, ctx.temperature, ctx.reduction, gradient = inputs
        ctx.formed = gradient and ctx.reduction != "none"
        ctx.rows, ctx.dtypes = 2 * view1.shape[0], (view1.dtype, view2.dtype)
        ctx.save_for_backward(*([output[1]] if ctx.formed else [view1, view2]))

    def _backward(ctx: Any, grad: Tensor | None, of_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("nt_xent", of_gradient)
        if grad is None:
            return (None,) * 5
        if ctx.reduction == "mean":
            grad = grad / ctx.rows
        if ctx.formed:
            gradient, factor = ctx.saved_tensors[0], grad
        else:
            weights = grad.expand(ctx.rows).double().contiguous()
            operator = torch.ops.fedkernels.nt_xent_gradients
            gradient, factor = operator(*ctx.saved_tensors, ctx.temperature, weights), 1
        # Each view's product is its own, so that what takes them can free one before it comes to the other.
        of_views = (
            contrastive.scaled(part, factor, dtype) if need else None
            for part, need, dtype in zip(gradient.chunk(2), ctx.needs_input_grad, ctx.dtypes, strict=False)
        )
        return *of_views, None, None, None

    torch.library.register_autograd("fedkernels::nt_xent", _backward, setup_context=_setup_context)
    register_no_derivative("nt_xent_gradients", "nt_xent")
