"""What CKA sums from blocks and batches: the products of a block of samples, and the unbiased HSIC of all pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels.internal.add_products import add_products
from fedkernels.internal.hsic_pairwise import hsic_pairwise
from tests.fedkernels.test_debiased_cka import song_hsic
from tests.fedkernels.test_linear_cka import matrix

pytestmark = pytest.mark.cpu_only(reason="blocks and batches on a GPU have no kernels of their own")
WIDTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]


def sums_of(widths, first, fill=0.0):
    columns = sum(widths[:first]), sum(widths[first:])
    return torch.full(columns, fill).double(), [torch.full((width, width), fill).double() for width in widths]


def assert_equals_the_products(rows, widths, first, dtype, rtol):
    block = matrix(rows, sum(widths), seed=rows).to(dtype)
    parts, columns = block.double().split(widths, dim=1), sum(widths[:first])
    cross, own = sums_of(widths, first, fill=0.5)
    norms, weighted = add_products(block, widths, first, cross, own)
    size = rows**0.5 if rows > 1 else 1.0  # of a sum of products, which may itself be near 0
    close = {"rtol": rtol, "atol": 4 * rtol * size}
    torch.testing.assert_close(cross, 0.5 + block.double()[:, :columns].T @ block.double()[:, columns:], **close)
    for sums, z in zip(own, parts, strict=True):
        torch.testing.assert_close(sums.triu(), (0.5 + z.T @ z).triu(), **close)
    truth = torch.stack([z.square().sum(dim=1) for z in parts])
    torch.testing.assert_close(norms, truth, rtol=rtol, atol=0)
    weights = torch.cat([truth, torch.ones(1, rows)])
    largest = weights.amax(dim=1, keepdim=True)
    torch.testing.assert_close(weighted / largest, weights / largest @ block.double(), **close)
    assert weighted.dtype == norms.dtype == torch.float64


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 300), WIDTHS, WIDTHS, st.sampled_from(PRECISIONS))
def test_equals_the_products(rows, xs, ys, precision):
    assert_equals_the_products(rows, [*xs, *ys], len(xs), *precision)


@pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS)
@pytest.mark.parametrize("widths", [(300, 321), (40,) * 40, (257, 5, 290), (1, 700)])
def test_more_columns_than_a_piece_has(widths, dtype, rtol):
    assert_equals_the_products(400, list(widths), len(widths) // 2, dtype, rtol)


def test_many_rows_cost_no_precision():
    """Only sums of a few rows are rounded to float32. A block of CKAAccumulator has 1024."""
    rows = 1024
    block = 1 + 0.01 * matrix(rows, 80, seed=1).float()
    cross, own = sums_of([30, 50], 1)
    add_products(block, [30, 50], 1, cross, own)
    truth = block.double().T @ block.double()
    torch.testing.assert_close(cross, truth[:30, 30:], rtol=3e-6, atol=0)
    torch.testing.assert_close(own[1].triu(), truth[30:, 30:].triu(), rtol=3e-6, atol=0)


def by_song(xs, ys):
    of_xs, of_ys = ([z.double() @ z.double().T for z in zs] for zs in (xs, ys))
    cross = torch.stack([song_hsic(k, l) for k in of_xs for l in of_ys]).view(len(xs), len(ys))
    return cross, *(torch.stack([song_hsic(k, k) for k in grams]) for grams in (of_xs, of_ys))


def assert_close(values, truth, rtol):
    """Relative to the HSIC of both with themselves, which bound that of the pair."""
    cross, xx, yy = values
    true_cross, true_xx, true_yy = truth
    torch.testing.assert_close(xx, true_xx, rtol=rtol, atol=0)
    torch.testing.assert_close(yy, true_yy, rtol=rtol, atol=0)
    bound = torch.outer(true_xx, true_yy).sqrt()
    torch.testing.assert_close(cross / bound, true_cross / bound, rtol=0, atol=rtol)
    assert all(value.dtype == torch.float64 for value in values)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(5, 60), WIDTHS, WIDTHS)
def test_equals_the_formula(n, x_widths, y_widths):
    xs, ys = (
        [matrix(n, width, seed=width + side) for width in widths] for side, widths in enumerate((x_widths, y_widths))
    )
    assert_close(hsic_pairwise(xs, ys), by_song(xs, ys), 1e-8)


@pytest.mark.parametrize("n", [250, 700])
def test_float32_of_any_size(n):
    """In the space of the samples, and in that of the features."""
    xs = [(matrix(n, width, seed=width) + 1).float() for width in (64, 130, 257, 33)]
    ys = [xs[1].exp(), (xs[2][:, :50] + matrix(n, 50, seed=3)).float()]
    assert_close(hsic_pairwise(xs, ys), by_song(xs, ys), 1e-5)


@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_squares_of_products_may_be_out_of_float32s_range(n, scale):
    x, y = matrix(n, 30, seed=1).float(), matrix(n, 9, seed=2).float()
    cross, xx, yy = hsic_pairwise([scale * x], [y])
    assert_close((cross / scale**2, xx / scale**4, yy), by_song([x], [y]), 1e-5)


def test_half_precision_and_strides():
    x, y = matrix(30, 20, seed=1).bfloat16(), matrix(9, 30, seed=2).half()
    assert_close(hsic_pairwise([x], [y.T]), by_song([x], [y.T]), 1e-5)
