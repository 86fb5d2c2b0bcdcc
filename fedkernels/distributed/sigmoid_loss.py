"""SigLIP's loss over the pairs of all ranks."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._operator import distributed_loss
from fedkernels.distributed._ranks import Method
from fedkernels.internal import checks
from fedkernels.internal.contrastive import scalar


def sigmoid_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    method: Method = "gather",
    group: ProcessGroup | None = None,
) -> Tensor:
    """SigLIP's loss of this rank's B images against the texts of all ranks; image i's positive is this rank's text i.

    ``loss_i = -sum_j log sigmoid(z_ij (s x_i . y_j + b))``, j over the texts of all ranks, with z_ij = 1 for the
    positive and -1 for all other pairs

    Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", Algorithm 1 and Section 3.3. Values and
    gradients are those of ``fedkernels.sigmoid_loss`` on the ranks' concatenated batches: see
    ``fedkernels.distributed`` for gradients, memory and what all ranks have to do alike.

    Args:
        image: [B, d], float16, bfloat16, float32 or float64, any strides. B may differ from rank to rank.
        text: [B, d]; image and text each have one dtype on all ranks.
        logit_scale: s: a positive, finite number, or a floating tensor with one element, which gets a gradient.
        logit_bias: b: a finite number, or a floating tensor with one element, which gets a gradient.
        reduction: "none" for the B losses of this rank's images, "sum" for their sum. "mean" is that sum divided by the
            mean number of pairs of a rank, so that the mean over the ranks is the loss of all pairs. Where all ranks
            have B pairs it is this rank's mean.
        method: "gather" or "ring", the same on all ranks.
        group: the process group; None is the default group.

    Returns:
        A scalar, or [B] for "none"; float64 where an input is float64, else float32, as in
        ``fedkernels.distributed.info_nce``.

    Raises:
        TypeError: an input is not a floating tensor, or logit_scale or logit_bias neither a number nor a tensor.
        ValueError: unequal shapes or devices, a logit_scale, logit_bias, reduction or method out of range; on all ranks
            if their d, dtypes, methods or need of gradients differ, or if a rank has no pairs.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    checks.paired_rows((1,), image=image, text=text)
    logit_scale = checks.positive_number_or_tensor("logit_scale", logit_scale, image.device)
    logit_bias = checks.number_or_tensor("logit_bias", logit_bias, image.device)
    numbers = torch.stack([scalar(one, image) for one in (logit_scale, logit_bias)])
    return distributed_loss(image, text, numbers, "sigmoid_loss", reduction, method, group)
