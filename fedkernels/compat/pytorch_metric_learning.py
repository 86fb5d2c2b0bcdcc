"""pytorch-metric-learning's NTXentLoss and SupConLoss with their default distance and reducer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels.compat.only_default import only_default
from fedkernels.internal import checks
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from fedkernels.supervised_contrastive_loss import supervised_contrastive_loss

__all__ = ["NTXentLoss", "SupConLoss"]


class _LabelledLoss(nn.Module):
    """What both losses share: cosine similarities of all rows, and labels that say which pairs are positive."""

    def __init__(self, temperature: float, options: dict[str, object]) -> None:
        super().__init__()
        original = f"pytorch_metric_learning.losses.{type(self).__name__}"
        only_default(original, **{name: (value, None) for name, value in options.items()})
        self.temperature = checks.positive("temperature", temperature)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: object = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of embeddings [B, d] with labels [B]; 0 without any positive or any negative pair."""
        original = f"pytorch_metric_learning.losses.{type(self).__name__}"
        given = {"indices_tuple": indices_tuple, "ref_emb": ref_emb, "ref_labels": ref_labels}
        only_default(original, **{name: (value, None) for name, value in given.items()})
        if labels is None:
            raise ValueError("labels must be a tensor with one label for each row of embeddings, got None")
        labels = labels.to(embeddings.device, torch.int64)
        of_class = labels.unique(return_counts=True)[1]
        if len(of_class) < 2 or of_class.max() < 2:
            return embeddings.sum() * 0
        return self.loss_of_rows(F.normalize(embeddings, dim=1), labels)

    def loss_of_rows(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss of rows of norm 1."""
        raise NotImplementedError


class NTXentLoss(_LabelledLoss):
    """pytorch-metric-learning's ``NTXentLoss``: each positive pair against the anchor's negatives.

    ``loss_ap = log(e^{s_ap} + sum_n e^{s_an}) - s_ap``, the mean over all positive pairs (a, p). Other positives of the
    anchor are left out of the sum. The original forms a matrix of all positive by all negative pairs; here each
    anchor's log-sum-exp over its negatives is formed once. Distances, reducers, regularizers, miners and reference
    embeddings are not supported.
    """

    def __init__(self, temperature: float = 0.07, **kwargs: object) -> None:
        super().__init__(temperature, kwargs)

    def loss_of_rows(self, rows: Tensor, labels: Tensor) -> Tensor:
        scaled = rows / self.temperature
        of_negatives, _, _ = similarity_logsumexp(scaled, rows, labels=(labels, labels))
        positive = labels[:, None] == labels[None, :]
        anchors, positives = positive.fill_diagonal_(False).nonzero(as_tuple=True)
        similarities = (scaled[anchors] * rows[positives]).sum(dim=1)
        return F.softplus(of_negatives[anchors] - similarities).mean().to(rows.dtype)


class SupConLoss(_LabelledLoss):
    """pytorch-metric-learning's ``SupConLoss``: the mean over the rows whose loss is positive, as its reducer does.

    Distances, reducers, regularizers, miners and reference embeddings are not supported.
    """

    def __init__(self, temperature: float = 0.1, **kwargs: object) -> None:
        super().__init__(temperature, kwargs)

    def loss_of_rows(self, rows: Tensor, labels: Tensor) -> Tensor:
        losses = supervised_contrastive_loss(rows, labels, self.temperature, "none")
        counted = losses > 0
        return (losses * counted).sum() / counted.sum().clamp(min=1)
