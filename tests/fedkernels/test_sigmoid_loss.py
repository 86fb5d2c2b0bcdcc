"""sigmoid_loss against torch's logsigmoid."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import sigmoid_loss


def pairs(batch, d):
    both = torch.randn(2, batch, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [one.requires_grad_() for one in both.unbind()]


def scalars(*values):
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def by_logsigmoid(image, text, logit_scale, logit_bias):
    signs = 2 * torch.eye(len(image), dtype=image.dtype) - 1
    return -F.logsigmoid(signs * (logit_scale * image @ text.T + logit_bias)).sum(dim=1).mean()


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([-10.0, 0.0, 30.0]))
def test_equals_logsigmoid(batch, d, scale, bias):
    leaves = [*pairs(batch, d), *scalars(scale, bias)]
    loss, truth = sigmoid_loss(*leaves), by_logsigmoid(*leaves)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(sigmoid_loss(*leaves[:2], scale, bias), truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
    losses = sigmoid_loss(*leaves, "none")
    torch.testing.assert_close((losses.mean(), losses.shape), (truth, (batch,)))
    torch.testing.assert_close(sigmoid_loss(*leaves, reduction="sum"), losses.sum())


def test_more_pairs_than_the_compiled_operator_takes_at_a_time():
    """It has groups of 512 images, blocks of 256 texts and spans of 8 blocks."""
    image, text = pairs(2100, 3)
    truth = by_logsigmoid(image, text, 1.5, -1.0)
    expected = torch.autograd.grad(truth, [image, text])
    for wanted in ((True, True), (True, False), (False, True)):
        leaves = [one.detach().requires_grad_(want) for one, want in zip((image, text), wanted, strict=True)]
        loss = sigmoid_loss(*leaves, 1.5, -1.0)
        torch.testing.assert_close(loss, truth)
        found = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])
        torch.testing.assert_close(found, tuple(itertools.compress(expected, wanted)))


@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_small_terms_keep_their_digits(bias):
    """Terms of exp(-20) beside each other, in float32: neither 1 + exp(-20) nor its logarithm may be formed."""
    image, text = (torch.zeros(40, 3) for _ in range(2))
    large, small = sorted([40 * math.log1p(math.exp(-bias)), 40 * 39 * math.log1p(math.exp(bias))], reverse=True)
    assert sigmoid_loss(image, text, 1.0, bias).item() == pytest.approx((large + small) / 40, rel=1e-6)
    few = sigmoid_loss(image[:1], text[:1], 1.0, 20.0).item()
    assert few == pytest.approx(math.exp(-20), rel=1e-6)


def test_nan_gives_nan():
    image, text = (one.detach() for one in pairs(5, 4))
    image[1, 2] = torch.nan
    assert sigmoid_loss(image, text, 1.0, 0.0).isnan()
