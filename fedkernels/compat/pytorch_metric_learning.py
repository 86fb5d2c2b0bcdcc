"""pytorch-metric-learning's NTXentLoss and SupConLoss with their default distance and reducer."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels.internal import checks
from fedkernels.internal.contrastive import scalar
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference.similarity_logsumexp import similarities
from fedkernels.supervised_contrastive_loss import supervised_contrastive_loss

__all__ = ["NTXentLoss", "SupConLoss"]


class _LabelledLoss(nn.Module):
    """What both losses share: cosine similarities of all rows, and which pairs are positive and negative."""

    default_reducer: tuple[str, dict[str, object]]

    def __init__(self, temperature: float | Tensor, options: dict[str, Any]) -> None:
        super().__init__()
        known = {"collect_stats", "distance", "embedding_reg_weight", "embedding_regularizer", "reducer"}
        if unknown := sorted(set(options) - known):
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {unknown[0]!r}")
        self.distance, self.reducer = options.get("distance"), options.get("reducer")
        self._only_default("distance", self.distance, "CosineSimilarity", {"p": 2, "power": 1})
        self._only_default("reducer", self.reducer, *self.default_reducer)
        self._only_default("embedding_regularizer", options.get("embedding_regularizer"), "", {})
        if isinstance(temperature, Tensor):
            checks.positive_number_or_tensor("temperature", temperature, temperature.device)
            self.temperature: Any = temperature
        else:
            self.temperature = checks.positive("temperature", temperature)
        self._record_these = ["temperature"]  # what the library's record keepers read

    def _only_default(self, argument: str, given: object, name: str, attributes: dict[str, object]) -> None:
        """Accepts None, and an object of the library that equals its default."""
        equal = type(given).__name__ == name and all(
            getattr(given, key, None) == value for key, value in attributes.items()
        )
        if given is not None and not equal:
            shown = ", ".join(f"{key}={value}" for key, value in attributes.items())
            wanted = f"None or {name}({shown})" if name else "None"
            raise ValueError(
                f"{argument} must be {wanted}, which alone is supported here, got {checks.short(given)}: use "
                f"pytorch_metric_learning.losses.{type(self).__name__} for others"
            )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss, a scalar in the dtype of embeddings; 0 without any positive or any negative pair.

        Args:
            embeddings: [B, d], floating. The norms of the rows do not matter.
            labels: [B], any dtype: rows of equal labels are positive pairs. May be None where `indices_tuple` is given.
            indices_tuple: pairs (anchors, positives, anchors, negatives) or triplets (anchors, positives, negatives),
                each [P], int64, as the library's miners return them. None for all pairs.
            ref_emb: [N, d], the other rows of the pairs; None for embeddings, where no row is a pair with itself.
            ref_labels: [N]; None or the very object `labels` for labels, row i then being no pair with ref_emb's row i.

        Raises:
            TypeError: embeddings or ref_emb is not a floating tensor, or labels no tensor.
            ValueError: a tensor of another shape or device than these, or neither labels nor indices_tuple.
        """
        rows = _normalised("embeddings", embeddings, "[B, d]")
        apart = ref_labels is not None and ref_labels is not labels
        labels = _labels("labels", labels, rows)
        if labels is None and indices_tuple is None:
            raise ValueError("labels must be a tensor with one label for each row of embeddings, got None")
        if indices_tuple is None and ref_emb is None and labels is not None and not labels.is_complex():
            classes, of_class = labels.unique(return_inverse=True, return_counts=True)[1:]
            if len(of_class) < 2 or of_class.max() < 2:
                return (embeddings * 0).sum()
            return self.loss_of_rows(rows, classes).to(embeddings.dtype)
        refs = rows
        if ref_emb is None:
            apart = False
        else:
            refs = _normalised("ref_emb", ref_emb, "[N, d]")
            checks.same_device(embeddings=embeddings, ref_emb=ref_emb)
            if refs.shape[1] != rows.shape[1]:
                raise ValueError(f"ref_emb must have {rows.shape[1]} columns as embeddings, got {refs.shape[1]}")
        if indices_tuple is not None:
            positive, negative = _counts(indices_tuple, rows, refs)
        else:
            ref_labels = _labels("ref_labels, by default labels,", ref_labels if apart else labels, refs)
            equal = labels[:, None] == ref_labels[None, :]  # type: ignore[index]
            negative = (~equal).to(rows.dtype)
            positive = (equal if apart else equal.fill_diagonal_(False)).to(rows.dtype)
        pairs = positive.sum(), negative.sum()
        if min(pairs) == 0 or max(pairs) <= 1:  # the original has 0 for one pair of each kind too
            return (embeddings * 0).sum()
        return self.loss_of_pairs(similarities(rows / self.temperature, refs), positive, negative).to(embeddings.dtype)

    def loss_of_rows(self, rows: Tensor, classes: Tensor) -> Tensor:
        """The loss of all pairs of rows of norm 1, whose classes [B] are int64."""
        raise NotImplementedError

    def loss_of_pairs(self, logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The loss of logits [B, N], of which each is a positive and a negative pair so many times."""
        raise NotImplementedError


class NTXentLoss(_LabelledLoss):
    """pytorch-metric-learning's ``NTXentLoss``: each positive pair against the anchor's negatives.

    ``loss_ap = log(e^{s_ap} + sum_n e^{s_an}) - s_ap``, the mean over all positive pairs (a, p). Other positives of the
    anchor are left out of the sum. The original forms a matrix of all positive by all negative pairs; here each
    anchor's log-sum-exp over its negatives is formed once. The original's loss of a pair ends at ``-log(tiny)``, 87.3
    in float32 and 9.7 in float16, where its gradient is 0; this one has no end. Other distances and reducers and
    regularizers are not supported.
    """

    default_reducer = ("MeanReducer", {})

    def __init__(self, temperature: float | Tensor = 0.07, **kwargs: object) -> None:
        super().__init__(temperature, kwargs)

    def loss_of_rows(self, rows: Tensor, classes: Tensor) -> Tensor:
        scaled, scale = rows / self.temperature, 1 / scalar(self.temperature, rows)
        of_negatives, _, _ = similarity_logsumexp(rows, rows, scale, labels=(classes, classes))
        positive = classes[:, None] == classes[None, :]
        anchors, positives = positive.fill_diagonal_(False).nonzero(as_tuple=True)
        similarities = (scaled[anchors] * rows[positives]).sum(dim=1)
        return _softplus(of_negatives[anchors] - similarities).mean()

    def loss_of_pairs(self, logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        of_negatives = _logsumexp(logits + negative.clamp(min=1).log(), negative > 0)
        return (_softplus(of_negatives[:, None] - logits) * positive).sum() / positive.sum()


class SupConLoss(_LabelledLoss):
    """pytorch-metric-learning's ``SupConLoss``: the mean over the rows whose loss is positive, as its reducer does.

    Other distances and reducers and regularizers are not supported.
    """

    default_reducer = ("AvgNonZeroReducer", {"low": 0, "high": None})

    def __init__(self, temperature: float | Tensor = 0.1, **kwargs: object) -> None:
        super().__init__(temperature, kwargs)

    def loss_of_rows(self, rows: Tensor, classes: Tensor) -> Tensor:
        return _mean_of_positive(supervised_contrastive_loss(rows, classes, self.temperature, "none"))

    def loss_of_pairs(self, logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        is_positive, is_negative = positive > 0, negative > 0
        if (is_positive & is_negative).any():
            raise ValueError("indices_tuple must have each pair as a positive or as a negative one, got one as both")
        losses = _logsumexp(logits, is_positive | is_negative)[:, None] - logits
        return _mean_of_positive((losses * is_positive).sum(dim=1) / is_positive.sum(dim=1).clamp(min=1))


def _normalised(argument: str, rows: Tensor, layout: str) -> Tensor:
    """The rows with norm 1, in float32 or wider, where the norm of a row of zeros can be told from 0."""
    checks.floating(argument, rows, ndim=2, layout=layout)
    checks.not_empty(argument, rows, (1,), "d")
    return F.normalize(rows.to(compute_dtype(rows)), dim=1)


def _labels(argument: str, labels: Tensor | None, rows: Tensor) -> Tensor | None:
    """The labels on the device of the rows, checked."""
    if labels is None:
        return None
    if not isinstance(labels, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(labels).__name__}")
    if labels.shape != rows.shape[:1]:
        raise ValueError(f"{argument} must have shape [{len(rows)}], one for each row, got {list(labels.shape)}")
    return labels.to(rows.device)


def _counts(indices_tuple: Sequence[Tensor], rows: Tensor, refs: Tensor) -> list[Tensor]:
    """How many times each pair [B, N] is among the positive ones and among the negative ones."""
    given = indices_tuple if isinstance(indices_tuple, (tuple, list)) else ()
    if len(given) not in (3, 4) or not all(isinstance(index, Tensor) for index in given):
        raise ValueError(f"indices_tuple must be three or four tensors, got {checks.short(indices_tuple)}")
    indices = [index.to(rows.device) for index in indices_tuple]
    if len(indices) == 3:
        indices.insert(2, indices[0])
    zeros = rows.new_zeros(len(rows), len(refs))
    one = rows.new_ones(())
    return [zeros.index_put(tuple(indices[start : start + 2]), one, accumulate=True) for start in (0, 2)]


def _logsumexp(logits: Tensor, kept: Tensor) -> Tensor:
    # The lowest number, not -inf, so that the gradient of a row without a pair is 0 and not NaN.
    return logits.masked_fill(~kept, torch.finfo(logits.dtype).min).logsumexp(dim=1)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40)  # beyond torch's default of 20 it leaves out 2e-9


def _mean_of_positive(losses: Tensor) -> Tensor:
    counted = losses > 0
    return (losses * counted).sum() / counted.sum().clamp(min=1)
