"""The contrastive losses of all rows by their definitions, with all logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

Scalar = float | Tensor


def info_nce(query: Tensor, key: Tensor, temperature: Scalar) -> Tensor:
    return F.cross_entropy(query @ key.T / temperature, torch.arange(len(query)), reduction="none")


def nt_xent(view1: Tensor, view2: Tensor, temperature: Scalar) -> Tensor:
    """The diagonal is deleted, not masked; the positive's column moves accordingly."""
    z, batch, rows = torch.cat([view1, view2]), len(view1), torch.arange(2 * len(view1))
    logits = (z @ z.T / temperature)[~torch.eye(2 * batch, dtype=torch.bool)].view(2 * batch, -1)
    return F.cross_entropy(logits, rows.roll(batch) - (rows < batch).long(), reduction="none")


def clip_loss(image: Tensor, text: Tensor, logit_scale: Scalar) -> Tensor:
    logits, numbers = logit_scale * image @ text.T, torch.arange(len(image))
    return (
        F.cross_entropy(logits, numbers, reduction="none") + F.cross_entropy(logits.T, numbers, reduction="none")
    ) / 2


def sigmoid_loss(image: Tensor, text: Tensor, logit_scale: Scalar, logit_bias: Scalar) -> Tensor:
    signs = 2 * torch.eye(len(image), dtype=image.dtype) - 1
    return -F.logsigmoid(signs * (logit_scale * image @ text.T + logit_bias)).sum(dim=1)


def positives_of(labels: Tensor) -> Tensor:
    return (labels[:, None] == labels).fill_diagonal_(False)


def supervised_contrastive_loss(features: Tensor, labels: Tensor, temperature: Scalar) -> Tensor:
    itself, positive = torch.eye(len(features), dtype=torch.bool), positives_of(labels)
    log_p = (features @ features.T / temperature).masked_fill(itself, -torch.inf).log_softmax(1)
    return -log_p.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
