"""fedkernels/internal/linear_cka_cuda.py on csrc/cuda/linear_cka_large_*.cu against the reference.

Here: pairs of large matrices, and planted faults. Kernels and lists are in the files beside this one.
"""

import pytest
import torch

from fedkernels.internal import linear_cka_cuda
from fedkernels.reference import linear_cka as reference
from tests.cuda_on_cpu.emulated_linear_cka import BF16, COMBINE, FP16, FP32, FP64, PREPARE, matrix, near, pair

CENTERED = pytest.mark.parametrize("centered", [False, True])

pytestmark = pytest.mark.usefixtures("emulated_linear_cka")


def check(x, y, centered=False, wanted=(True, True), tolerance=2e-6):
    values, *gradients = linear_cka_cuda.linear_cka(x, y, centered, *wanted)
    wide = [z.double().requires_grad_() for z in (x, y)]
    truth = reference.linear_cka(*wide, centered)
    assert values.dtype == (FP64 if FP64 in (x.dtype, y.dtype) else FP32)
    torch.testing.assert_close(values.double(), truth.detach(), rtol=tolerance, atol=tolerance / 10)
    exact = torch.autograd.grad(truth.sum(), wide)
    for found, true, z, one in zip(gradients, exact, (x, y), wanted, strict=True):
        assert found.shape == (z.shape if one else (0,))
        if one:
            near(found, true, z, tolerance)


@CENTERED
@pytest.mark.parametrize(
    ("rows", "x_width", "y_width", "batch"),
    [
        (2, 1, 1, ()),
        (5, 4, 7, (3,)),  # in sample space
        (70, 130, 3, ()),  # two tiles of columns
        (300, 130, 9, ()),  # in feature space, rows in more than one chunk
        (65, 31, 33, (2, 1)),
        (2100, 2, 5, ()),  # chunks of more than the fewest rows
    ],
)
def test_equals_the_reference(rows, x_width, y_width, batch, centered):
    check(*pair(rows, x_width, y_width, batch), centered)


@CENTERED
@pytest.mark.parametrize(("rows", "x_width", "y_width"), [(23, 10, 6), (23, 30, 6)])
def test_float64(rows, x_width, y_width, centered):
    check(*pair(rows, x_width, y_width, (2,), (FP64, FP64)), centered, tolerance=1e-13)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32), (FP32, BF16)])
def test_other_dtypes(dtypes):
    check(*pair(23, 10, 6, dtypes=dtypes))


def test_one_float64_makes_all_float64():
    check(*pair(23, 10, 6, dtypes=(FP64, FP32)), tolerance=1e-13)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [12, 23])
def test_only_the_gradients_that_are_wanted(rows, wanted):
    check(*pair(rows, 10, 6), wanted=wanted)


def test_no_problems():
    values, of_x, of_y = linear_cka_cuda.linear_cka(torch.ones(0, 5, 3), torch.ones(0, 5, 2), True, True, False)
    assert values.shape == (0,)
    assert of_x.shape == (0, 5, 3)
    assert of_y.shape == (0,)


@pytest.mark.parametrize("rows", [6, 12])
@pytest.mark.parametrize(("scale", "dtype"), [(s, FP32) for s in (1e-36, 1e-15, 1e15, 1e38)] + [(1e300, FP64)])
@CENTERED
def test_the_scale_does_not_matter(rows, scale, dtype, centered):
    x, y = (z / 8 for z in pair(rows, 5, 3, dtypes=(dtype, dtype)))
    plain, scaled = (linear_cka_cuda.linear_cka(z, y, centered, True, True) for z in (x, x * scale))
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[1].double() * scale, plain[1].double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled[2], plain[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [3, 9])
def test_constant_columns_have_cka_zero_and_gradient_zero(width):
    """Values like 0.1 leave rounding behind in a plain mean of 7."""
    _, y = pair(7, 5, 3, (2,))
    x = (0.1 * matrix(width, seed=3)).float().expand(2, 7, width).contiguous()
    for found in linear_cka_cuda.linear_cka(x, y, True, True, True):
        assert not found.any()


def test_one_zero_matrix_and_one_nan_leave_the_batch_alone():
    x, y = pair(19, 4, 5, (4,))
    x[1] = 0
    y[2, 3, 1] = torch.nan
    values, *gradients = linear_cka_cuda.linear_cka(x, y, False, True, True)
    assert values.isnan().tolist() == [False, False, True, False]
    assert values[1] == 0
    assert not any(one[1].any() for one in gradients)
    keep = torch.tensor([0, 3])
    check(x[keep], y[keep])
    alone = linear_cka_cuda.linear_cka(x[keep], y[keep], False, True, True)
    torch.testing.assert_close([values[keep], *(one[keep] for one in gradients)], list(alone), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [6, 17])
@CENTERED
def test_not_finite_gives_nan(bad, rows, centered):
    x, y = pair(rows, 4, 3, (2,))
    x[1, 2, 3] = bad
    kernel = y @ y.mT
    assert linear_cka_cuda.linear_cka(x, y, centered, False, False)[0].isnan().tolist() == [False, True]
    assert linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)[0].isnan().tolist() == [False, True]
    kernel[0, 1, 1] = bad
    assert linear_cka_cuda.linear_cka_to_kernel(x[:1], kernel[:1], centered, False)[0].isnan().all()
    zero, no_kernel = torch.zeros_like(y), torch.zeros_like(kernel)  # which do not hide it
    assert linear_cka_cuda.linear_cka(x, zero, centered, False, False)[0].isnan().tolist() == [False, True]
    assert linear_cka_cuda.linear_cka_to_kernel(x, no_kernel, centered, False)[0].isnan().tolist() == [False, True]
    assert linear_cka_cuda.linear_cka_to_kernel(zero[:1], kernel[:1], centered, False)[0].isnan().all()


def test_a_similarity_of_zero_is_not_negative():
    """In sample space it is a sum of products, which rounding may leave below 0."""
    x, y = torch.zeros(8, 16), torch.zeros(8, 16)
    x[:4], y[4:] = matrix(4, 16, dtype=FP32), matrix(4, 16, seed=1, dtype=FP32)
    values, of_x, of_y = linear_cka_cuda.linear_cka(x, y, False, True, True)
    assert values == 0
    assert of_x.isfinite().all()
    assert of_y.isfinite().all()


def test_views_that_start_anywhere():
    """Neighbours that do not lie at a multiple of their size are read one by one."""
    base = matrix(1000, dtype=FP32)
    check(base[1:].as_strided((13, 6), (6, 1)), base[103:].as_strided((13, 4), (4, 1)))


def through_autograd(x, y, centered):
    return torch.ops.fedkernels.linear_cka_large(x, y, centered, x.requires_grad, y.requires_grad)[0]


@CENTERED
@pytest.mark.parametrize("width", [2, 6])
def test_gradcheck(width, centered):
    x, y = matrix(5, width, seed=1).requires_grad_(), matrix(5, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: through_autograd(x, y, centered), (x, y), fast_mode=True)


def test_gradients_have_the_dtypes_of_the_inputs():
    x, y = (z.requires_grad_() for z in pair(23, 10, 6, (2,), (BF16, FP32)))
    grads = torch.autograd.grad(through_autograd(x, y, True) @ torch.tensor([2.0, -3.0]), [x, y])
    wide = [z.detach().double().requires_grad_() for z in (x, y)]
    exact = torch.autograd.grad(reference.linear_cka(*wide, True) @ torch.tensor([2.0, -3.0]).double(), wide)
    assert [one.dtype for one in grads] == [BF16, FP32]
    near(grads[0], exact[0], x.detach(), 1e-2)
    near(grads[1], exact[1], y.detach(), 1e-5)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (True, True)])
def test_opcheck(wanted):
    x, y = (z.requires_grad_(one) for z, one in zip(pair(23, 10, 6, (2,), (FP64, FP64)), wanted, strict=True))
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    operator = torch.ops.fedkernels.linear_cka_large.default
    torch.library.opcheck(operator, (x, y, True, *wanted), test_utils=utilities)


def test_a_second_derivative_is_refused():
    x, y = (z.requires_grad_() for z in pair(23, 10, 6))
    grad = torch.autograd.grad(through_autograd(x, y, False), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), x)


def test_compiles_without_a_graph_break():
    x, y = (z.requires_grad_() for z in pair(23, 10, 6))
    compiled = torch.compile(through_autograd, fullgraph=True, backend="aot_eager")
    values, truth = compiled(x, y, True), through_autograd(x, y, True)
    torch.testing.assert_close(values, truth, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(values, [x, y]), torch.autograd.grad(truth, [x, y]))


def test_autocast_does_not_narrow():
    x, y = pair(23, 10, 6)
    kernel = y @ y.mT

    def everything():
        return [
            *torch.ops.fedkernels.linear_cka_large(x, y, True, True, True),
            *linear_cka_cuda.linear_cka_to_kernel(x, kernel, True, True),
            linear_cka_cuda.linear_cka_pairwise([x, y], [], True),
        ]

    plain = everything()
    with torch.autocast("cpu", torch.bfloat16):
        inside = everything()
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


# ---- planted faults ----


def check_both():
    x, y = pair(70, 13, 9)
    kernel = y @ y.mT
    kernel[:, 3] += 2
    check(3 * x, 40 * y, True)
    found = linear_cka_cuda.linear_cka_to_kernel(x, kernel, True, False)[0]
    truth = reference.linear_cka_to_kernel(x.double(), kernel.double(), True)
    torch.testing.assert_close(found.double(), truth, rtol=5e-6, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "emulated_linear_cka",
    [
        (PREPARE, "- first[e] * scale);\n  });\n  const double sum", "- first[e]);\n  });\n  const double sum"),
        (COMBINE, "? of_yy : of_cross) * y_scale", "? of_yy : of_cross) * x_scale"),
        (
            COMBINE,
            "own[(x_width + column) * x_width + row]",
            "own[(x_width + row % y_width) * x_width + column % x_width]",
        ),
        (
            PREPARE,
            "  __syncthreads();\n\n  const int column = part.lane_column()",
            "\n  const int column = part.lane_column()",
        ),
        (PREPARE, "? of_rows[row] - mean : 0", "? of_rows[row] + mean : 0"),
        (PREPARE, "const double shift = entries.shift(row), row_mean", "const double shift = 0, row_mean"),
    ],
    indirect=True,
)
def test_faults_are_found():
    with pytest.raises(AssertionError):
        check_both()


def test_it_is_the_faults_that_are_found():
    check_both()
