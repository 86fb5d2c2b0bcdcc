"""supervised_contrastive_loss against loops over the rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import nt_xent, supervised_contrastive_loss


def problem(rows, d, classes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, d, generator=generator, dtype=torch.float64).to(dtype)
    labels = 7 * torch.randint(-classes, classes, (rows,), generator=generator)
    return features.requires_grad_(), labels


def by_loops(features, labels, temperature):
    """The losses, and which rows have a positive."""
    losses, counts = [], []
    for i in range(len(features)):
        others = [j for j in range(len(features)) if j != i]
        log_p = F.log_softmax(features[others] @ features[i] / temperature, dim=0)
        positive = labels[others] == labels[i]
        losses.append(-log_p[positive].mean() if positive.any() else (0 * features[i]).sum())
        counts.append(bool(positive.any()))
    return torch.stack(losses), torch.tensor(counts)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(1, 20), st.integers(1, 9), st.sampled_from([0.1, 1.0]))
def test_equals_the_formula_by_loops(rows, d, classes, t):
    features, labels = problem(rows, d, classes)
    temperature = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    losses, counts = by_loops(features, labels, temperature)
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
    losses, truth = supervised_contrastive_loss(features, labels, 0.7, "none"), by_loops(features, labels, 0.7)[0]
    torch.testing.assert_close(losses, truth)
    of_losses, of_truth = (torch.autograd.grad(one @ weights, features) for one in (losses, truth))
    torch.testing.assert_close(of_losses, of_truth)


def test_with_two_views_of_each_image_it_is_nt_xent():
    features = problem(12, 5, 1)[0]
    numbers = torch.arange(6).repeat(2)
    loss = supervised_contrastive_loss(features, numbers, 0.3, "none")
    torch.testing.assert_close(loss, nt_xent(features[:6], features[6:], 0.3, "none"))


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(rows, reduction):
    features, labels = problem(rows, 3, 2)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z, t: supervised_contrastive_loss(z, labels, t, reduction), (features, temperature)
    )


@pytest.mark.parametrize("rows", [34, 35])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_summed_wide(dtype, rows):
    features, labels = problem(rows, 65, 4, dtype)
    wide = features.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = supervised_contrastive_loss(features, labels, 2.0)
    truth = supervised_contrastive_loss(wide, labels, 2.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    narrow, other = torch.autograd.grad(loss, features)[0], torch.autograd.grad(truth, wide)[0]
    assert narrow.dtype == dtype
    atol = 1e-5 * float(other.abs().max())
    torch.testing.assert_close(narrow.double(), other, rtol=2 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_without_positives_the_loss_and_its_gradient_are_0(rows):
    features = problem(rows, 4, 1)[0]
    loss = supervised_contrastive_loss(features, torch.arange(rows), 0.5)
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, features)[0], torch.zeros(rows, 4, dtype=torch.float64))


@pytest.mark.parametrize("rows", [6, 7])
def test_compiles_without_a_graph_break(rows):
    features, labels = problem(rows, 4, 2)
    compiled = torch.compile(supervised_contrastive_loss, fullgraph=True, backend="aot_eager")
    loss, truth = compiled(features, labels, 0.3), supervised_contrastive_loss(features, labels, 0.3)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, features), torch.autograd.grad(truth, features))


@pytest.mark.parametrize("rows", [6, 7])
def test_nan_gives_nan(rows):
    features, labels = problem(rows, 4, 1)
    features = features.detach()
    features[1, 2] = torch.nan
    assert supervised_contrastive_loss(features, labels, 1.0).isnan()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(0, 3), torch.ones(0).long(), 1.0), ValueError, "features must not be empty"),
        ((torch.ones(2, 3), torch.ones(3).long(), 1.0), ValueError, r"labels must have shape \[B\] = \[2\], got \[3\]"),
        ((torch.ones(2, 3), torch.ones(2), 1.0), TypeError, "labels must be int64, got torch.float32"),
        ((torch.ones(2, 3), [0, 1], 1.0), TypeError, "labels must be a torch.Tensor, got list"),
        ((torch.ones(2, 3), torch.ones(2).long().to("meta"), 1.0), ValueError, "labels must be on the device"),
        ((torch.ones(2), torch.ones(2).long(), 1.0), ValueError, r"features must have shape \[B, d\]"),
        ((torch.ones(2, 3), torch.ones(2).long(), 0.0), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2).long(), 1.0, "max"), ValueError, "reduction must be one of"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        supervised_contrastive_loss(*arguments)


def test_module_is_the_function():
    features, labels = problem(6, 4, 2)
    module = fedkernels.nn.SupervisedContrastiveLoss(0.3, "sum")
    assert torch.equal(module(features, labels), supervised_contrastive_loss(features, labels, 0.3, "sum"))
