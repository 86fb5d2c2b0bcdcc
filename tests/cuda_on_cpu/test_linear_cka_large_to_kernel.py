"""linear_cka_to_kernel of fedkernels/internal/linear_cka_cuda.py on the emulated kernels against the reference."""

import pytest
import torch

from fedkernels.internal import linear_cka_cuda
from fedkernels.reference import linear_cka as reference
from tests.cuda_on_cpu.emulated_linear_cka import BF16, FP16, FP32, FP64, matrix, near, pair

CENTERED = pytest.mark.parametrize("centered", [False, True])

pytestmark = pytest.mark.usefixtures("emulated_linear_cka")


def check_to_kernel(x, kernel, centered=False, tolerance=2e-6):
    value, found = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    wide = x.double().requires_grad_()
    truth = reference.linear_cka_to_kernel(wide, kernel.double(), centered)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=tolerance, atol=tolerance / 10)
    near(found, torch.autograd.grad(truth.sum(), wide)[0], x, tolerance)
    alone, nothing = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)
    assert torch.equal(alone, value)
    assert nothing.shape == (0,)


@CENTERED
@pytest.mark.parametrize(
    ("rows", "width", "batch"), [(2, 1, ()), (7, 9, (3,)), (23, 9, ()), (150, 3, (2, 1)), (70, 131, ())]
)
def test_to_kernel_equals_the_reference(rows, width, batch, centered):
    x, y = pair(rows, width, 5, batch)
    check_to_kernel(x, y @ y.mT, centered, tolerance=5e-6)


@CENTERED
def test_to_kernel_in_many_chunks(centered):
    x, y = pair(700, 3, 2)
    check_to_kernel(x, y @ y.mT, centered, tolerance=5e-6)


@CENTERED
@pytest.mark.parametrize("dtypes", [(FP64, FP64), (FP32, FP64), (FP64, BF16), (BF16, FP32), (FP16, FP16)])
def test_to_kernel_in_other_dtypes(dtypes, centered):
    x, y = pair(23, 9, 5, dtypes=(dtypes[0], FP64))
    kernel = (y @ y.mT).to(dtypes[1])
    check_to_kernel(x, kernel, centered, tolerance=1e-12 if FP64 in dtypes else 5e-6)


@CENTERED
def test_the_value_of_a_kernel_that_is_not_symmetric(centered):
    x, kernel = matrix(23, 5, dtype=FP32), matrix(23, 23, seed=1, dtype=FP32)
    kernel[:, 3] += 2
    value = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)[0]
    truth = reference.linear_cka_to_kernel(x.double(), kernel.double(), centered)
    torch.testing.assert_close(value.double(), truth, rtol=5e-6, atol=1e-7)


@CENTERED
@pytest.mark.parametrize("of_x", [1e-30, 1, 1e30])
@pytest.mark.parametrize(
    ("of_kernel", "dtype"), [(s, FP32) for s in (1e-38, 1e-25, 1e25, 1e38)] + [(1e-300, FP64), (1e300, FP64)]
)
def test_the_scales_of_kernel_and_x_do_not_matter(of_kernel, of_x, dtype, centered):
    x, y = pair(12, 5, 3, dtypes=(dtype, dtype))
    kernel = y @ y.mT / 64
    plain = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    scaled = linear_cka_cuda.linear_cka_to_kernel(x * of_x, kernel * of_kernel, centered, True)
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[1].double() * of_x, plain[1].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_a_kernel_of_large_mean(dtype):
    """Nothing that matters may cancel."""
    x, y = pair(90, 4, 3, dtypes=(dtype, dtype))
    check_to_kernel(x + 10, y @ y.mT + 1000, True, tolerance=5e-6 if dtype == FP32 else 1e-12)


@CENTERED
def test_zero_kernels_and_zero_matrices(centered):
    x, y = pair(7, 4, 3, (3,))
    row = (0.1 * matrix(5, seed=3)).float() * centered  # constant columns, zero once they are centred
    constant = row.expand(7, 5)
    kernel = y @ y.mT
    kernel[1] = (constant[:, None] * constant).sum(-1) if centered else 0
    x[2] = row[:4]
    value, gradient = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    assert (value == 0).tolist() == [False, True, True]
    assert [bool(one.any()) for one in gradient] == [True, False, False]


def test_to_kernel_without_problems():
    value, gradient = linear_cka_cuda.linear_cka_to_kernel(torch.ones(0, 5, 3), torch.ones(0, 5, 5), True, True)
    assert value.shape == (0,)
    assert gradient.shape == (0, 5, 3)
