"""Each drop-in gives its definition's values and gradients, and those of its original where that is installed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedkernels.compat import open_clip
from tests.fedkernels.compat.losses import (
    CLOSE,
    LOSSES,
    ON_RANKS,
    WITHOUT_GATHERED_GRADIENTS,
    clip,
    drop_in,
    on_rank,
    original,
    pairs,
    pairs_with_bias,
    siglip,
    value_and_gradients,
)
from tests.fedkernels.distributed.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated")


# The others are one of these with other numbers of columns or other labels, or a part of one.
COMPILED = {
    *("ClipLoss", "SigLipLoss", "NTXentLoss of lightly", "NTXentLoss, two views", "SupConLoss, two views"),
    *("ranking, 4 columns, both directions", "symmetric ranking"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_definitions(name):
    loss = LOSSES[name]
    given, ours = [part.double() for part in loss.given(loss.rows)], loss.make(drop_in(loss))
    truth = value_and_gradients(loss.definition, *given)
    torch.testing.assert_close(value_and_gradients(ours, *given), truth, rtol=1e-7, atol=1e-9)
    if name not in COMPILED:
        return
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=loss.one_graph, backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled, *given), truth, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_originals(name):
    loss = LOSSES[name]
    found = [value_and_gradients(loss.make(losses(loss)), *loss.given(loss.rows)) for losses in (drop_in, original)]
    torch.testing.assert_close(*found, **CLOSE)


def mean_over_ranks(results: list[list[Tensor]]) -> list[Tensor]:
    """The mean values, gradients of all rows and of scalars."""
    parts = (torch.stack(part) if part[0].ndim == 0 else part for part in zip(*results, strict=True))
    return [part.mean() if isinstance(part, Tensor) else torch.cat(part) / len(results) for part in parts]


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_several_ranks_it_is_the_loss_of_the_whole_batch(ranks: Ranks, name):
    results, loss = ranks(on_rank, name, False), ON_RANKS[name]
    truth = value_and_gradients(loss.definition, *loss.given(5 * len(results)))
    torch.testing.assert_close(mean_over_ranks(results), truth, **CLOSE)
    if "local=False" in name:  # each rank has the whole loss, and the scale's whole gradient
        torch.testing.assert_close([result[-1] for result in results], [truth[-1]] * len(results), **CLOSE)


@pytest.mark.parametrize("name", ON_RANKS | WITHOUT_GATHERED_GRADIENTS)
def test_on_several_ranks_it_is_the_original(ranks: Ranks, name):
    original((ON_RANKS | WITHOUT_GATHERED_GRADIENTS)[name])
    torch.testing.assert_close(ranks(on_rank, name, False), ranks(on_rank, name, True), **CLOSE)


@pytest.mark.parametrize("name", WITHOUT_GATHERED_GRADIENTS)
def test_clip_without_gathered_gradients(ranks: Ranks, name):
    """Its features get 1 / ranks of the whole batch's gradients; with local_loss, those of their own rows' losses."""
    results = ranks(on_rank, name, False)
    given = pairs(5 * len(results))
    value, image, text, scale = value_and_gradients(clip, *given)
    expected = [image / len(results), text / len(results)]
    if "local=True" in name:
        rows, logits = len(given[0]), given[2] * given[0] @ given[1].T
        of_images, of_texts = (each.softmax(1) - torch.eye(rows) for each in (logits, logits.T))
        expected = [given[2] / (2 * rows) * part for part in (of_images @ given[1], of_texts @ given[0])]
    torch.testing.assert_close(mean_over_ranks(results), [value, *expected, scale], **CLOSE)


def with_a_scale_of(dtype: torch.dtype) -> Tensor:
    image, text, scale = pairs(5)
    options = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return open_clip.ClipLoss(local_loss=True, **options)(image, text, scale.to(dtype))


def test_a_scale_in_half_precision_is_not_rounded_again(ranks: Ranks):
    torch.testing.assert_close(*(ranks(with_a_scale_of, dtype) for dtype in (torch.bfloat16, torch.float32)))


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


@pytest.mark.parametrize("loss", [open_clip.ClipLoss, open_clip.SigLipLoss])
def test_other_ranks_are_refused(loss):
    with pytest.raises(ValueError, match=r"rank and world_size must be those of torch.distributed's default group"):
        loss(world_size=3)(*pairs_with_bias(4))
