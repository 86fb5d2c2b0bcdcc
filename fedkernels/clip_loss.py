"""CLIP's loss: images against texts and texts against images."""

from typing import cast

import torch
from torch import Tensor

from fedkernels.internal import checks, contrastive, contrastive_one_tile
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference._reduce import reduce
from fedkernels.reference.clip_loss import clip_loss as _reference


def clip_loss(image: Tensor, text: Tensor, logit_scale: float | Tensor, reduction: checks.Reduction = "mean") -> Tensor:
    """CLIP's loss of B pairs: the mean of InfoNCE of the images against the texts and of the texts against the images.

    ``loss_i = (logsumexp_j(s x_i . y_j) + logsumexp_j(s x_j . y_i)) / 2 - s x_i . y_i``

    The rows are used as given: normalise them first (``torch.nn.functional.normalize``), as CLIP does. Source: Radford
    et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", Figure 3.

    Both directions come from one pass over the B x B logits, which are not held; the backward pass forms them once
    more. Under torch.func's transforms and in forward mode the reference holds them.

    Args:
        image: [B, d], float16, bfloat16, float32 or float64, any strides.
        text: [B, d].
        logit_scale: s, 1 / temperature: a positive, finite Python number, or a tensor of one entry, which gets its
            gradient. CLIP learns the logarithm and gives ``log_scale.exp()``.
        reduction: "mean" or "sum" over the B pairs, or "none".

    Returns:
        A scalar, or [B] for "none"; float64 where image or text is float64, else float32. Products and sums have that
        precision too, under autocast as well. Gradients come back in each input's dtype. NaN in gives NaN out.

    Raises:
        TypeError: image or text is not a floating tensor, or logit_scale neither a number nor a floating tensor.
        ValueError: B = 0, d = 0, unequal shapes or devices, a logit_scale of several entries, a logit_scale or
            reduction out of range.
    """
    checks.paired_rows(image=image, text=text)
    logit_scale = checks.positive_number_or_tensor("logit_scale", logit_scale, image.device)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    dtype = compute_dtype(image, text)
    if contrastive.operator("similarity_logsumexp", image, text, logit_scale) is None:
        return _reference(contrastive.scaled_rows(image, logit_scale, dtype), text, 1.0, reduction)
    if contrastive_one_tile.serves(image, text, reduction, image.shape[0] ** 2):
        divisor = len(image) if reduction == "mean" else 1.0
        loss = contrastive_one_tile.Loss("clip_loss", of_rows=0.5, of_columns=0.5, divisor=divisor)
        return contrastive_one_tile.value(loss, image, text, logit_scale)
    numbers = torch.arange(image.shape[0], device=image.device)
    sums = similarity_logsumexp(image, text, logit_scale, positives=numbers, columns=True)
    of_images, of_texts, of_pairs = cast(tuple[Tensor, Tensor, Tensor], sums)
    return (reduce(of_images - of_pairs, reduction) / 2 + reduce(of_texts - of_pairs, reduction) / 2).to(dtype)
