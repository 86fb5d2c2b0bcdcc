"""linear_cka and its variants against the definition by Gram matrices in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import linear_cka, linear_cka_pairwise, linear_cka_to_kernel
from tests.fedkernels.inputs import randn

FP64 = torch.float64
CENTERED = pytest.mark.parametrize("centered", [False, True])


def matrix(*shape, seed=0, dtype=torch.float64):
    return (randn(*shape, seed=seed) + 0.3).to(dtype)


def hsic(k, l, centered):
    """<HKH, HLH>_F with an explicit H."""
    rows = len(k)
    h = torch.eye(rows, dtype=torch.float64) - (1 / rows if centered else 0)
    return (h @ k @ h * (h @ l @ h)).sum()


def by_gram(x, y, centered):
    k, l = (z.double() @ z.double().T for z in (x, y))
    return hsic(k, l, centered) / (hsic(k, k, centered) * hsic(l, l, centered)).sqrt()


@CENTERED
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(2, 30), st.integers(1, 30), st.integers(1, 30))
def test_equals_the_definition(centered, rows, d1, d2):
    x, y = matrix(rows, d1, seed=1).requires_grad_(), matrix(rows, d2, seed=2).requires_grad_()
    value, truth = linear_cka(x, y, centered), by_gram(x, y, centered)
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(
        torch.autograd.grad(value, [x, y]), torch.autograd.grad(truth, [x, y]), rtol=1e-6, atol=1e-10
    )
    kernel = (y @ y.T).detach()
    torch.testing.assert_close(linear_cka_to_kernel(x, kernel, centered), truth)
    x, y = x.detach(), y.detach()
    truths = [[by_gram(a, b, centered) for b in (y, y, x)] for a in (x, y)]
    torch.testing.assert_close(linear_cka_pairwise([x, y], [y, y, x], centered), torch.tensor(truths, dtype=FP64))


@pytest.mark.parametrize("rows", [6, 30])  # in sample space, and in feature space
@CENTERED
def test_batch_dimensions_and_broadcasting(centered, rows):
    x, y = matrix(2, 3, rows, 4, seed=1), matrix(3, rows, 9, seed=2)
    truth = torch.stack([torch.stack([by_gram(x[i, j], y[j], centered) for j in range(3)]) for i in range(2)])
    nothing = x[:0].clone().requires_grad_()
    for function, other in ((linear_cka, y), (linear_cka_to_kernel, y @ y.mT)):
        torch.testing.assert_close(function(x, other, centered), truth)
        of_nothing = function(nothing, other, centered)
        assert of_nothing.shape == (0, 3)
        assert torch.autograd.grad(of_nothing.sum(), nothing)[0].shape == nothing.shape


@CENTERED
@pytest.mark.parametrize(
    ("rows", "widths", "dtype", "rtol"),
    [
        (2600, (130, 70), torch.float32, 2e-6),  # more than one float32 sum bears
        (2600, (45, 1), torch.float32, 2e-6),
        # The compiled operator packs 8 MiB of rows at a time: 2^20 / (700 + 500) rows of float64.
        (1300, (700, 500), torch.float64, 1e-11),
    ],
)
def test_many_samples(centered, rows, widths, dtype, rtol):
    """More rows than any block or group of the compiled operators has."""
    x, y = (matrix(rows, width, seed=width) for width in widths)
    x, y = x + y.mean(1, keepdim=True), y + x[:, :1]  # alike, so that the value is not near 0
    leaves = [z.to(dtype).requires_grad_() for z in (x, y)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    value, truth = linear_cka(*leaves, centered), feature_space(*wide, centered)
    truths = torch.autograd.grad(truth, wide)
    torch.testing.assert_close(value.double(), truth, rtol=rtol, atol=0)
    for grad, true in zip(torch.autograd.grad(value, leaves), truths, strict=True):
        torch.testing.assert_close(grad.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))
    if dtype == torch.float32:
        pairwise = linear_cka_pairwise([leaves[0].detach()], [leaves[1].detach()], centered)[0, 0]
        # On a GPU the products have other shapes, and torch's BLAS other orders for them.
        rounding = 1e-6 if hasattr(linear_cka, "__wrapped__") else 0
        torch.testing.assert_close(pairwise, value.detach(), rtol=rounding, atol=0)
        kernel = (wide[1] @ wide[1].T).detach().float()
        values = [linear_cka_to_kernel(one, kernel, centered) for one in (leaves[0], leaves[0].detach())]
        torch.testing.assert_close(torch.stack(values).double(), truth.expand(2), rtol=1e-5, atol=0)
        (grad,), true = torch.autograd.grad(values[0], leaves[0]), truths[0]
        torch.testing.assert_close(grad.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))


def feature_space(x, y, centered):
    if centered:
        x, y = x - x.mean(0), y - y.mean(0)
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


@pytest.mark.parametrize(
    ("dtype", "scale"), [*((torch.float32, s) for s in (1e15, 1e-15, 1e38)), (FP64, 1e200), (FP64, 1e-200)]
)
@pytest.mark.parametrize("x_width", [5, 12])  # in feature space, and in sample space
@CENTERED
def test_scale_does_not_matter(dtype, scale, x_width, centered):
    x, y = (matrix(8, width, seed=width, dtype=dtype) / 8 for width in (x_width, 3))
    plain, scaled = x.double().requires_grad_(), (x * scale).requires_grad_()
    truth, value = by_gram(plain, y, centered), linear_cka(scaled, y * scale, centered)
    close = {"rtol": 1e-5 if dtype == torch.float32 else 1e-10, "atol": 0, "check_dtype": False}
    torch.testing.assert_close(value, truth, **close)
    torch.testing.assert_close(linear_cka_to_kernel(scaled, y * scale @ y.T, centered), truth, **close)
    torch.testing.assert_close(
        linear_cka_pairwise([x, x * scale], [y / scale], centered)[:, 0], truth.expand(2), **close
    )
    grad, truth_grad = torch.autograd.grad(value, scaled)[0], torch.autograd.grad(truth, plain)[0]
    # The gradient of f(x) at scale * x is the one at x, divided by scale.
    torch.testing.assert_close(grad.double() * scale, truth_grad, rtol=1e-4, atol=1e-5)


@CENTERED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 9])
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_a_zero_matrix_has_cka_and_gradient_zero_and_hides_nothing_that_is_not_finite(centered, dtype, width, bad):
    # Constant columns are zero once centred; values like 0.1 leave rounding behind in a plain mean of 7.
    row = matrix(width, seed=1, dtype=dtype) if centered and not bad else torch.zeros(width, dtype=dtype)
    zero, y = row.repeat(7, 1).requires_grad_(), matrix(7, 4, seed=2, dtype=dtype)
    y[2, 1] += bad
    kernel = y @ y.T if not bad else matrix(7, 7, seed=3, dtype=dtype)
    kernel[1, 1] += bad
    y.requires_grad_()
    for value in (
        linear_cka(zero, y, centered),
        linear_cka(y, zero, centered),
        linear_cka_to_kernel(zero, kernel, centered),
        linear_cka_to_kernel(y, (zero @ zero.T).detach(), centered),
        linear_cka_pairwise([zero], [y], centered),
    ):
        gradients = [x for x in torch.autograd.grad(value.sum(), [zero, y], allow_unused=True) if x is not None]
        assert value.isnan().all() if bad else not value.any()
        assert any(gradient.isnan().any() if bad else gradient.any() for gradient in gradients) == bool(bad)
    assert not linear_cka(zero, zero, centered)


def test_one_zero_matrix_leaves_the_batch_alone():
    x, y = matrix(3, 6, 4, seed=1), matrix(6, 4, seed=2)
    x[1] = 0
    value = linear_cka(x.requires_grad_(), y)
    truth = torch.stack([by_gram(x[0], y, False), 0 * x[1].sum(), by_gram(x[2], y, False)])
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), x), torch.autograd.grad(truth.sum(), x))
