"""debiased_cka against Song et al.'s formula on Gram matrices in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import debiased_cka, debiased_cka_pairwise
from fedkernels.reference import debiased_cka as reference
from tests.fedkernels.test_linear_cka import matrix


def song_hsic(k, l):
    """Eq. 5 of Song et al. 2007 but for the factor 1 / (n (n - 3)): tr(KL) + 1'K1 1'L1 / .. - 2 / (n - 2) 1'KL1."""
    n = len(k)
    off_diagonal = 1 - torch.eye(n, dtype=torch.float64)
    k, l = k * off_diagonal, l * off_diagonal
    return (k * l).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * k.sum(0) @ l.sum(1)


def by_song(x, y):
    k, l = x @ x.mT, y @ y.mT
    return song_hsic(k, l) / (song_hsic(k, k) * song_hsic(l, l)).sqrt()


def assert_equal_with_gradients(value, truth, leaves, true_leaves, rtol=1e-9):
    torch.testing.assert_close(value.double(), truth, rtol=rtol, atol=rtol)
    grads, truths = torch.autograd.grad(value.sum(), leaves), torch.autograd.grad(truth.sum(), true_leaves)
    for grad, true in zip(grads, truths, strict=True):
        torch.testing.assert_close(grad.double(), true, rtol=10 * rtol, atol=10 * rtol * float(true.abs().max()))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(4, 40), st.integers(2, 30), st.integers(2, 30))
def test_equals_the_formula(n, d1, d2):
    x, y = matrix(n, d1, seed=1).requires_grad_(), matrix(n, d2, seed=2).requires_grad_()
    assert_equal_with_gradients(debiased_cka(x, y), by_song(x, y), [x, y], [x, y], rtol=1e-7)
    pairwise = debiased_cka_pairwise([x.detach(), y.detach()], [y.detach()])[:, 0]
    torch.testing.assert_close(pairwise, torch.stack([by_song(x, y), by_song(y, y)]).detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("n", "d1", "d2"), [(300, 170, 200), (1100, 130, 70), (700, 45, 1), (61, 300, 2)])
def test_float32_of_any_size(n, d1, d2):
    x, y = matrix(n, d1, seed=1), matrix(n, d2, seed=2)
    y = y + x[:, :1] + 5
    leaves = [z.float().requires_grad_() for z in (x, y)]
    wide = [z.detach().double().requires_grad_() for z in leaves]
    assert_equal_with_gradients(debiased_cka(*leaves), by_song(*wide), leaves, wide, rtol=5e-6)
    plain = [z.detach() for z in leaves]
    torch.testing.assert_close(debiased_cka_pairwise(plain, plain)[0, 1], debiased_cka(*plain), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [7, 30])
def test_batch_dimensions_broadcast(n):
    x, y = matrix(2, 1, n, 4, seed=1).requires_grad_(), matrix(3, n, 9, seed=2).requires_grad_()
    truth = torch.stack([torch.stack([by_song(x[i, 0], y[j]) for j in range(3)]) for i in range(2)])
    assert_equal_with_gradients(debiased_cka(x, y), truth, [x, y], [x, y])


def one_outlier(n, width):
    x = torch.full((n, width), 0.1)
    x[2] = 7.3
    return x


DEGENERATE = {
    "constant": lambda n: torch.full((n, 5), 0.1),
    "constant columns": lambda n: matrix(5, seed=1).repeat(n, 1),
    "one sample differs": lambda n: one_outlier(n, 3),
    "one sample differs, wide": lambda n: one_outlier(n, 70),
    "all equally far apart": lambda n: torch.eye(n) * 3.7,
    "zero": lambda n: torch.zeros(n, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [4, 5, 60])
@pytest.mark.parametrize("name", DEGENERATE)
def test_a_zero_self_hsic_gives_value_and_gradient_zero(name, n, dtype):
    x, y = DEGENERATE[name](n).to(dtype).requires_grad_(), matrix(n, 4, seed=2, dtype=dtype).requires_grad_()
    for value in (debiased_cka(x, y), debiased_cka(y, x), debiased_cka(x, x), debiased_cka_pairwise([x], [y, x])):
        assert not value.any()
        grads = torch.autograd.grad(value.sum(), [x, y], allow_unused=True)
        assert all(grad is None or not grad.any() for grad in grads)
    assert not debiased_cka_pairwise([x.detach()], [y.detach(), x.detach()]).any()


def test_one_large_sample_among_many_is_not_taken_for_the_only_one():
    x = matrix(20_000, 4, seed=3, dtype=torch.float32)
    y = x + 0.5 * matrix(20_000, 4, seed=4, dtype=torch.float32)
    x[0] *= 4500
    truth = debiased_cka(x.double(), y.double())
    assert truth > 0.005
    for found in (debiased_cka(x, y), reference.debiased_cka(x, y), debiased_cka_pairwise([x], [y])[0, 0]):
        # Of float32 sums with one term that is 2e7 times the others; what is left of them differs by the processor.
        torch.testing.assert_close(found.double(), truth, rtol=0.1, atol=0)
    only = one_outlier(20_000, 3)
    assert debiased_cka(only, y) == reference.debiased_cka(only, y) == 0


@pytest.mark.parametrize("n", [8, 60])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_gives_nan(n, bad):
    x, y = matrix(2, n, 4, seed=1), matrix(n, 4, seed=2)
    x[1, 2, 3] = bad
    assert debiased_cka(x, y).isnan().tolist() == [False, True]
    assert debiased_cka(x, torch.zeros_like(y)).isnan().tolist() == [False, True]
    assert debiased_cka_pairwise([x[0], x[1]], [y]).isnan().tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e15), (torch.float32, 1e-15), (torch.float32, 1e37), (torch.float64, 1e200)]
)
@pytest.mark.parametrize("n", [6, 40])
def test_scale_does_not_matter(n, dtype, scale):
    x, y = matrix(n, 5, seed=1), matrix(n, 3, seed=2)
    truth = by_song(x, y)
    scaled = (x * scale).to(dtype).requires_grad_()
    value = debiased_cka(scaled, y.to(dtype))
    torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-5)
    leaf = x.clone().requires_grad_()
    true = torch.autograd.grad(by_song(leaf, y), leaf)[0]
    grad = torch.autograd.grad(value, scaled)[0]
    torch.testing.assert_close(grad.double() * scale, true, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(debiased_cka_pairwise([scaled.detach()], [y.to(dtype)])[0, 0], value, rtol=1e-5, atol=0)
