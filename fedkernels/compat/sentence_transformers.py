"""sentence-transformers' MultipleNegativesRankingLoss with its symmetric and cached forms."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from fedkernels import distributed
from fedkernels.clip_loss import clip_loss
from fedkernels.compat.only_default import only_default
from fedkernels.info_nce import info_nce

__all__ = [
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
]

Features = dict[str, Any]
_ONE_DIRECTION = ("query_to_doc",)
_BOTH_DIRECTIONS = ("query_to_doc", "doc_to_query")


class MultipleNegativesRankingLoss(nn.Module):
    """sentence-transformers' ``MultipleNegativesRankingLoss`` of columns (anchor, positive, negative, ...).

    Supported are the default direction, and both directions with ``partition_mode="per_direction"``; ``cos_sim`` and
    ``dot_score``, given by name or as the original's functions; ``gather_across_devices``. Joint normalisation of
    several directions and hardness weights are not. ``method="ring"`` keeps the memory of a rank at O(B d), see
    ``fedkernels.distributed``.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = "cos_sim",
        gather_across_devices: bool = False,
        directions: Sequence[str] = _ONE_DIRECTION,
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__()
        original = f"sentence_transformers.losses.{type(self).__name__}"
        only_default(original, hardness_mode=(hardness_mode, None))
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")
        similarity = similarity_fct if isinstance(similarity_fct, str) else getattr(similarity_fct, "__name__", "")
        if similarity not in ("cos_sim", "dot_score"):
            raise ValueError(f"similarity_fct must be cos_sim or dot_score, got {similarity_fct!r}: use {original}")
        both = set(directions) == set(_BOTH_DIRECTIONS) and partition_mode == "per_direction"
        if tuple(directions) != _ONE_DIRECTION and not both:
            raise ValueError(
                f"directions must be {_ONE_DIRECTION}, or {_BOTH_DIRECTIONS} with partition_mode='per_direction', got "
                f"{tuple(directions)} with {partition_mode!r}: use {original}"
            )
        self.model = model
        self.scale = scale
        self.similarity = similarity
        self.gather_across_devices = gather_across_devices
        self.both_directions = both
        self.method = method

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of the embeddings of two or more columns of features; labels are not used."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of [B, d] anchors, positives and perhaps negatives."""
        if len(embeddings) < 2:
            raise ValueError(f"embeddings must hold anchors and positives at least, got {len(embeddings)} columns")
        if self.similarity == "cos_sim":
            embeddings = [F.normalize(column, dim=1) for column in embeddings]
        queries, positives, *_ = embeddings
        documents = torch.cat(embeddings[1:]) if len(embeddings) > 2 else positives
        temperature = 1 / self.scale
        if self.gather_across_devices and torch.distributed.is_initialized():
            loss = distributed.info_nce(queries, documents, temperature, method=self.method)
            if self.both_directions:
                loss = (loss + distributed.info_nce(positives, queries, temperature, method=self.method)) / 2
            return loss
        if not self.both_directions:
            return info_nce(queries, documents, temperature)
        if documents is positives:
            return clip_loss(queries, positives, self.scale)
        return (info_nce(queries, documents, temperature) + info_nce(positives, queries, temperature)) / 2


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """sentence-transformers' ``MultipleNegativesSymmetricRankingLoss``: both directions, averaged."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = "cos_sim",
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
    runs once more with the same random numbers, so dropout is the same in both runs. The gradient in the embeddings is
    formed in the forward pass. Packing by tokens is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = "cos_sim",
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
            f"sentence_transformers.losses.{type(self).__name__}",
            mini_batch_num_tokens=(mini_batch_num_tokens, None),
            show_progress_bar=(show_progress_bar, False),
        )
        if mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        self.mini_batch_size = mini_batch_size

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of the embeddings of two or more columns of features; labels are not used."""
        batches = [_mini_batches(features, self.mini_batch_size) for features in sentence_features]
        if not torch.is_grad_enabled():
            columns = [torch.cat([self.model(one)["sentence_embedding"] for one in column]) for column in batches]
            return self.compute_loss_from_embeddings(columns, labels)
        states: list[list[_RandomState]] = []
        embeddings: list[Tensor] = []
        with torch.no_grad():
            for column in batches:
                states.append([])
                parts = []
                for one in column:
                    states[-1].append(_RandomState(one))
                    parts.append(self.model(one)["sentence_embedding"])
                embeddings.append(torch.cat(parts))
        leaves = [column.requires_grad_() for column in embeddings]
        loss = self.compute_loss_from_embeddings(leaves, labels)
        gradients = torch.autograd.grad(loss, leaves)

        def second_pass(grad: Tensor) -> None:
            for column, column_states, gradient in zip(batches, states, gradients, strict=True):
                parts = gradient.split(self.mini_batch_size)
                for one, state, part in zip(column, column_states, parts, strict=True):
                    with torch.enable_grad(), state.restored():
                        output = self.model(one)["sentence_embedding"]
                    torch.autograd.backward(output, part * grad)

        loss = loss.detach().requires_grad_()
        loss.register_hook(second_pass)
        return loss


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """sentence-transformers' ``CachedMultipleNegativesSymmetricRankingLoss``: both directions, averaged."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[..., Tensor] = "cos_sim",
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


def _mini_batches(features: Features, size: int) -> list[Features]:
    """The rows of all tensors in parts of at most `size`; other values are the same in each part."""
    rows = next(len(value) for value in features.values() if isinstance(value, Tensor))
    return [
        {
            name: value[start : start + size] if isinstance(value, Tensor) and len(value) == rows else value
            for name, value in features.items()
        }
        for start in range(0, rows, size)
    ]


class _RandomState:
    """The states of the random number generators that a model with these features uses."""

    def __init__(self, features: Features) -> None:
        self.cpu = torch.get_rng_state()
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        self.devices, self.states = get_device_states(*tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the generators have these states; after it they are as before."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield
