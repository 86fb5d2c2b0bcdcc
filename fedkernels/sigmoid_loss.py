"""The sigmoid loss of SigLIP: every pair of an image and a text is a classification of its own."""

from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks, contrastive, contrastive_one_tile, native
from fedkernels.internal.autograd import keep_missing_as_none, needs_gradient, refuse_second_derivative
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference.sigmoid_loss import sigmoid_loss as _reference


def sigmoid_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """SigLIP's loss of B images against B texts; image i's positive is text i.

    ``loss_i = -sum_j log sigmoid(z_ij (s x_i . y_j + b))`` with z_ij = 1 for i = j and -1 for all other pairs

    The rows are used as given: normalise them first (``torch.nn.functional.normalize``), as SigLIP does. Source: Zhai
    et al. 2023, "Sigmoid Loss for Language Image Pre-Training", Algorithm 1.

    One pass over the B x B logits gives the loss and its gradients, and the logits are not held. For "none", under
    torch.func's transforms and in forward mode the reference in plain PyTorch serves, which holds them.

    Args:
        image: [B, d], float16, bfloat16, float32 or float64, any strides.
        text: [B, d].
        logit_scale: s: a positive, finite Python number, or a tensor of one entry, which gets its gradient. SigLIP
            learns the logarithm and gives ``log_scale.exp()``.
        logit_bias: b: a finite Python number, or a tensor of one entry, which gets its gradient.
        reduction: "mean" or "sum" over the B images, or "none".

    Returns:
        A scalar, or [B] for "none"; float64 where image or text is float64, else float32. Products and sums have that
        precision too, under autocast as well. Gradients come back in each input's dtype. NaN in gives NaN out.

    Raises:
        TypeError: image or text is not a floating tensor, or logit_scale or logit_bias neither a number nor a floating
            tensor.
        ValueError: B = 0, d = 0, unequal shapes or devices, a logit_scale or logit_bias of several entries, one of them
            or reduction out of range.
    """
    checks.paired_rows(image=image, text=text)
    logit_scale = checks.positive_number_or_tensor("logit_scale", logit_scale, image.device)
    logit_bias = checks.number_or_tensor("logit_bias", logit_bias, image.device)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    numbers, dtype, operator = (logit_scale, logit_bias), compute_dtype(image, text), None
    if reduction != "none":
        operator = contrastive.operator("sigmoid_loss", image, text, *numbers)
    if operator is not None and contrastive_one_tile.serves(image, text, reduction, image.shape[0] ** 2):
        divisor = len(image) if reduction == "mean" else 1.0
        loss = contrastive_one_tile.Loss("sigmoid_loss", divisor=divisor)
        return contrastive_one_tile.value(loss, image, text, logit_scale, logit_bias)
    if operator is not None and image.is_cuda:  # there 16-bit rows stay what they are
        scale, bias = (contrastive.scalar(one, image) for one in numbers)
        wanted = any(map(needs_gradient, (image, scale, bias))), needs_gradient(text)
        operator = torch.ops.fedkernels.scaled_sigmoid_loss
        total: Tensor = operator(image.contiguous(), text.contiguous(), *wanted, scale, bias)[0]
    else:
        scaled, text = contrastive.with_bias(image, text, *numbers)
        if operator is None:
            return _reference(scaled, text, 1.0, 0.0, reduction)
        total = operator(scaled, text, needs_gradient(scaled), needs_gradient(text))[0]
    return (total / image.shape[0] if reduction == "mean" else total).to(dtype)


if native.module is not None:

    @torch.library.register_fake("fedkernels::scaled_sigmoid_loss")
    @torch.library.register_fake("fedkernels::sigmoid_loss")
    def _(query: Tensor, key: Tensor, query_gradient: bool, key_gradient: bool, *scales: Tensor) -> tuple[Tensor, ...]:
        dtype = compute_dtype(query, key)
        return (
            query.new_empty((), dtype=torch.float64),
            query.new_empty(query.shape if query_gradient else 0, dtype=dtype),
            key.new_empty(key.shape if key_gradient else 0, dtype=dtype),
            *(torch.empty_like(scale) for scale in scales),
        )

    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep_missing_as_none(ctx)
        query, key = inputs[:2]
        ctx.dtypes = query.dtype, key.dtype
        ctx.save_for_backward(*output[1:])

    def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("sigmoid_loss", *of_gradients)
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[:2]
        of_query, of_key, *of_scales = ctx.saved_tensors
        of_query, of_key = (
            contrastive.scaled(gradient, grad, dtype) if need else None
            for gradient, need, dtype in zip((of_query, of_key), wanted, ctx.dtypes, strict=True)
        )
        return of_query, of_key, None, None, *(one * grad for one in of_scales)

    for _name in ("sigmoid_loss", "scaled_sigmoid_loss"):
        torch.library.register_autograd(f"fedkernels::{_name}", _backward, setup_context=_setup_context)
