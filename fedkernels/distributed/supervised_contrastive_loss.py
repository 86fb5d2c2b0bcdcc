"""SupCon over the rows of all ranks."""

from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._operator import distributed_loss
from fedkernels.distributed._ranks import Method
from fedkernels.internal import checks
from fedkernels.internal.contrastive import scalar


def supervised_contrastive_loss(
    features: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    method: Method = "gather",
    group: ProcessGroup | None = None,
) -> Tensor:
    """SupCon of this rank's B rows; the positives P(i) of a row are all other rows of its label, on all ranks.

    ``loss_i = logsumexp_{a != i}(z_i . z_a / temperature) - mean_{p in P(i)}(z_i . z_p / temperature)``, a over the
    rows of all ranks

    A row without a positive has the loss 0. Source: Khosla et al. 2020, "Supervised Contrastive Learning", Eq. 2.
    Values and gradients are those of ``fedkernels.supervised_contrastive_loss`` on the ranks' concatenated batches: see
    ``fedkernels.distributed`` for gradients, memory and what all ranks have to do alike. Every rank gets all labels.

    Args:
        features: [B, d], float16, bfloat16, float32 or float64, any strides. B may differ from rank to rank.
        labels: [B], int64, with the same meaning on all ranks.
        temperature: a positive, finite number, or a floating tensor with one element, which gets a gradient.
        reduction: "none" for the B losses of this rank, "sum" for their sum. "mean" is that sum divided by the mean
            number of a rank's rows that have a positive, so that the mean over the ranks is the mean over all of these.
        method: "gather" or "ring", the same on all ranks.
        group: the process group; None is the default group.

    Returns:
        A scalar, or [B] for "none"; float64 where features is float64, else float32, as in
        ``fedkernels.distributed.info_nce``.

    Raises:
        TypeError: features is not a floating tensor, labels not an int64 tensor, or temperature neither a number nor a
            tensor.
        ValueError: labels of another shape or device, a temperature, reduction or method out of range; on all ranks if
            their d, dtypes, methods or need of gradients differ, or if a rank has no rows.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    checks.floating("features", features, ndim=2, layout="[B, d]")
    checks.not_empty("features", features, (1,), "d")
    checks.integers("labels", labels, (features.shape[0],), "[B]")
    checks.same_device(features=features, labels=labels)
    temperature = scalar(checks.positive_number_or_tensor("temperature", temperature, features.device), features)
    options = "supervised_contrastive_loss", reduction, method, group, labels
    return distributed_loss(features, features, 1 / temperature, *options)
