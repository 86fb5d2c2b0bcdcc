"""nt_xent against loops and torch's cross-entropy over the rows without the diagonal."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import nt_xent


def views(batch, d):
    return torch.randn(2, batch, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def by_loops(view1, view2, temperature):
    z, batch = torch.cat([view1, view2]).tolist(), len(view1)
    losses = []
    for i in range(2 * batch):
        logits = [sum(p * q for p, q in zip(z[i], z[j], strict=True)) / temperature for j in range(2 * batch)]
        others = sum(math.exp(logits[j]) for j in range(2 * batch) if j != i)
        losses.append(math.log(others) - logits[(i + batch) % (2 * batch)])
    return torch.tensor(losses, dtype=torch.float64)


def by_cross_entropy(view1, view2, temperature):
    """The diagonal is deleted, not masked; the positive's column moves accordingly."""
    z, batch = torch.cat([view1, view2]), len(view1)
    total = 2 * batch
    logits = (z @ z.T / temperature)[~torch.eye(total, dtype=torch.bool)].view(total, total - 1)
    positives = torch.cat([torch.arange(batch, total) - 1, torch.arange(batch)])
    return F.cross_entropy(logits, positives, reduction="none")


def test_equals_the_formula_by_loops():
    view1, view2 = views(4, 3)
    truth = by_loops(view1, view2, 0.7)
    torch.testing.assert_close(nt_xent(view1, view2, 0.7, "none"), truth)
    torch.testing.assert_close(nt_xent(view1, view2, 0.7), truth.mean())
    torch.testing.assert_close(nt_xent(view1, view2, 0.7, "sum"), truth.sum())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 37), st.integers(1, 33), st.sampled_from([0.05, 0.5, 3.0]))
def test_equals_cross_entropy_without_the_diagonal(batch, d, temperature):
    view1, view2 = (view.requires_grad_() for view in views(batch, d))
    loss, truth = nt_xent(view1, view2, temperature), by_cross_entropy(view1, view2, temperature).mean()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, [view1, view2]), torch.autograd.grad(truth, [view1, view2]))


def test_more_rows_than_the_compiled_operator_takes_at_a_time():
    """The compiled operator has blocks of 256 rows and groups of 512; a row's weight is its own."""
    view1, view2 = (view.requires_grad_() for view in views(300, 5))
    weights = torch.linspace(0.1, 2, 600, dtype=torch.float64)
    loss, truth = nt_xent(view1, view2, 0.4, "none"), by_cross_entropy(view1, view2, 0.4)
    torch.testing.assert_close(loss, truth)
    found = torch.autograd.grad(loss @ weights, [view1, view2])
    torch.testing.assert_close(found, torch.autograd.grad(truth @ weights, [view1, view2]))


def test_extreme_but_legal_inputs():
    view1, view2 = (view.requires_grad_() for view in views(1, 3))
    loss = nt_xent(view1, view2, 0.1)  # the positive is the only other row
    assert loss == 0
    assert not torch.autograd.grad(loss, view1)[0].any()
    same = torch.ones(4, 3)
    torch.testing.assert_close(nt_xent(same, same, 0.1), torch.tensor(7.0).log())
    torch.testing.assert_close(nt_xent(0 * same, 0 * same, 0.1), torch.tensor(7.0).log())


def test_nan_gives_nan():
    view1, view2 = views(3, 4)
    view2[1, 2] = torch.nan
    assert nt_xent(view1, view2, 1.0, "none").isnan().all()  # every row sees that one


def test_a_tensor_of_temperature_gets_its_gradient():
    leaves = [*(view.requires_grad_() for view in views(7, 3)), torch.tensor(0.6, dtype=torch.float64)]
    leaves[2].requires_grad_()
    loss, truth = nt_xent(*leaves), by_cross_entropy(*leaves).mean()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
