"""Each drop-in gives its original's values and gradients; where it does not, the test shows which one is right."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels.compat import lightly, open_clip, pot, pytorch_metric_learning, sentence_transformers, torchjd
from tests.fedkernels.distributed.conftest import ranks  # noqa: F401  (a fixture)
from tests.fedkernels.distributed.ranks import Ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def value_and_gradients(function: Any, *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def same(ours: Any, original: Any, *tensors: Tensor) -> None:
    torch.testing.assert_close(value_and_gradients(ours, *tensors), value_and_gradients(original, *tensors), **CLOSE)


def pairs(size: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    image, text = (F.normalize(rows(size, 7, seed=seed), dim=1) for seed in (0, 1))
    return image, text, torch.tensor(9.0)


# open_clip


def test_open_clip_in_one_process():
    originals = pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    same(open_clip.ClipLoss(), originals.ClipLoss(), *pairs())
    bias = torch.tensor(-3.0)
    same(open_clip.ClipLoss(), originals.ClipLoss(), *pairs(), bias)
    ours = open_clip.ClipLoss()(*pairs(), output_dict=True)
    torch.testing.assert_close(ours, originals.ClipLoss()(*pairs(), output_dict=True), **CLOSE)


def clip_on_ranks(local_loss: bool, gather_with_grad: bool, method: str) -> list[Any]:
    from open_clip.loss import ClipLoss

    rank, size = dist.get_rank(), dist.get_world_size()
    options = (local_loss, gather_with_grad, True, rank, size)
    image, text, scale = pairs(5 * size)
    given = image.chunk(size)[rank], text.chunk(size)[rank], scale
    return [
        value_and_gradients(loss, *given) for loss in (open_clip.ClipLoss(*options, method=method), ClipLoss(*options))
    ]


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize(("local_loss", "gather_with_grad"), [*itertools.product([False, True], repeat=2)])
def test_open_clip_on_several_ranks(ranks: Ranks, local_loss, gather_with_grad, method):  # noqa: F811
    pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    for ours, original in ranks(clip_on_ranks, local_loss, gather_with_grad, method):
        torch.testing.assert_close(ours, original, **CLOSE)


@pytest.mark.parametrize("local_loss", [False, True])
def test_open_clip_with_gathered_gradients_is_one_process(ranks: Ranks, local_loss):  # noqa: F811
    pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    results = [ours for ours, _ in ranks(clip_on_ranks, local_loss, True, "ring")]
    value, image, text, scale = value_and_gradients(open_clip.ClipLoss(), *pairs(5 * len(results)))
    values, images, texts, scales = zip(*results, strict=True)
    torch.testing.assert_close(torch.stack(values).mean(), value, **CLOSE)
    torch.testing.assert_close(torch.cat(images) / len(results), image, **CLOSE)
    torch.testing.assert_close(torch.cat(texts) / len(results), text, **CLOSE)
    torch.testing.assert_close(torch.stack(scales).mean(), scale, **CLOSE)


def test_open_clip_without_gathered_gradients_divides_them(ranks: Ranks):  # noqa: F811
    """local_loss=False, gather_with_grad=False: averaged over the ranks, 1 / world_size of one process's gradients."""
    pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    originals = [original for _, original in ranks(clip_on_ranks, False, False, "gather")]
    _, image, _, scale = value_and_gradients(open_clip.ClipLoss(), *pairs(5 * len(originals)))
    _, images, _, scales = zip(*originals, strict=True)
    torch.testing.assert_close(torch.cat(images) / len(originals), image / len(originals), **CLOSE)
    torch.testing.assert_close(torch.stack(scales).mean(), scale, **CLOSE)


def test_open_clip_refuses_other_ranks():
    with pytest.raises(ValueError, match=r"rank and world_size must be those of torch.distributed's default group"):
        open_clip.ClipLoss(world_size=3)(*pairs())
    with pytest.raises(ValueError, match=r"use_horovod must be False.*use open_clip.ClipLoss"):
        open_clip.ClipLoss(use_horovod=True)


# lightly


def test_lightly_in_one_process():
    originals = pytest.importorskip("lightly.loss", reason="lightly is not installed")
    same(lightly.NTXentLoss(0.3), originals.NTXentLoss(0.3), rows(6, 5), rows(6, 5, seed=1))
    with pytest.raises(ValueError, match=r"memory_bank_size must be 0.*use lightly.loss.NTXentLoss"):
        lightly.NTXentLoss(memory_bank_size=10)


def nt_xent_on_ranks(method: str) -> list[Any]:
    from lightly.loss import NTXentLoss

    given = [rows(5, 6, seed=2 * dist.get_rank() + view) for view in range(2)]
    return [
        value_and_gradients(loss, *given)
        for loss in (
            lightly.NTXentLoss(0.3, gather_distributed=True, method=method),
            NTXentLoss(0.3, gather_distributed=True),
        )
    ]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_lightly_on_several_ranks(ranks: Ranks, method):  # noqa: F811
    pytest.importorskip("lightly.loss", reason="lightly is not installed")
    for ours, original in ranks(nt_xent_on_ranks, method):
        torch.testing.assert_close(ours, original, **CLOSE)


# pytorch-metric-learning


@pytest.mark.parametrize("loss", ["NTXentLoss", "SupConLoss"])
@pytest.mark.parametrize(
    "labels",
    [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 1, 3], [5, 5, 5, 5], [0, 1, 2, 3], [2, 2, -7, 9, 2, 2, 9]],
    ids=["two views", "odd", "no negatives", "no positives", "large classes"],
)
def test_pytorch_metric_learning(loss, labels):
    originals = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    target = torch.tensor(labels)
    ours, original = getattr(pytorch_metric_learning, loss)(0.2), getattr(originals, loss)(0.2)
    same(lambda x: ours(x, target), lambda x: original(x, target), rows(len(labels), 5))


# sentence-transformers


class Tower(nn.Module):
    """A model of features {"input": [B, 4]} with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.layers(features["input"])}


DIRECTIONS = {
    "one direction": {},
    "both directions": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "dot products": {"similarity_fct": "dot_score", "scale": 1.5},
}


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("options", DIRECTIONS.values(), ids=DIRECTIONS)
def test_sentence_transformers(options, columns):
    originals = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses", reason="sentence-transformers is not installed"
    )
    util = pytest.importorskip("sentence_transformers.util")
    given = dict(options)
    if "similarity_fct" in given:
        given["similarity_fct"] = getattr(util, given["similarity_fct"])
    ours = sentence_transformers.MultipleNegativesRankingLoss(Tower(), **given)
    original = originals.MultipleNegativesRankingLoss(Tower(), **given)
    embeddings = [rows(6, 5, seed=seed) for seed in range(columns)]
    same(
        lambda *x: ours.compute_loss_from_embeddings(list(x), None),
        lambda *x: original.compute_loss_from_embeddings(list(x), None),
        *embeddings,
    )


def parameter_gradients(loss: nn.Module, features: list[dict[str, Tensor]]) -> list[Tensor]:
    value = loss(features, None)
    (2 * value).backward()
    return [value.detach(), *(parameter.grad for parameter in loss.model.parameters())]


@pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss"])
def test_sentence_transformers_cached(name):
    originals = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses", reason="sentence-transformers is not installed"
    )
    features = [{"input": rows(7, 4, seed=seed), "name": "x"} for seed in range(2)]
    cached = getattr(sentence_transformers, f"Cached{name}")(Tower(), mini_batch_size=3)
    whole = getattr(sentence_transformers, name)(Tower())
    torch.testing.assert_close(parameter_gradients(cached, features), parameter_gradients(whole, features), **CLOSE)
    original = getattr(originals, name)(Tower())
    embeddings = [original.model(column)["sentence_embedding"] for column in features]
    value = original.compute_loss_from_embeddings(embeddings, None)
    (2 * value).backward()
    gradients = [value.detach(), *(parameter.grad for parameter in original.model.parameters())]
    cached.zero_grad()
    torch.testing.assert_close(parameter_gradients(cached, features), gradients, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(cached(features), value.detach(), **CLOSE)


def test_the_cached_form_repeats_its_dropout():
    features = [{"input": rows(4, 4, seed=seed)} for seed in range(2)]
    gradients = []
    for name in ("CachedMultipleNegativesRankingLoss", "MultipleNegativesRankingLoss"):
        loss = getattr(sentence_transformers, name)(Tower(dropout=0.5))
        torch.manual_seed(1)
        gradients.append(parameter_gradients(loss, features))
    torch.testing.assert_close(*gradients, **CLOSE)  # one mini-batch for a column: both draw the same numbers


def multiple_negatives_on_ranks(both: bool) -> list[Any]:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    options = DIRECTIONS["both directions" if both else "one direction"] | {"gather_across_devices": True}
    embeddings = [rows(4, 5, seed=3 * dist.get_rank() + column) for column in range(3)]
    return [
        value_and_gradients(lambda *x, loss=loss: loss.compute_loss_from_embeddings(list(x), None), *embeddings)
        for loss in (
            sentence_transformers.MultipleNegativesRankingLoss(Tower(), **options, method="ring"),
            MultipleNegativesRankingLoss(Tower(), **options),
        )
    ]


@pytest.mark.parametrize("both", [False, True])
def test_sentence_transformers_on_several_ranks(ranks: Ranks, both):  # noqa: F811
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    for ours, original in ranks(multiple_negatives_on_ranks, both):
        torch.testing.assert_close(ours, original, **CLOSE)


def test_sentence_transformers_refuses_what_only_the_original_has():
    with pytest.raises(ValueError, match="hardness_mode must be None"):
        sentence_transformers.MultipleNegativesRankingLoss(Tower(), hardness_mode="all_negatives")
    with pytest.raises(ValueError, match="directions must be"):
        sentence_transformers.MultipleNegativesRankingLoss(Tower(), directions=("query_to_doc", "query_to_query"))
    with pytest.raises(ValueError, match="similarity_fct must be cos_sim or dot_score"):
        sentence_transformers.MultipleNegativesRankingLoss(Tower(), similarity_fct=torch.dot)


# TorchJD


@pytest.mark.parametrize("clients", [2, 10])
def test_torchjd(clients):
    """The original's Frank-Wolfe stops above the optimum: with its defaults, and less so with many steps."""
    originals = pytest.importorskip("torchjd.aggregation", reason="torchjd is not installed")
    jacobian = rows(clients, 30).double() * torch.logspace(0, 1, clients)[:, None]
    gramian = jacobian @ jacobian.T
    squares = []
    for weights in (
        torchjd.MGDAWeighting()(gramian),
        originals.MGDAWeighting(epsilon=1e-12, max_iters=20_000)(gramian),
        originals.MGDAWeighting()(gramian),
    ):
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
        squares.append(float(weights @ gramian @ weights))
    ours, many_steps, defaults = squares
    assert ours <= many_steps * (1 + 1e-9)
    assert many_steps <= defaults * (1 + 1e-9)
    assert ours == pytest.approx(many_steps, rel=1e-3)
    torch.testing.assert_close(torchjd.MGDA()(jacobian), torchjd.MGDAWeighting()(gramian) @ jacobian)
    excess = (jacobian @ torchjd.MGDA()(jacobian)).min() - ours  # the optimum: all inner products are at least ours
    assert float(excess) >= -1e-7 * ours


# POT


@pytest.mark.parametrize("prices", [2.0, [3.0, 1.0]])
def test_pot(prices):
    originals = pytest.importorskip("ot.unbalanced", reason="POT is not installed")
    generator = np.random.default_rng(0)
    a, b, costs = generator.uniform(0.5, 1.5, 6), generator.uniform(0.5, 1.5, 8), generator.uniform(0, 1, (6, 8))
    ours, facts = pot.mm_unbalanced(a, b, costs, prices, div="l2", log=True)
    plan, log = originals.mm_unbalanced(a, b, costs, prices, div="l2", numItermax=200_000, log=True)
    assert isinstance(ours, np.ndarray)
    assert facts["total_cost"] == pytest.approx(float(log["total_cost"]), rel=1e-5)
    np.testing.assert_allclose(ours.sum(1), plan.sum(1), atol=1e-4)
    # With the default of 1000 steps the original stops above the optimum.
    _, stopped = originals.mm_unbalanced(a, b, costs, prices, div="l2", log=True)
    assert facts["total_cost"] <= float(stopped["total_cost"])
    assert facts["gap"] <= 1e-10


def test_pot_gives_the_gradient_of_the_total_cost():
    costs = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plan, facts = pot.mm_unbalanced([], [], costs, 5.0, div="l2", log=True)
    (gradient,) = torch.autograd.grad(facts["total_cost"], costs)
    torch.testing.assert_close(gradient, plan)


def test_pot_refuses_what_only_the_original_has():
    with pytest.raises(NotImplementedError, match="div='kl' is not solved here"):
        pot.mm_unbalanced([], [], [[1.0]], 1.0)
    with pytest.raises(NotImplementedError, match="leave reg = 0"):
        pot.mm_unbalanced([], [], [[1.0]], 1.0, div="l2", reg=0.1)
