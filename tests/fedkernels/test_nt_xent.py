"""nt_xent against loops and torch's cross-entropy over the rows without the diagonal."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import nt_xent
from tests.fedkernels.conftest import rounding_of_weights


def views(batch, d, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    both = scale * torch.randn(2, batch, d, generator=generator, dtype=torch.float64)
    return both[0].to(dtype), both[1].to(dtype)


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    view1, view2 = (view.requires_grad_() for view in views(3, 4))
    assert torch.autograd.gradcheck(lambda p, q: nt_xent(p, q, 0.5, reduction), (view1, view2))
    assert torch.autograd.gradcheck(lambda q: nt_xent(view1.detach(), q, 0.5, reduction), (view2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_summed_wide(dtype):
    narrow = [view.requires_grad_() for view in views(21, 65, dtype)]
    wide = [view.detach().double().requires_grad_() for view in narrow]
    loss, truth = nt_xent(*narrow, 0.2), nt_xent(*wide, 0.2)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    for grad, wide_grad in zip(torch.autograd.grad(loss, narrow), torch.autograd.grad(truth, wide), strict=True):
        assert grad.dtype == dtype
        # One rounding to the input's dtype, nothing more.
        atol = max(1e-5, rounding_of_weights(nt_xent, dtype)) * float(wide_grad.abs().max())
        torch.testing.assert_close(grad.double(), wide_grad, rtol=2 * torch.finfo(dtype).eps, atol=atol)


def test_autocast_does_not_narrow():
    view1, view2 = views(16, 64, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = nt_xent(view1, view2, 0.1)
    assert torch.equal(inside, nt_xent(view1, view2, 0.1))


def test_strides_do_not_matter():
    view1, view2 = views(8, 12)
    torch.testing.assert_close(
        nt_xent(view1[::2, ::3], view2.T.contiguous().T[::2, ::3], 0.5),
        nt_xent(view1[::2, ::3].contiguous(), view2[::2, ::3].contiguous(), 0.5),
    )


@pytest.mark.parametrize("temperature", [0.3, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)])
def test_compiles_without_a_graph_break(temperature):
    leaves = [view.requires_grad_() for view in views(5, 4)]
    leaves += [temperature] if isinstance(temperature, torch.Tensor) else []
    torch.compiler.reset()
    loss = torch.compile(nt_xent, fullgraph=True, backend="aot_eager")(*leaves[:2], temperature)
    truth = nt_xent(*leaves[:2], temperature)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


def test_extreme_but_legal_inputs():
    view1, view2 = (view.requires_grad_() for view in views(1, 3))
    loss = nt_xent(view1, view2, 0.1)  # the positive is the only other row
    assert loss == 0
    assert not torch.autograd.grad(loss, view1)[0].any()
    same = torch.ones(4, 3)
    torch.testing.assert_close(nt_xent(same, same, 0.1), torch.tensor(7.0).log())
    torch.testing.assert_close(nt_xent(0 * same, 0 * same, 0.1), torch.tensor(7.0).log())
    large = [view.requires_grad_() for view in views(6, 5, torch.float32, 1e4)]
    loss = nt_xent(*large, 1e-3)
    torch.testing.assert_close(loss.double(), nt_xent(*(view.double() for view in large), 1e-3), rtol=1e-5, atol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, large))


def test_nan_gives_nan():
    view1, view2 = views(3, 4)
    view2[1, 2] = torch.nan
    assert nt_xent(view1, view2, 1.0, "none").isnan().all()  # every row sees that one


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(0, 3), torch.ones(0, 3), 1.0), ValueError, "view1 must not be empty"),
        ((torch.ones(2, 0), torch.ones(2, 0), 1.0), ValueError, "view1 must not be empty"),
        ((torch.ones(2, 3), torch.ones(3, 3), 1.0), ValueError, r"view2 must have the shape \[2, 3\]"),
        ((torch.ones(2, 2, 3), torch.ones(2, 2, 3), 1.0), ValueError, "view1 must have shape"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta"), 1.0), ValueError, "view2 must be on the device"),
        ((torch.ones(2, 3), torch.ones(2, 3).long(), 1.0), TypeError, "view2 must be float16"),
        ((torch.ones(2, 3), torch.ones(2, 3), -1.0), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), "1"), TypeError, "temperature must be a Python number"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, None), ValueError, "reduction must be one of"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        nt_xent(*arguments)


def test_a_tensor_of_temperature_gets_its_gradient():
    leaves = [*(view.requires_grad_() for view in views(7, 3)), torch.tensor(0.6, dtype=torch.float64)]
    leaves[2].requires_grad_()
    loss, truth = nt_xent(*leaves), by_cross_entropy(*leaves).mean()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
    assert torch.autograd.gradcheck(lambda p, q, t: nt_xent(p, q, t, "none"), leaves)
    narrow = leaves[2].detach().half()
    rows = [view.detach().half() for view in leaves[:2]]
    torch.testing.assert_close(nt_xent(*rows, narrow), nt_xent(*rows, float(narrow)), rtol=2e-6, atol=0)


def test_module_is_the_function():
    view1, view2 = views(3, 4)
    assert torch.equal(fedkernels.nn.NTXent(0.3)(view1, view2), nt_xent(view1, view2, 0.3))
