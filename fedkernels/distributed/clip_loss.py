"""CLIP's loss over the pairs of all ranks."""

from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._operator import distributed_loss
from fedkernels.distributed._ranks import Method
from fedkernels.internal import checks
from fedkernels.internal.contrastive import scalar


def clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    method: Method = "gather",
    group: ProcessGroup | None = None,
) -> Tensor:
    """CLIP's loss of this rank's B pairs against the pairs of all ranks: the mean of two InfoNCE losses.

    ``loss_i = (logsumexp_j(s x_i . y_j) + logsumexp_j(s y_i . x_j)) / 2 - s x_i . y_i``, j over the pairs of all ranks,
    with images x, texts y and the scale s.

    Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", Figure 3.
    Values and gradients are those of one process on the ranks' concatenated batches, and those of open_clip's
    ``ClipLoss(local_loss=True, gather_with_grad=True)``: see ``fedkernels.distributed`` for gradients, memory and what
    all ranks have to do alike.

    Args:
        image: [B, d], float16, bfloat16, float32 or float64, any strides. B may differ from rank to rank.
        text: [B, d]; image and text each have one dtype on all ranks.
        logit_scale: what the products are multiplied by (CLIP's exp(t), 1 / temperature): a positive, finite Python
            number, or a floating tensor with one element, which gets a gradient.
        reduction: "none" for the B losses of this rank, "sum" for their sum. "mean" is that sum divided by the mean
            number of pairs of a rank, so that the mean over the ranks is the mean over all pairs. Where all ranks have
            B pairs it is this rank's mean.
        method: "gather" or "ring", the same on all ranks.
        group: the process group; None is the default group.

    Returns:
        A scalar, or [B] for "none"; float64 where an input is float64, else float32, as in
        ``fedkernels.distributed.info_nce``.

    Raises:
        TypeError: an input is not a floating tensor, or logit_scale neither a number nor a tensor.
        ValueError: unequal shapes or devices, a logit_scale, reduction or method out of range; on all ranks if their d,
            dtypes, methods or need of gradients differ, or if a rank has no pairs.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    checks.paired_rows((1,), image=image, text=text)
    scale = scalar(checks.positive_number_or_tensor("logit_scale", logit_scale, image.device), image)
    of_images = distributed_loss(image, text, scale, "info_nce", reduction, method, group)
    of_texts = distributed_loss(text, image, scale, "info_nce", reduction, method, group)
    return (of_images + of_texts) / 2
