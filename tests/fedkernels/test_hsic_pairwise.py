"""The unbiased HSIC of all pairs against Song et al.'s formula in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels.internal.hsic_pairwise import hsic_pairwise
from tests.fedkernels.test_debiased_cka import song_hsic
from tests.fedkernels.test_linear_cka import matrix

pytestmark = pytest.mark.cpu_only(reason="a batch on a GPU has no kernels of its own")


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


WIDTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


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
@pytest.mark.parametrize(("dtype", "scale", "rtol"), [(torch.float32, 1e-12, 1e-5), (torch.float32, 1e12, 1e-5)])
def test_squares_of_products_may_be_out_of_float32s_range(n, dtype, scale, rtol):
    xs, ys = [matrix(n, 30, seed=1).to(dtype)], [matrix(n, 9, seed=2).to(dtype)]
    truth = by_song(xs, ys)
    cross, xx, yy = hsic_pairwise([scale * x for x in xs], ys)
    assert_close((cross / scale**2, xx / scale**4, yy), truth, rtol)


def test_half_precision_and_strides():
    x, y = matrix(30, 20, seed=1).bfloat16(), matrix(9, 30, seed=2).half()
    assert_close(hsic_pairwise([x], [y.T]), by_song([x], [y.T]), 1e-5)
