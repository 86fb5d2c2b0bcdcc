"""supervised_contrastive_loss against the formula with all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import nt_xent, supervised_contrastive_loss


def problem(rows, d, classes):
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    labels = 7 * torch.randint(-classes, classes, (rows,), generator=generator)
    return features.requires_grad_(), labels


def by_masks(features, labels, temperature):
    """The losses, and which rows have a positive."""
    itself = torch.eye(len(labels), dtype=torch.bool)
    log_p = (features @ features.T / temperature).masked_fill(itself, -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself
    return -log_p.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1), positive.any(1)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(1, 20), st.integers(1, 9), st.sampled_from([0.1, 1.0]))
def test_equals_the_formula(rows, d, classes, t):
    features, labels = problem(rows, d, classes)
    temperature = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    losses, counts = by_masks(features, labels, temperature)
    torch.testing.assert_close(supervised_contrastive_loss(features, labels, t, "none"), losses)
    torch.testing.assert_close(supervised_contrastive_loss(features, labels, t, "sum"), losses.sum())
    truth = losses.sum() / counts.sum().clamp(min=1)
    loss = supervised_contrastive_loss(features, labels, temperature)
    torch.testing.assert_close(loss, truth)
    if counts.any():
        leaves = [features, temperature]
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


@pytest.mark.parametrize("rows", [1100, 1101])
def test_more_rows_than_the_compiled_operators_take_at_a_time(rows):
    features, labels = problem(rows, 3, 40)
    weights = torch.linspace(0.1, 2, rows, dtype=torch.float64)
    losses, truth = supervised_contrastive_loss(features, labels, 0.7, "none"), by_masks(features, labels, 0.7)[0]
    torch.testing.assert_close(losses, truth)
    of_losses, of_truth = (torch.autograd.grad(one @ weights, features) for one in (losses, truth))
    torch.testing.assert_close(of_losses, of_truth)


def test_with_two_views_of_each_image_it_is_nt_xent():
    features = problem(12, 5, 1)[0]
    numbers = torch.arange(6).repeat(2)
    loss = supervised_contrastive_loss(features, numbers, 0.3, "none")
    torch.testing.assert_close(loss, nt_xent(features[:6], features[6:], 0.3, "none"))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_without_positives_the_loss_and_its_gradient_are_0(rows):
    features = problem(rows, 4, 1)[0]
    loss = supervised_contrastive_loss(features, torch.arange(rows), 0.5)
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, features)[0], torch.zeros(rows, 4, dtype=torch.float64))


@pytest.mark.parametrize("rows", [6, 7])
def test_nan_gives_nan(rows):
    features, labels = problem(rows, 4, 1)
    features = features.detach()
    features[1, 2] = torch.nan
    assert supervised_contrastive_loss(features, labels, 1.0).isnan()
