"""sentence-transformers' MultipleNegativesRankingLoss with its symmetric and cached forms."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels import distributed
from fedkernels.clip_loss import clip_loss
from fedkernels.compat._gradient_cache import cached_loss, exchanged_forward
from fedkernels.compat._mini_batches import Features, joined
from fedkernels.compat._similarity_functions import cos_sim, name_of
from fedkernels.compat.only_default import only_default
from fedkernels.info_nce import info_nce
from fedkernels.internal import checks
from fedkernels.internal.contrastive import rows_of

__all__ = [
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
]

_ONE_DIRECTION = ("query_to_doc",)
_BOTH_DIRECTIONS = ("query_to_doc", "doc_to_query")


class MultipleNegativesRankingLoss(nn.Module):
    """sentence-transformers' ``MultipleNegativesRankingLoss`` of columns (anchor, positive, negative, ...).

    Supported are the default direction, and both directions with ``partition_mode="per_direction"``; ``cos_sim`` and
    ``dot_score``, given by name or as the original's functions; ``gather_across_devices``. Joint normalisation of
    several directions and hardness weights are not. As in sentence-transformers 6, the columns after the first share a
    forward pass where they can. ``method="ring"`` keeps the memory of a rank at O(B d), see
    ``fedkernels.distributed``. All arguments are attributes, which may be set later, as the original's.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = cos_sim,
        gather_across_devices: bool = False,
        directions: Sequence[str] = _ONE_DIRECTION,
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__()
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.method = method
        self._checked()

    def _checked(self) -> tuple[str, bool]:
        """The similarity's name, and whether both directions count.

        Raises:
            ValueError: one of the attributes has a value that only the original supports.
        """
        original = f"sentence_transformers.losses.{type(self).__name__}"
        only_default(original, hardness_mode=(self.hardness_mode, None))
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")
        checks.one_of("partition_mode", self.partition_mode, ("joint", "per_direction"))
        both = set(self.directions) == set(_BOTH_DIRECTIONS) and self.partition_mode == "per_direction"
        if tuple(self.directions) != _ONE_DIRECTION and not both:
            raise ValueError(
                f"directions must be {_ONE_DIRECTION}, or {_BOTH_DIRECTIONS} with partition_mode='per_direction', got "
                f"{self.directions} with {self.partition_mode!r}: use {original}"
            )
        return name_of(self.similarity_fct), both

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Computes the loss of the embeddings of two or more columns of features; labels are not used."""
        columns = list(sentence_features)
        _check_columns(columns)
        anchors, *documents = columns
        embeddings = [self.model(anchors)["sentence_embedding"]]
        whole = joined(documents) if len(documents) > 1 else None
        # AdaptiveLayerLoss finds the layers' outputs in the columns' own features.
        if whole is None or "TransformerDecorator" in exchanged_forward(self.model):
            embeddings += [self.model(features)["sentence_embedding"] for features in documents]
        else:
            embeddings += self.model(whole)["sentence_embedding"].chunk(len(documents))
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Computes the loss of [B, d] anchors, positives and perhaps negatives; labels are not used."""
        similarity, both = self._checked()
        _check_columns(embeddings)
        if similarity == "cos_sim":
            embeddings = [F.normalize(column, dim=1) for column in embeddings]
        queries, positives, *_ = embeddings
        documents = rows_of(*embeddings[1:]) if len(embeddings) > 2 else positives
        temperature = 1 / self.scale
        if self.gather_across_devices and dist.is_available() and dist.is_initialized():
            loss = distributed.info_nce(queries, documents, temperature, method=self.method)
            if both:
                loss = (loss + distributed.info_nce(positives, queries, temperature, method=self.method)) / 2
            return loss
        if not both:
            return info_nce(queries, documents, temperature)
        if documents is positives:
            return clip_loss(queries, positives, self.scale)
        return (info_nce(queries, documents, temperature) + info_nce(positives, queries, temperature)) / 2

    @property
    def temperature(self) -> float:
        """1 / scale."""
        return 1 / self.scale

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the options that the Trainer writes into a model card, as the original's."""
        return {
            "scale": self.scale,
            "similarity_fct": name_of(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
        }

    @property
    def citation(self) -> str:
        """The paper in BibTeX, for the model card."""
        return _JINA if tuple(self.directions) != _ONE_DIRECTION else _CPC


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """sentence-transformers' ``MultipleNegativesSymmetricRankingLoss``: both directions, averaged."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = cos_sim,
        gather_across_devices: bool = False,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__(
            model, scale, similarity_fct, gather_across_devices, _BOTH_DIRECTIONS, "per_direction", method=method
        )


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """sentence-transformers' ``CachedMultipleNegativesRankingLoss``: the model sees `mini_batch_size` rows at a time.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache). The
    embeddings are computed without a graph, then the loss and its gradient in them, and in the backward pass the model
    runs once more with the same random numbers, so dropout is the same in both runs. In between, memory is O(B d).
    Call ``backward()``: ``torch.autograd.grad`` gives no gradient of the model's weights. Inside of
    DistributedDataParallel the ranks exchange gradients once. ``mini_batch_num_tokens`` fills a mini-batch up to so
    many tokens instead. ``MatryoshkaLoss`` of sentence-transformers 6 takes it; wrappers that change the model for the
    forward pass alone are refused there.
    """

    uses_gradient_cache = True  # MatryoshkaLoss reads it and exchanges calculate_loss, not the model's forward pass

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = _ONE_DIRECTION,
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__(
            *(model, scale, similarity_fct, gather_across_devices, directions, partition_mode, hardness_mode),
            hardness_strength,
            method=method,
        )
        only_default(
            f"sentence_transformers.losses.{type(self).__name__}", show_progress_bar=(show_progress_bar, False)
        )
        for name, value in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if value is not None and checks.integer(name, value) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Computes the loss of the embeddings of two or more columns of features; labels are not used."""
        columns = list(sentence_features)
        _check_columns(columns)
        return cached_loss(self.model, columns, self.mini_batch_size, self.mini_batch_num_tokens, self.calculate_loss)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Computes the loss of lists of mini-batches' embeddings, one list for each column; labels are not used.

        With `with_backward` the embeddings get their gradients, and the loss returned has no graph.
        """
        loss = self.compute_loss_from_embeddings([rows_of(*column) for column in reps], labels)
        if not with_backward:
            return loss
        loss.backward()
        return loss.detach()

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the options that the Trainer writes into a model card, as the original's."""
        own = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return super().get_config_dict() | own

    @property
    def citation(self) -> str:
        """The paper in BibTeX, for the model card."""
        return _GRAD_CACHE


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """sentence-transformers' ``CachedMultipleNegativesSymmetricRankingLoss``: both directions, averaged."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__(
            *(model, scale, similarity_fct, mini_batch_size, mini_batch_num_tokens, gather_across_devices),
            *(_BOTH_DIRECTIONS, "per_direction", show_progress_bar),
            method=method,
        )


def _check_columns(columns: Sequence[object]) -> None:
    if len(columns) < 2:
        raise ValueError(f"sentence_features must hold anchors and positives at least, got {len(columns)} columns")


_CPC = """
@article{oord2018cpc,
  title = {Representation Learning with Contrastive Predictive Coding},
  author = {van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol},
  year = {2018},
  journal = {arXiv:1807.03748},
}
"""
_JINA = """
@article{gunther2023jina2,
  title = {Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents},
  author = {Günther, Michael and others},
  year = {2023},
  journal = {arXiv:2310.19923},
}
"""
_GRAD_CACHE = """
@article{gao2021gradcache,
  title = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
  author = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},
  year = {2021},
  journal = {arXiv:2101.06983},
}
"""
