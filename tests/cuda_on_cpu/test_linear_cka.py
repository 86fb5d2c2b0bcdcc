"""csrc/cuda/linear_cka.cu against the reference in float64: values and both gradients."""

import ctypes

import pytest
import torch

from fedkernels.reference.linear_cka import linear_cka
from tests.cuda_on_cpu.emulation import Array, arrays, poison

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WANTED = (True, True)


class Problems(ctypes.Structure):
    """struct CKAProblems of csrc/cuda/linear_cka.h."""

    _fields_ = (
        ("x", Array),
        ("y", Array),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "x_width", "y_width")),
        ("centered", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("values", "x_gradients", "y_gradients")),
    )


def pair(problems, rows, x_width, y_width, dtypes=(FP32, FP32), seed=0):
    """With something in common, and columns that are not centred."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(problems, rows, x_width, generator=generator, dtype=torch.float64) + 0.3
    y = torch.randn(problems, rows, y_width, generator=generator, dtype=torch.float64) - 0.2
    shared = min(x_width, y_width)
    y[..., :shared] += x[..., :shared]
    return x.to(dtypes[0]), y.to(dtypes[1])


def run(library, x, y, centered=False, wanted=WANTED, multiprocessors=2):
    """-> values and the gradients that are wanted."""

    def solve(call):
        values = poison(len(x), dtype=FP32)
        gradients = [poison(*z.shape, dtype=FP32) if one else None for z, one in zip((x, y), wanted, strict=True)]
        problems = Problems(
            *arrays([x, y]),
            *(*x.shape, y.shape[2], centered, values.data_ptr()),
            *(None if gradient is None else gradient.data_ptr() for gradient in gradients),
        )
        memory = poison(library.ask("cuda_linear_cka_floats", ctypes.byref(problems)), dtype=FP32)
        call("cuda_linear_cka", ctypes.byref(problems), memory, None)
        return [values, *(gradient for gradient in gradients if gradient is not None)]

    return library.results(solve, multiprocessors=multiprocessors)


def check(found, x, y, centered=False, wanted=WANTED):
    wide = [z.double().requires_grad_(one) for z, one in zip((x, y), wanted, strict=True)]
    truth = linear_cka(*wide, centered)
    torch.testing.assert_close(found[0].double(), truth.detach(), rtol=1e-6, atol=1e-7)
    if any(wanted):
        asked = [z for z in wide if z.requires_grad]
        for z, gradient, true in zip(asked, found[1:], torch.autograd.grad(truth.sum(), asked), strict=True):
            # Two terms of the size of 1 / |z| may cancel.
            sizes = true.abs().amax(dim=(1, 2)) + 1 / z.detach().norm(dim=(1, 2))
            assert ((gradient.double() - true).abs() <= 2e-6 * sizes[:, None, None]).all()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("problems", "rows", "x_width", "y_width"),
    [(1, 1, 1, 1), (3, 5, 4, 7), (2, 33, 64, 9), (1, 70, 31, 65), (1, 40, 128, 100), (5, 65, 3, 2)],
)
def test_equals_the_reference(compiler, problems, rows, x_width, y_width, centered):
    if centered and rows == 1:
        pytest.skip("one row is its own mean")
    x, y = pair(problems, rows, x_width, y_width)
    check(run(compiler.load("linear_cka.cu"), x, y, centered), x, y, centered)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32), (FP32, BF16)])
def test_other_dtypes(compiler, dtypes):
    x, y = pair(2, 23, 10, 6, dtypes)
    check(run(compiler.load("linear_cka.cu"), x, y), x, y)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_only_the_gradients_that_are_wanted(compiler, wanted):
    x, y = pair(2, 23, 10, 6)
    check(run(compiler.load("linear_cka.cu"), x, y, wanted=wanted), x, y, wanted=wanted)


def test_more_problems_than_blocks(compiler):
    """Each problem leaves nothing behind for the next one in its block."""
    x, y = pair(7, 9, 4, 5)
    x[2] = 0
    y[3, 1, 1] = torch.nan
    found = run(compiler.load("linear_cka.cu"), x, y, multiprocessors=1)
    keep = torch.tensor([0, 1, 4, 5, 6])
    check([tensor[keep] for tensor in found], x[keep], y[keep])
    values, of_x, of_y = found
    assert values[2] == 0
    assert not of_x[2].any()
    assert not of_y[2].any()
    assert values[3].isnan()


@pytest.mark.parametrize("scale", [1e-38, 1e-15, 1e15, 1e38])
def test_the_scale_does_not_matter(compiler, scale):
    x, y = pair(1, 12, 5, 3)
    x, y = x / 8, y / 8
    library = compiler.load("linear_cka.cu")
    plain, scaled = run(library, x, y), run(library, x * scale, y)
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[1].double() * scale, plain[1].double(), rtol=1e-4, atol=1e-5)


def test_constant_columns_have_cka_zero_and_gradient_zero(compiler):
    """Values like 0.1 leave rounding behind in a plain mean of 7."""
    _, y = pair(1, 7, 5, 3)
    x = torch.full((1, 7, 5), 0.1) * torch.tensor([1.0, 3.0, -7.0, 11.0, 1e-3])
    values, of_x, of_y = run(compiler.load("linear_cka.cu"), x, y, centered=True)
    assert values == 0
    assert not of_x.any()
    assert not of_y.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("centered", [False, True])
def test_not_finite_gives_nan(compiler, bad, centered):
    x, y = pair(2, 6, 4, 3)
    x[1, 2, 3] = bad
    values = run(compiler.load("linear_cka.cu"), x, y, centered)[0]
    assert values.isnan().tolist() == [False, True]
    y[1] = 0  # which does not hide it
    values = run(compiler.load("linear_cka.cu"), x, y, centered)[0]
    assert values.isnan().tolist() == [False, True]


def test_views_that_start_anywhere(compiler):
    """Neighbours that do not lie at a multiple of their size are read one by one."""
    base = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x, y = base[1:].as_strided((1, 13, 6), (78, 6, 1)), base[103:].as_strided((1, 13, 4), (52, 4, 1))
    check(run(compiler.load("linear_cka.cu"), x, y), x, y)


def test_long_sums_do_not_drift(compiler):
    """All products have one sign, so that rounding towards zero would add up."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(1, 500, 2, generator=generator)
    y = 1 + torch.rand(1, 500, 2, generator=generator)
    check(run(compiler.load("linear_cka.cu"), x, y, multiprocessors=1), x, y)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "planted",
    [
        ("    __syncthreads();  // the chunk is there, and the one before has been multiplied\n", ""),
        ("copy_async_wait<0>();", "copy_async_wait<1>();"),
        (
            "const int row = first_row + 16 * m + g + r % 2 * 8, at = k + t",
            "const int row = first_row + 16 * m + t, at = k + g",
        ),
        ("if (i != j) products[", "if (i > j) products["),
    ],
)
def test_faults_are_found(compiler, planted):
    faulty = compiler.mutant("linear_cka.cu", *planted)
    x, y = pair(1, 70, 30, 20)
    with pytest.raises(AssertionError):
        check(run(faulty, x, y), x, y)
