"""The drop-ins' gradients by finite differences, and torch.compile, where no original is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkernels.compat import lightly, open_clip, pytorch_metric_learning, sentence_transformers, torchjd

LABELS = torch.arange(5) % 2


def of_embeddings(name: str) -> Callable[..., Tensor]:
    """The loss with a model that returns the features as they are given."""
    loss = getattr(sentence_transformers, name)(nn.Identity(), scale=2.0)
    return lambda *columns: loss([{"sentence_embedding": column} for column in columns])


def cached_gradient(*columns: Tensor) -> list[Tensor]:
    """The cached form computes its gradients itself, in parts of two rows."""
    name = "CachedMultipleNegativesRankingLoss"
    loss = getattr(sentence_transformers, name)(nn.Identity(), scale=2.0, mini_batch_size=2)
    leaves = [column.detach().requires_grad_() for column in columns]
    loss([{"sentence_embedding": leaf} for leaf in leaves]).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


# name of the drop-in: a loss of 5 x 3 rows, and how many matrices of them it takes
LOSSES: dict[str, tuple[Callable[..., Any], int]] = {
    "open_clip.ClipLoss": (lambda x, y: open_clip.ClipLoss()(x, y, 2.0), 2),
    "open_clip.SigLipLoss": (lambda x, y: open_clip.SigLipLoss()(x, y, 2.0, -1.0), 2),
    "lightly.NTXentLoss": (lightly.NTXentLoss(), 2),
    "pytorch_metric_learning.NTXentLoss": (lambda x: pytorch_metric_learning.NTXentLoss(0.5)(x, LABELS), 1),
    "pytorch_metric_learning.SupConLoss": (lambda x: pytorch_metric_learning.SupConLoss(0.5)(x, LABELS), 1),
    "sentence_transformers.MultipleNegativesRankingLoss": (of_embeddings("MultipleNegativesRankingLoss"), 3),
    "sentence_transformers.MultipleNegativesSymmetricRankingLoss": (
        of_embeddings("MultipleNegativesSymmetricRankingLoss"),
        2,
    ),
}
BY_COUNTS = [name for name in LOSSES if name.startswith("pytorch_metric_learning")]  # of the classes, in Python


def matrices(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name):
    loss, count = LOSSES[name]
    assert torch.autograd.gradcheck(loss, matrices(count))


def test_the_cached_forms_gradient_is_that_of_the_plain_one():
    columns = matrices(3)
    plain = of_embeddings("MultipleNegativesRankingLoss")(*columns)
    torch.testing.assert_close(cached_gradient(*columns), list(torch.autograd.grad(plain, columns)))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in BY_COUNTS])
def test_compiles_without_a_graph_break(name):
    loss, count = LOSSES[name]
    leaves = matrices(count)
    torch.compiler.reset()
    compiled, truth = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), loss(*leaves)
    torch.testing.assert_close(compiled, truth)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(truth, leaves))


@pytest.mark.parametrize("name", BY_COUNTS)
def test_compiled_in_several_graphs_it_gives_the_same(name):
    loss, count = LOSSES[name]
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager")(*matrices(count)), loss(*matrices(count)))


@pytest.mark.parametrize("make", [torchjd.MGDA, torchjd.MGDAWeighting])
def test_mgda_compiles_without_a_graph_break(make):
    (jacobian,) = matrices(1)
    given = jacobian if make is torchjd.MGDA else jacobian @ jacobian.T
    torch.compiler.reset()
    compiled = torch.compile(make(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), make()(given))
