"""linear_cka_pairwise of fedkernels/internal/linear_cka_cuda.py on the emulated kernels against the reference."""

import pytest
import torch

from fedkernels.internal import linear_cka_cuda
from fedkernels.reference import linear_cka as reference
from tests.cuda_on_cpu.emulated_linear_cka import BF16, FP32, matrix

CENTERED = pytest.mark.parametrize("centered", [False, True])

pytestmark = pytest.mark.usefixtures("emulated_linear_cka")


@CENTERED
@pytest.mark.parametrize("entries", [1 << 26, 1, 300])
def test_pairwise_equals_the_reference(monkeypatch, entries, centered):
    monkeypatch.setattr(linear_cka_cuda, "_MOST_ENTRIES", entries)  # products in one piece, and in several
    shared = matrix(40, 4)
    widths = [3, 17, 1, 40, 8]
    xs = [(matrix(40, d, seed=n) + shared[:, : min(d, 4)].sum(1, True)).float() for n, d in enumerate(widths)]
    ys = [(matrix(40, d, seed=10 + d) + shared[:, :1]).float() for d in (5, 33)]
    found = linear_cka_cuda.linear_cka_pairwise(xs, ys, centered)
    wide_xs, wide_ys = ([z.double() for z in zs] for zs in (xs, ys))
    torch.testing.assert_close(
        found.double(), reference.linear_cka_pairwise(wide_xs, wide_ys, centered), rtol=2e-6, atol=0
    )
    found = linear_cka_cuda.linear_cka_pairwise(xs, [], centered)
    torch.testing.assert_close(
        found.double(), reference.linear_cka_pairwise(wide_xs, wide_xs, centered), rtol=2e-6, atol=0
    )
    assert torch.equal(found, found.T)


def test_pairwise_of_more_matrices_than_a_call_takes():
    xs = [matrix(9, 1 + n % 3, seed=n, dtype=FP32 if n % 2 else BF16) for n in range(19)]
    xs[17] = torch.zeros(9, 3)
    xs[18][2, 0] = torch.nan
    found = linear_cka_cuda.linear_cka_pairwise(xs, [], True)
    truth = reference.linear_cka_pairwise([x.double() for x in xs], [x.double() for x in xs], True)
    torch.testing.assert_close(found.double(), truth, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert not found[17, :18].any()


def test_pairwise_of_wide_matrices_is_the_reference():
    xs = [matrix(6, d, seed=d) for d in (2, 9)]
    assert torch.equal(linear_cka_cuda.linear_cka_pairwise(xs, [], False), reference.linear_cka_pairwise(xs, xs, False))
