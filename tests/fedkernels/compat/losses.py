"""The drop-in losses beside their definitions in plain torch, in one process and on several."""

import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fedkernels import definitions

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Loss(NamedTuple):
    original: str  # the module of the original
    make: Callable[[ModuleType], Callable[..., Tensor]]  # the loss by the classes of a module, its own or the drop-in's
    definition: Callable[..., Tensor]
    given: Callable[[int], list[Tensor]]  # what both take, of so many rows
    rows: int = 9
    one_graph: bool = True  # torch.compile takes it as a whole


def drop_in(loss: Loss) -> ModuleType:
    return importlib.import_module(f"fedkernels.compat.{loss.original.partition('.')[0]}")


def original(loss: Loss) -> ModuleType:
    return pytest.importorskip(loss.original, reason=f"{loss.original.partition('.')[0]} is not installed")


def is_drop_in(losses: ModuleType) -> bool:
    return losses.__name__.startswith("fedkernels")


def of_ours(losses: ModuleType, **options: Any) -> dict[str, Any]:
    """The options, which only the drop-in has."""
    return options if is_drop_in(losses) else {}


def value_and_gradients(function: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() if isinstance(part, Tensor) else part for part in given]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, [leaf for leaf in leaves if isinstance(leaf, Tensor)])]


def columns(count: int, width: int = 5) -> Callable[[int], list[Tensor]]:
    def given(rows: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(rows, width, generator=generator) for _ in range(count)]

    return given


def pairs(rows: int) -> list[Tensor]:
    """Of norm 1, with a scale."""
    return [*(F.normalize(part, dim=1) for part in columns(2, 7)(rows)), torch.tensor(9.0)]


def pairs_with_bias(rows: int) -> list[Tensor]:
    return [*pairs(rows), torch.tensor(-4.0)]


def clip(image: Tensor, text: Tensor, scale: Any, bias: Any = None) -> Tensor:
    loss = definitions.clip_loss(image, text, scale).mean()
    return loss if bias is None else loss + 0.0 * bias


def siglip(image: Tensor, text: Tensor, scale: Any, bias: Any) -> Tensor:
    return definitions.sigmoid_loss(image, text, scale, 0.0 if bias is None else bias).mean()


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    return definitions.nt_xent(F.normalize(first, dim=1), F.normalize(second, dim=1), 0.3).mean()


def of_pairs(logits: Tensor, positive: Tensor, negative: Tensor, all_positives: bool) -> Tensor:
    """SupConLoss with `all_positives` in each denominator, NTXentLoss with that of the pair alone."""
    if not positive.any() or not negative.any():
        return 0 * logits.sum()
    terms = []
    for a, p in positive.nonzero():
        counted = positive[a] | negative[a] if all_positives else negative[a].index_fill(0, p, True)
        terms.append((logits[a, counted].logsumexp(0) - logits[a, p]) / (positive[a].sum() if all_positives else 1))
    return sum(terms) / (positive.any(1).sum() if all_positives else len(terms))


def ranking(scale: float = 20.0, both: bool = False, cosine: bool = True) -> Callable[..., Tensor]:
    def loss(*embeddings: Tensor) -> Tensor:
        if cosine:
            embeddings = tuple(F.normalize(column, dim=1) for column in embeddings)
        anchors, positives = embeddings[:2]
        forward = definitions.info_nce(anchors, torch.cat(embeddings[1:]), 1 / scale)
        return ((forward + definitions.info_nce(positives, anchors, 1 / scale)) / 2 if both else forward).mean()

    return loss


LABELS = {
    "two views": [0, 1, 2, 0, 1, 2],
    "odd": [0, 0, 0, 1, 2, 1, 3],
    "no negatives": [5, 5, 5, 5],
    "no positives": [0, 1, 2, 3],
    "large classes": [2, 2, -7, 9, 2, 2, 9],
}
SENTENCES = "sentence_transformers.sentence_transformer.losses"
BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


def of_class(name: str, *arguments: Any) -> Callable[[ModuleType], Callable[..., Tensor]]:
    return lambda losses: getattr(losses, name)(*arguments)


def labelled(name: str, labels: list[int]) -> Loss:
    classes = torch.tensor(labels)

    def make(losses: ModuleType) -> Callable[[Tensor], Tensor]:
        return lambda x: getattr(losses, name)(0.2)(x, classes)

    def definition(x: Tensor) -> Tensor:
        x, equal = F.normalize(x, dim=1), classes[:, None] == classes
        return of_pairs(x @ x.T / 0.2, equal.clone().fill_diagonal_(False), ~equal, name == "SupConLoss")

    # The numbers of rows of each class are counted in Python.
    return Loss("pytorch_metric_learning.losses", make, definition, columns(1), rows=len(labels), one_graph=False)


def of_embeddings(name: str = "MultipleNegativesRankingLoss", **options: Any) -> Callable[[ModuleType], Any]:
    def make(losses: ModuleType) -> Callable[..., Tensor]:
        given = dict(options)
        if "similarity_fct" in given and not is_drop_in(losses):
            given["similarity_fct"] = importlib.import_module("sentence_transformers.util").dot_score
        loss = getattr(losses, name)(nn.Sequential(nn.Identity()), **given)
        return lambda *embeddings: loss.compute_loss_from_embeddings(list(embeddings), None)

    return make


LOSSES = {
    "ClipLoss": Loss("open_clip.loss", of_class("ClipLoss"), clip, pairs),
    "ClipLoss, bias": Loss("open_clip.loss", of_class("ClipLoss"), clip, pairs_with_bias),
    "SigLipLoss": Loss("open_clip.loss", of_class("SigLipLoss"), siglip, pairs_with_bias),
    "NTXentLoss of lightly": Loss("lightly.loss", of_class("NTXentLoss", 0.3), nt_xent, columns(2)),
    **{
        f"{name}, {kind}": labelled(name, labels)
        for name, (kind, labels) in itertools.product(("NTXentLoss", "SupConLoss"), LABELS.items())
    },
    **{
        f"ranking, {count} columns{more}": Loss(SENTENCES, of_embeddings(**options), ranking(**given), columns(count))
        for count in (2, 4)
        for more, options, given in (
            ("", {}, {}),
            (", both directions", BOTH, {"both": True}),
            (", dot products", {"similarity_fct": "dot_score", "scale": 1.5}, {"scale": 1.5, "cosine": False}),
        )
    },
    "symmetric ranking": Loss(
        SENTENCES, of_embeddings("MultipleNegativesSymmetricRankingLoss"), ranking(both=True), columns(2)
    ),
}


def clip_on_ranks(local_loss: bool, gather_with_grad: bool, method: str) -> Callable[[ModuleType], Any]:
    def make(losses: ModuleType) -> Callable[..., Tensor]:
        options = local_loss, gather_with_grad, True, dist.get_rank(), dist.get_world_size()
        return losses.ClipLoss(*options, **of_ours(losses, method=method))

    return make


def siglip_on_ranks(implementation: str | None) -> Callable[[ModuleType], Any]:
    return lambda losses: losses.SigLipLoss(False, dist.get_rank(), dist.get_world_size(), implementation)


def lightly_on_ranks(method: str) -> Callable[[ModuleType], Any]:
    return lambda losses: losses.NTXentLoss(0.3, gather_distributed=True, **of_ours(losses, method=method))


def ranking_on_ranks(options: dict[str, Any]) -> Callable[[ModuleType], Any]:
    return lambda losses: of_embeddings(gather_across_devices=True, **options, **of_ours(losses, method="ring"))(losses)


METHODS = "gather", "ring"


def with_scale(scale: Any, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda image, text: loss(image, text, scale)


# Their mean over the ranks is the loss of the whole batch, and so are the gradients.
ON_RANKS = {
    **{
        f"ClipLoss, scale {scale!r}": Loss(
            "open_clip.loss",
            lambda losses, scale=scale: with_scale(scale, clip_on_ranks(False, True, "ring")(losses)),
            with_scale(scale, clip),
            lambda rows: pairs(rows)[:2],
        )
        for scale in (9.0, np.float32(9), torch.tensor([9.0]))
    },
    **{
        f"ClipLoss, {local=}, {method}": Loss("open_clip.loss", clip_on_ranks(local, True, method), clip, pairs)
        for local, method in itertools.product((False, True), METHODS)
    },
    **{
        f"SigLipLoss, {kind}": Loss("open_clip.loss", siglip_on_ranks(kind), siglip, pairs_with_bias)
        for kind in (None, "bidir", "shift", "reduce", "gather")
    },
    **{
        f"NTXentLoss, {method}": Loss("lightly.loss", lightly_on_ranks(method), nt_xent, columns(2))
        for method in METHODS
    },
    "ranking": Loss(SENTENCES, ranking_on_ranks({}), ranking(), columns(3)),
    "ranking, both directions": Loss(SENTENCES, ranking_on_ranks(BOTH), ranking(both=True), columns(3)),
}
# Their gradients are not, as the originals'.
WITHOUT_GATHERED_GRADIENTS = {
    f"ClipLoss, {local=}, {method}, no gradients gathered": Loss(
        "open_clip.loss", clip_on_ranks(local, False, method), clip, pairs
    )
    for local, method in itertools.product((False, True), METHODS)
}


def on_rank(name: str, of_original: bool) -> list[Tensor]:
    """The loss of this rank's 5 rows and its gradients."""
    loss, rank, size = (ON_RANKS | WITHOUT_GATHERED_GRADIENTS)[name], dist.get_rank(), dist.get_world_size()
    module = importlib.import_module(loss.original) if of_original else drop_in(loss)
    given = [part.chunk(size)[rank] if part.ndim else part for part in loss.given(5 * size)]
    return value_and_gradients(loss.make(module), *given)
