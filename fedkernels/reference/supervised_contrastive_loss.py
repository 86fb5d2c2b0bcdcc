"""The supervised contrastive loss in plain PyTorch (Khosla et al. 2020, Eq. 2: L_out)."""

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference.similarity_logsumexp import similarities


def supervised_contrastive_loss(
    features: Tensor, labels: Tensor, temperature: Tensor | float, reduction: str = "mean"
) -> Tensor:
    """loss_i = logsumexp_{a != i}(z_i . z_a / t) - mean_{p != i of i's label}(z_i . z_p / t), features [B, d].

    A row without a positive has the loss 0 and does not count in the mean.
    """
    rows = features.to(compute_dtype(features))  # once, so that the gradient is rounded to the dtype of features once
    logits = similarities(rows, rows)
    with no_autocast(features):
        itself = torch.eye(features.shape[0], dtype=torch.bool, device=features.device)
        positive = (labels[:, None] == labels[None, :]) & ~itself
        # The lowest number, not -inf, so that a lone row's gradient is 0 and not NaN.
        log_p = (logits / temperature).masked_fill(itself, torch.finfo(logits.dtype).min).log_softmax(dim=1)
        count = positive.sum(dim=1)
        losses = -log_p.masked_fill(~positive, 0).sum(dim=1) / count.clamp(min=1)
        if reduction == "mean":
            return losses.sum() / (count > 0).sum().clamp(min=1)
        return losses.sum() if reduction == "sum" else losses
