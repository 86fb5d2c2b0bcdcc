"""SigLipLoss on one process and on several, and scales and biases of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fedkernels.compat import open_clip
from tests.fedkernels.distributed.conftest import ranks  # noqa: F401  (a fixture)
from tests.fedkernels.distributed.ranks import Ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
IMPLEMENTATIONS = [None, "bidir", "shift", "reduce", "gather"]


def pairs(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [F.normalize(torch.randn(size, 7, generator=generator), dim=1) for _ in range(2)]
    return [*rows, torch.tensor(9.0), torch.tensor(-4.0)]


def value_and_gradients(loss: Callable[..., Any], *given: Any) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() if isinstance(part, Tensor) else part for part in given]
    value = loss(*leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [value.detach(), *torch.autograd.grad(value, tensors)]


def clip(image: Tensor, text: Tensor, scale: Any, bias: Any) -> Tensor:
    """The definition, with all logits."""
    logits, numbers = scale * image @ text.T + (0.0 if bias is None else bias), torch.arange(len(image))
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def siglip(image: Tensor, text: Tensor, scale: Any, bias: Any) -> Tensor:
    logits = scale * image @ text.T + (0.0 if bias is None else bias)
    return -F.logsigmoid((2 * torch.eye(len(image)) - 1) * logits).sum() / len(image)


@pytest.mark.parametrize(
    ("scale", "bias"),
    [
        *((9.0, bias) for bias in (None, -4.0, -4, np.float32(-4), torch.tensor(-4.0), torch.tensor([-4.0]))),
        *((scale, -4.0) for scale in (9, np.float32(9), np.float64(9), torch.tensor(9.0), torch.tensor([9.0]))),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("loss", "definition"), [(open_clip.ClipLoss, clip), (open_clip.SigLipLoss, siglip)])
def test_scale_and_bias_are_numbers_or_tensors(loss, definition, scale, bias):
    image, text, *_ = pairs(6)
    found = value_and_gradients(loss(cache_labels=True), image, text, scale, bias)
    expected = value_and_gradients(lambda *given: definition(*given).reshape(()), image, text, scale, bias)
    torch.testing.assert_close(found, expected, **CLOSE)
    as_dict = loss()(image, text, scale, bias, output_dict=True)
    torch.testing.assert_close(as_dict, {"contrastive_loss": found[0]})


def test_siglip_is_the_originals():
    originals = pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    found = [value_and_gradients(library.SigLipLoss(), *pairs(9)) for library in (open_clip, originals)]
    torch.testing.assert_close(*found, **CLOSE)


def siglip_on_ranks(implementation: str | None, original: bool) -> list[Tensor]:
    """The loss of this rank and its gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    image, text, scale, bias = pairs(5 * size)
    given = image.chunk(size)[rank], text.chunk(size)[rank], scale, bias
    if original:
        from open_clip.loss import SigLipLoss

        return value_and_gradients(SigLipLoss(False, rank, size, implementation), *given)
    return value_and_gradients(open_clip.SigLipLoss(False, rank, size, implementation), *given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_siglip_on_several_ranks_is_that_of_one_process(ranks: Ranks, implementation):  # noqa: F811
    results = ranks(siglip_on_ranks, implementation, False)
    value, image, text, *others = value_and_gradients(siglip, *pairs(5 * len(results)))
    values, images, texts, *of_others = zip(*results, strict=True)
    torch.testing.assert_close(torch.stack(values).mean(), value, **CLOSE)
    torch.testing.assert_close(torch.cat(images) / len(results), image, **CLOSE)
    torch.testing.assert_close(torch.cat(texts) / len(results), text, **CLOSE)
    torch.testing.assert_close([torch.stack(parts).mean() for parts in of_others], others, **CLOSE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_siglip_on_several_ranks_is_the_originals(ranks: Ranks, implementation):  # noqa: F811
    pytest.importorskip("open_clip.loss", reason="open_clip is not installed")
    found, expected = (ranks(siglip_on_ranks, implementation, original) for original in (False, True))
    torch.testing.assert_close(found, expected, **CLOSE)


def clip_on_ranks(local_loss: bool, gather_with_grad: bool) -> list[Tensor]:
    """The losses of one scale given as tensors and as numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    image, text, scale, bias = pairs(5 * size)
    loss = open_clip.ClipLoss(local_loss, gather_with_grad, True, rank, size)
    given = image.chunk(size)[rank].requires_grad_(), text.chunk(size)[rank]
    values = [loss(*given, kind, bias) for kind in (scale, scale[None], 9.0, np.float32(9))]
    torch.stack(values).sum().backward()
    return [value.detach() for value in values]


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("gather_with_grad", [False, True])
def test_clip_on_several_ranks_takes_numbers_too(ranks: Ranks, local_loss, gather_with_grad):  # noqa: F811
    for first, *others in ranks(clip_on_ranks, local_loss, gather_with_grad):
        torch.testing.assert_close(others, [first] * 3)


def test_siglip_refuses_other_ranks():
    with pytest.raises(ValueError, match=r"rank and world_size must be those of torch.distributed's default group"):
        open_clip.SigLipLoss(world_size=3)(*pairs(4))
