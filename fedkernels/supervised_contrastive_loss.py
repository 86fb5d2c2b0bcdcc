"""The supervised contrastive loss: all rows of a label are each other's positives."""

import torch
from torch import Tensor

from fedkernels.internal import checks, contrastive_one_tile
from fedkernels.internal.contrastive import operator, scaled_rows
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from fedkernels.nt_xent import nt_xent
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference._sizes import holds
from fedkernels.reference.supervised_contrastive_loss import supervised_contrastive_loss as _reference


def supervised_contrastive_loss(
    features: Tensor, labels: Tensor, temperature: float | Tensor, reduction: checks.Reduction = "mean"
) -> Tensor:
    """SupCon, the contrastive loss with all other rows of a row's label as its positives P(i).

    ``loss_i = logsumexp_{a != i}(z_i . z_a / temperature) - mean_{p in P(i)}(z_i . z_p / temperature)``

    A row without a positive has the loss 0. The rows are used as given: normalise them first
    (``torch.nn.functional.normalize``), as the paper does. Source: Khosla et al. 2020, "Supervised Contrastive
    Learning", Eq. 2 (L_out); several views of an image are rows with the same label.

    The mean over the positives is the product with the sum of their rows, so only the log-sum-exp looks at all pairs.
    For an even B on the CPU it is that of `nt_xent`, else, and for a dynamic B in torch.export, that of CLIP's loss;
    neither holds the B x B logits. They take 2.5 and 4 products of B x B x d. torch.func's transforms and forward mode
    take the reference in plain PyTorch, which holds the logits.

    Args:
        features: [B, d], float16, bfloat16, float32 or float64, any strides.
        labels: [B], int64.
        temperature: a positive, finite Python number, or a tensor of one entry, which gets its gradient.
        reduction: "mean" over the rows that have a positive (0 if none has), "sum", or "none".

    Returns:
        A scalar, or [B] for "none"; float64 where features is float64, else float32. Products and sums have that
        precision too, under autocast as well. The gradient comes back in the dtype of features. NaN in gives NaN out.

    Raises:
        TypeError: features is not a floating tensor, labels not an int64 tensor, or temperature neither a number nor a
            floating tensor.
        ValueError: B = 0, d = 0, labels of another shape or device, a temperature of several entries, a temperature or
            reduction out of range.
    """
    checks.floating("features", features, ndim=2, layout="[B, d]")
    checks.not_empty("features", features, (0, 1), "B or d")
    checks.integers("labels", labels, (features.shape[0],), "[B]")
    checks.same_device(features=features, labels=labels)
    temperature = checks.positive_number_or_tensor("temperature", temperature, features.device)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    rows, half = features.shape[0], features.shape[0] // 2
    in_halves = not features.is_cuda and holds(rows % 2 == 0)
    name = "nt_xent" if in_halves else "similarity_logsumexp"
    if rows == 1 or operator(name, features, features, temperature) is None:
        return _reference(features, labels, temperature, reduction)
    few = rows**2 <= contrastive_one_tile.MOST_WITH_CLASSES
    if few and contrastive_one_tile.serves(features, features, reduction, rows**2):
        loss = contrastive_one_tile.Loss("supervised_contrastive_loss", symmetric=True, divides=True)
        loss = loss._replace(divisor=0.0 if reduction == "mean" else 1.0)
        return contrastive_one_tile.value(loss, features, None, temperature, classes=labels)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(features, temperature))  # before it is inverted
    # Both sides of the products are divided by the square root.
    z = scaled_rows(features, temperature**-0.5, compute_dtype(features))
    positives, count = _sums_of_positives(z.double(), labels)  # a long row would cancel its label's others in float32
    of_positives = positives.to(z.dtype) / count.clamp(min=1)[:, None]
    if in_halves:
        # nt_xent takes the logit with row i + B / 2 away: what remains is what that row is nearer than the positives.
        losses = nt_xent(z[:half], z[half:], 1.0, "none") + (z * (z.roll(half, 0) - of_positives)).sum(dim=1)
    else:
        numbers = torch.arange(rows, device=z.device)
        # 16-bit rows are multiplied as they are on CUDA; their gradient, of a query and a key, is then rounded twice
        multiplied, scale = (features, 1 / temperature) if features.is_cuda else (z, 1.0)
        of_others = similarity_logsumexp(multiplied, multiplied, scale, labels=(numbers, numbers))[0].to(z.dtype)
        losses = of_others - (z * of_positives).sum(dim=1)
    losses = losses.masked_fill(count == 0, 0)
    if reduction == "mean":
        return losses.sum() / (count > 0).sum().clamp(min=1)
    return losses.sum() if reduction == "sum" else losses


def _sums_of_positives(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the other rows of each row's label [B, d], and how many they are [B]."""
    ordered, order = labels.sort()
    changes = torch.cat([labels.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])
    classes = torch.empty_like(labels).scatter(0, order, changes)  # numbers of the labels, from 0 to at most B - 1
    sums = torch.zeros_like(z).index_put((classes,), z, accumulate=True)  # on CUDA it sorts, index_add keeps no order
    counts = torch.zeros_like(labels).index_add(0, classes, torch.ones_like(labels))
    return sums[classes] - z, counts[classes] - 1
