"""clip_loss against torch's cross-entropy in both directions."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import clip_loss


def pairs(batch, d):
    both = torch.randn(2, batch, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [one.requires_grad_() for one in both.unbind()]


def by_cross_entropy(image, text, logit_scale):
    numbers = torch.arange(len(image))
    logits = logit_scale * image @ text.T
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([0.1, 1.0, 14.3]))
def test_equals_cross_entropy_in_both_directions(batch, d, scale):
    image, text = pairs(batch, d)
    logit_scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    leaves = [image, text, logit_scale]
    loss, truth = clip_loss(image, text, logit_scale), by_cross_entropy(image, text, logit_scale)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(clip_loss(image, text, scale), truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
    losses = clip_loss(image, text, scale, "none")
    torch.testing.assert_close((losses.mean(), losses.shape), (truth, (batch,)))
    torch.testing.assert_close(clip_loss(image, text, scale, reduction="sum"), losses.sum())


def test_more_pairs_than_the_compiled_operator_takes_at_a_time():
    """It has groups of 512 images, blocks of 256 texts and spans of 8 blocks."""
    image, text = pairs(2100, 3)
    truth = by_cross_entropy(image, text, 1.5)
    expected = torch.autograd.grad(truth, [image, text])
    for wanted in ((True, True), (True, False), (False, True)):
        leaves = [one.detach().requires_grad_(want) for one, want in zip((image, text), wanted, strict=True)]
        loss = clip_loss(*leaves, 1.5)
        torch.testing.assert_close(loss, truth)
        found = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])
        torch.testing.assert_close(found, tuple(itertools.compress(expected, wanted)))


def test_a_small_loss_is_not_rounded_to_the_size_of_the_logits():
    image = torch.eye(16).requires_grad_()
    truth = math.log1p(15 * math.exp(-8))
    shifted = image + 10  # logits of 80 and 88
    loss = clip_loss(image, image.detach(), 8.0)
    assert loss.item() == pytest.approx(truth, rel=1e-5)
    assert clip_loss(shifted, image.detach(), 8.0).item() == pytest.approx(truth, rel=1e-4)


def test_nan_and_infinity_give_nan():
    for bad in (torch.nan, torch.inf):
        image, text = (one.detach() for one in pairs(5, 4))
        image[1, 2] = bad
        assert clip_loss(image, text, 1.0).isnan()
