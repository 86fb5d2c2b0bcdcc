"""fedkernels/_linear_cka_cuda.py on csrc/cuda/linear_cka_large.cu against the reference, with torch's products.

The operators of csrc/ops/linear_cka_large_cuda.cpp exist for CUDA alone; here they are made of the emulated kernels.
"""

import ctypes

import pytest
import torch

from fedkernels import _linear_cka_cuda, _native
from fedkernels.reference import linear_cka as reference
from tests.cuda_on_cpu.emulation import Array, arrays, integers, poison

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CENTERED = pytest.mark.parametrize("centered", [False, True])
MATRICES = 16


class Matrices(ctypes.Structure):
    """struct CKAMatrices of csrc/cuda/linear_cka_large.h."""

    _fields_ = (
        ("matrices", Array * MATRICES),
        ("widths", ctypes.c_int64 * MATRICES),
        *((name, ctypes.c_int64) for name in ("count", "problems", "rows")),
        *((name, ctypes.c_bool) for name in ("centered", "wide")),
    )


class Products(ctypes.Structure):
    """struct CKAProducts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("own", "other")),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "x_width", "y_width")),
        *((name, ctypes.c_bool) for name in ("samples", "wide")),
        *((name, ctypes.c_void_p) for name in ("scales", "values", "of_x", "of_y")),
    )


class ToKernelProducts(ctypes.Structure):
    """struct CKAToKernelProducts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("z", "product", "own")),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "width", "side")),
        *((name, ctypes.c_bool) for name in ("wide", "gradient")),
        *((name, ctypes.c_void_p) for name in ("scales", "values")),
    )


class Emulated:
    """The operators' C++, in Python; each call runs in both orders of the threads."""

    def __init__(self, library):
        self.library = library

    def describe(self, matrices, centered, wide):
        given = Matrices(count=len(matrices), rows=matrices[0].shape[-2], centered=centered, wide=wide)
        given.problems = matrices[0].shape[:-2].numel()
        for index, (one, array) in enumerate(zip(matrices, arrays(matrices), strict=True)):
            assert one.is_contiguous()
            given.matrices[index], given.widths[index] = array, one.shape[-1]
        return given

    def linear_cka_prepare(self, matrices, centered):
        wide = any(one.dtype == FP64 for one in matrices)
        widths = [one.shape[-1] for one in matrices]
        problems, rows = matrices[0].shape[:-2].numel(), matrices[0].shape[-2]

        def solve(call):
            z = poison(problems, rows, sum(widths), dtype=FP64 if wide else FP32)
            scales = poison(problems, len(matrices))
            for start in range(0, len(matrices), MATRICES):
                given = self.describe(matrices[start : start + MATRICES], centered, wide)
                memory = poison(self.library.ask("cuda_linear_cka_prepare_doubles", ctypes.byref(given)))
                to = ctypes.c_void_p(z.data_ptr() + sum(widths[:start]) * z.element_size())
                of_scales = ctypes.c_void_p(scales.data_ptr() + start * 8)
                call("cuda_linear_cka_prepare", ctypes.byref(given), to, sum(widths), of_scales, memory, None)
            return z, scales

        return self.library.results(solve)

    def linear_cka_prepare_to_kernel(self, x, kernel, centered):
        given = self.describe([x, kernel], centered, FP64 in (x.dtype, kernel.dtype))

        def solve(call):
            dtype = FP64 if given.wide else FP32
            z, scales = poison(given.problems, *x.shape[-2:], dtype=dtype), poison(given.problems, 4)
            hkh = poison(given.problems, *kernel.shape[-2:], dtype=dtype) if centered else z.new_empty(len(z), 0, 0)
            memory = poison(self.library.ask("cuda_linear_cka_prepare_to_kernel_doubles", ctypes.byref(given)))
            call("cuda_linear_cka_prepare_to_kernel", ctypes.byref(given), z, hkh, scales, memory, None)
            return z, scales, hkh

        return self.library.results(solve)

    def linear_cka_combine(self, own, other, scales, samples, x_gradient, y_gradient):
        assert own.is_contiguous()
        assert other.is_contiguous()
        problems, x_width, y_width = len(own), own.shape[2], other.shape[2]

        def solve(call):
            values = poison(problems, dtype=own.dtype)
            of_x, of_y = (
                poison(problems, width if samples else x_width + y_width, width, dtype=own.dtype) if wanted else None
                for width, wanted in ((x_width, x_gradient), (y_width, y_gradient))
            )
            data = [None if one is None else one.data_ptr() for one in (of_x, of_y)]
            products = Products(
                *(own.data_ptr(), other.data_ptr(), problems, own.shape[1], x_width, y_width, samples),
                *(own.dtype == FP64, scales.data_ptr(), values.data_ptr(), *data),
            )
            memory = poison(self.library.ask("cuda_linear_cka_combine_doubles", problems))
            call("cuda_linear_cka_combine", ctypes.byref(products), memory, None)
            return values, *(values.new_empty(0) if one is None else one for one in (of_x, of_y))

        return self.library.results(solve)

    def linear_cka_combine_to_kernel(self, product, own, z, scales, gradient):
        def solve(call):
            values, of_product, of_own = poison(len(z), dtype=z.dtype), product.clone(), own.clone()
            products = ToKernelProducts(
                *(one.data_ptr() for one in (z, of_product, of_own)),
                *(*z.shape, own.shape[1], z.dtype == FP64, gradient, scales.data_ptr(), values.data_ptr()),
            )
            memory = poison(self.library.ask("cuda_linear_cka_combine_doubles", len(z)))
            call("cuda_linear_cka_combine_to_kernel", ctypes.byref(products), memory, None)
            return values, of_product, of_own

        assert all(one.is_contiguous() and one.dtype == z.dtype for one in (product, own, z))
        values, of_product, of_own = self.library.results(solve)
        product.copy_(of_product)
        own.copy_(of_own)
        return values

    def linear_cka_squares(self, product, lengths):
        assert product.is_contiguous()
        assert sum(lengths) == product.numel()

        def solve(call):
            squares = poison(len(lengths))
            memory = poison(self.library.ask("cuda_linear_cka_squares_doubles", len(lengths)))
            wide = product.dtype == FP64
            call("cuda_linear_cka_squares", product, wide, integers(lengths), len(lengths), squares, memory, None)
            return squares

        return self.library.results(solve)


@pytest.fixture
def emulated(compiler, request):
    """The operators for tensors of the CPU, as long as a test runs. A parameter is a fault to plant: old, new."""
    if _native.module is None:
        pytest.skip("the operators are declared by fedkernels._C, which is not compiled")
    fault = getattr(request, "param", None)
    library = compiler.mutant("linear_cka_large.cu", *fault) if fault else compiler.load("linear_cka_large.cu")
    with torch.library._scoped_library("fedkernels", "IMPL") as registered:
        for name in _native.PARTS:
            registered.impl(name, getattr(Emulated(library), name), "CPU")
        registered.impl("linear_cka_large", _linear_cka_cuda.linear_cka, "CPU")
        yield


pytestmark = pytest.mark.usefixtures("emulated")


def matrix(*shape, seed=0, dtype=FP64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=FP64) + 0.3).to(dtype)


def pair(rows, x_width, y_width, batch=(), dtypes=(FP32, FP32), seed=0):
    """With something in common, and columns that are not centred."""
    x, y = matrix(*batch, rows, x_width, seed=seed), matrix(*batch, rows, y_width, seed=seed + 1) - 0.5
    shared = min(x_width, y_width)
    y[..., :shared] += x[..., :shared]
    return x.to(dtypes[0]), y.to(dtypes[1])


def near(found, truth, z, tolerance):
    """A gradient: two terms of the size of 1 / |z| may cancel."""
    sizes = truth.abs().amax(dim=(-2, -1)) + 1 / z.double().norm(dim=(-2, -1))
    assert ((found.double() - truth).abs() <= tolerance * sizes[..., None, None]).all()


def check(x, y, centered=False, wanted=(True, True), tolerance=2e-6):
    values, *gradients = _linear_cka_cuda.linear_cka(x, y, centered, *wanted)
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
    values, of_x, of_y = _linear_cka_cuda.linear_cka(torch.ones(0, 5, 3), torch.ones(0, 5, 2), True, True, False)
    assert values.shape == (0,)
    assert of_x.shape == (0, 5, 3)
    assert of_y.shape == (0,)


@pytest.mark.parametrize("rows", [6, 12])
@pytest.mark.parametrize(("scale", "dtype"), [(s, FP32) for s in (1e-36, 1e-15, 1e15, 1e38)] + [(1e300, FP64)])
@CENTERED
def test_the_scale_does_not_matter(rows, scale, dtype, centered):
    x, y = (z / 8 for z in pair(rows, 5, 3, dtypes=(dtype, dtype)))
    plain, scaled = (_linear_cka_cuda.linear_cka(z, y, centered, True, True) for z in (x, x * scale))
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[1].double() * scale, plain[1].double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled[2], plain[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [3, 9])
def test_constant_columns_have_cka_zero_and_gradient_zero(width):
    """Values like 0.1 leave rounding behind in a plain mean of 7."""
    _, y = pair(7, 5, 3, (2,))
    x = (0.1 * matrix(width, seed=3)).float().expand(2, 7, width).contiguous()
    for found in _linear_cka_cuda.linear_cka(x, y, True, True, True):
        assert not found.any()


def test_one_zero_matrix_and_one_nan_leave_the_batch_alone():
    x, y = pair(19, 4, 5, (4,))
    x[1] = 0
    y[2, 3, 1] = torch.nan
    values, *gradients = _linear_cka_cuda.linear_cka(x, y, False, True, True)
    assert values.isnan().tolist() == [False, False, True, False]
    assert values[1] == 0
    assert not any(one[1].any() for one in gradients)
    keep = torch.tensor([0, 3])
    check(x[keep], y[keep])
    alone = _linear_cka_cuda.linear_cka(x[keep], y[keep], False, True, True)
    torch.testing.assert_close([values[keep], *(one[keep] for one in gradients)], list(alone), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [6, 17])
@CENTERED
def test_not_finite_gives_nan(bad, rows, centered):
    x, y = pair(rows, 4, 3, (2,))
    x[1, 2, 3] = bad
    kernel = y @ y.mT
    assert _linear_cka_cuda.linear_cka(x, y, centered, False, False)[0].isnan().tolist() == [False, True]
    assert _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)[0].isnan().tolist() == [False, True]
    kernel[0, 1, 1] = bad
    assert _linear_cka_cuda.linear_cka_to_kernel(x[:1], kernel[:1], centered, False)[0].isnan().all()
    zero, no_kernel = torch.zeros_like(y), torch.zeros_like(kernel)  # which do not hide it
    assert _linear_cka_cuda.linear_cka(x, zero, centered, False, False)[0].isnan().tolist() == [False, True]
    assert _linear_cka_cuda.linear_cka_to_kernel(x, no_kernel, centered, False)[0].isnan().tolist() == [False, True]
    assert _linear_cka_cuda.linear_cka_to_kernel(zero[:1], kernel[:1], centered, False)[0].isnan().all()


def test_a_similarity_of_zero_is_not_negative():
    """In sample space it is a sum of products, which rounding may leave below 0."""
    x, y = torch.zeros(8, 16), torch.zeros(8, 16)
    x[:4], y[4:] = matrix(4, 16, dtype=FP32), matrix(4, 16, seed=1, dtype=FP32)
    values, of_x, of_y = _linear_cka_cuda.linear_cka(x, y, False, True, True)
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
            *_linear_cka_cuda.linear_cka_to_kernel(x, kernel, True, True),
            _linear_cka_cuda.linear_cka_pairwise([x, y], [], True),
        ]

    plain = everything()
    with torch.autocast("cpu", torch.bfloat16):
        inside = everything()
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


# ---- to a kernel ----


def check_to_kernel(x, kernel, centered=False, tolerance=2e-6):
    value, found = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    wide = x.double().requires_grad_()
    truth = reference.linear_cka_to_kernel(wide, kernel.double(), centered)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=tolerance, atol=tolerance / 10)
    near(found, torch.autograd.grad(truth.sum(), wide)[0], x, tolerance)
    alone, nothing = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)
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
    value = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)[0]
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
    plain = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    scaled = _linear_cka_cuda.linear_cka_to_kernel(x * of_x, kernel * of_kernel, centered, True)
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
    value, gradient = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    assert (value == 0).tolist() == [False, True, True]
    assert [bool(one.any()) for one in gradient] == [True, False, False]


def test_to_kernel_without_problems():
    value, gradient = _linear_cka_cuda.linear_cka_to_kernel(torch.ones(0, 5, 3), torch.ones(0, 5, 5), True, True)
    assert value.shape == (0,)
    assert gradient.shape == (0, 5, 3)


# ---- pairwise ----


@CENTERED
@pytest.mark.parametrize("entries", [1 << 26, 1, 300])
def test_pairwise_equals_the_reference(monkeypatch, entries, centered):
    monkeypatch.setattr(_linear_cka_cuda, "_MOST_ENTRIES", entries)  # products in one piece, and in several
    shared = matrix(40, 4)
    widths = [3, 17, 1, 40, 8]
    xs = [(matrix(40, d, seed=n) + shared[:, : min(d, 4)].sum(1, True)).float() for n, d in enumerate(widths)]
    ys = [(matrix(40, d, seed=10 + d) + shared[:, :1]).float() for d in (5, 33)]
    found = _linear_cka_cuda.linear_cka_pairwise(xs, ys, centered)
    wide_xs, wide_ys = ([z.double() for z in zs] for zs in (xs, ys))
    torch.testing.assert_close(
        found.double(), reference.linear_cka_pairwise(wide_xs, wide_ys, centered), rtol=2e-6, atol=0
    )
    found = _linear_cka_cuda.linear_cka_pairwise(xs, [], centered)
    torch.testing.assert_close(
        found.double(), reference.linear_cka_pairwise(wide_xs, wide_xs, centered), rtol=2e-6, atol=0
    )
    assert torch.equal(found, found.T)


def test_pairwise_of_more_matrices_than_a_call_takes():
    xs = [matrix(9, 1 + n % 3, seed=n, dtype=FP32 if n % 2 else BF16) for n in range(19)]
    xs[17] = torch.zeros(9, 3)
    xs[18][2, 0] = torch.nan
    found = _linear_cka_cuda.linear_cka_pairwise(xs, [], True)
    truth = reference.linear_cka_pairwise([x.double() for x in xs], [x.double() for x in xs], True)
    torch.testing.assert_close(found.double(), truth, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert not found[17, :18].any()


def test_pairwise_of_wide_matrices_is_the_reference():
    xs = [matrix(6, d, seed=d) for d in (2, 9)]
    assert torch.equal(
        _linear_cka_cuda.linear_cka_pairwise(xs, [], False), reference.linear_cka_pairwise(xs, xs, False)
    )


# ---- planted faults ----


def check_both():
    x, y = pair(70, 13, 9)
    kernel = y @ y.mT
    kernel[:, 3] += 2
    check(3 * x, 40 * y, True)
    found = _linear_cka_cuda.linear_cka_to_kernel(x, kernel, True, False)[0]
    truth = reference.linear_cka_to_kernel(x.double(), kernel.double(), True)
    torch.testing.assert_close(found.double(), truth, rtol=5e-6, atol=0)


@pytest.mark.parametrize(
    "emulated",
    [
        ("- first[e] * scale);\n  });\n  const double sum", "- first[e]);\n  });\n  const double sum"),
        ("? of_yy : of_cross) * y_scale", "? of_yy : of_cross) * x_scale"),
        ("own[(x_width + column) * x_width + row]", "own[(x_width + row % y_width) * x_width + column % x_width]"),
        ("  __syncthreads();\n\n  const int column = part.lane_column()", "\n  const int column = part.lane_column()"),
        ("? of_rows[row] - mean : 0", "? of_rows[row] + mean : 0"),
        ("const double shift = entries.shift(row), row_mean", "const double shift = 0, row_mean"),
    ],
    indirect=True,
)
def test_faults_are_found():
    with pytest.raises(AssertionError):
        check_both()


def test_it_is_the_faults_that_are_found():
    check_both()
