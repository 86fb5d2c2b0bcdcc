"""NT-Xent over the views of all ranks."""

from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._operator import distributed_loss
from fedkernels.distributed._ranks import Method
from fedkernels.internal import checks
from fedkernels.internal.contrastive import rows_of, scalar


def nt_xent(
    view1: Tensor,
    view2: Tensor,
    temperature: float | Tensor,
    reduction: checks.Reduction = "mean",
    *,
    method: Method = "gather",
    group: ProcessGroup | None = None,
) -> Tensor:
    """SimCLR's loss of this rank's 2B rows ``[view1; view2]`` against both views of all ranks.

    ``loss_i = logsumexp_{j != i}(z_i . z_j / temperature) - z_i . z_p(i) / temperature``, j over the rows of all ranks

    Values and gradients are those of ``fedkernels.nt_xent`` on the ranks' concatenated batches: see
    ``fedkernels.distributed`` for gradients, memory and what all ranks have to do alike.

    Args:
        view1: [B, d], float16, bfloat16, float32 or float64, any strides. B may differ from rank to rank.
        view2: [B, d].
        temperature: positive, finite Python number, or a floating tensor with one element, which gets a gradient.
        reduction: "none" for the 2B losses of this rank (view1's rows, then view2's), "sum" for their sum. "mean" is
            that sum divided by the mean number of rows of a rank, so that the mean over the ranks is the mean over all
            rows. Where all ranks have 2B rows it is this rank's mean.
        method: "gather" or "ring", the same on all ranks.
        group: the process group; None is the default group.

    Returns:
        A scalar, or [2B] for "none"; float64 where an input is float64, else float32, as in
        ``fedkernels.distributed.info_nce``.

    Raises:
        TypeError: an input is not a floating tensor, or temperature neither a number nor a tensor.
        ValueError: unequal shapes or devices, a temperature, reduction or method out of range; on all ranks if their d,
            dtypes, methods or need of gradients differ, or if a rank has no rows.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    checks.paired_rows((1,), view1=view1, view2=view2)
    temperature = scalar(checks.positive_number_or_tensor("temperature", temperature, view1.device), view1)
    rows = rows_of(view1, view2)
    return distributed_loss(rows, rows, 1 / temperature, "nt_xent", reduction, method, group)
