"""fedkernels/internal/linear_cka_cuda.py on the emulated csrc/cuda/linear_cka_*.cu against the reference in float64."""

import pytest
import torch

from fedkernels.internal import linear_cka_cuda
from fedkernels.reference import linear_cka as reference
from tests.cuda_on_cpu.emulated_linear_cka import COMBINE, PREPARE

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CENTERED = pytest.mark.parametrize("centered", [False, True])
BOTH = True, True

pytestmark = [
    pytest.mark.usefixtures("emulated_linear_cka"),
    pytest.mark.filterwarnings("ignore:.*verriding a previously registered kernel"),
]


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


def check(x, y, centered=False, wanted=BOTH, tolerance=2e-6):
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


def check_to_kernel(x, kernel, centered=False, tolerance=5e-6):
    value, found = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, True)
    wide = x.double().requires_grad_()
    truth = reference.linear_cka_to_kernel(wide, kernel.double(), centered)
    assert value.dtype == (FP64 if FP64 in (x.dtype, kernel.dtype) else FP32)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=tolerance, atol=tolerance / 10)
    near(found, torch.autograd.grad(truth.sum(), wide)[0], x, tolerance)
    alone, nothing = linear_cka_cuda.linear_cka_to_kernel(x, kernel, centered, False)
    assert torch.equal(alone, value)
    assert nothing.shape == (0,)


# ---- pairs ----


@CENTERED
@pytest.mark.parametrize(
    ("rows", "x_width", "y_width", "batch"),
    [
        (1, 1, 1, ()),
        (2, 1, 1, ()),
        (5, 4, 7, (3,)),  # in sample space
        (70, 130, 3, ()),  # two tiles of columns
        (300, 130, 9, ()),  # in feature space, rows in more than one chunk
        (65, 31, 33, (2, 1)),
        (2100, 2, 5, ()),  # chunks of more than the fewest rows
        (9, 4, 5, (70,)),  # many small pairs
    ],
)
def test_equals_the_reference(rows, x_width, y_width, batch, centered):
    if centered and rows == 1:
        pytest.skip("one row is its own mean")
    check(*pair(rows, x_width, y_width, batch), centered)


@CENTERED
@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        ((FP64, FP64), 1e-13),
        ((FP64, FP32), 1e-13),
        ((BF16, BF16), 2e-6),
        ((FP16, FP32), 2e-6),
        ((FP32, BF16), 2e-6),
    ],
)
@pytest.mark.parametrize("x_width", [10, 30])
def test_dtypes(x_width, dtypes, tolerance, centered):
    check(*pair(23, x_width, 6, (2,), dtypes), centered, tolerance=tolerance)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [12, 23])
def test_only_the_gradients_that_are_wanted(rows, wanted):
    check(*pair(rows, 10, 6), wanted=wanted)


@pytest.mark.parametrize("rows", [9, 31])
def test_any_number_of_pairs_takes_as_many_calls(emulated_linear_cka, rows):
    """Two calls of kernels and four products, of all pairs at a time."""
    with torch.profiler.profile() as profile:
        linear_cka_cuda.linear_cka(*pair(rows, 8, 6, (70,)), True, *BOTH)
    assert emulated_linear_cka.calls == ["prepare", "combine"]
    assert [one.count for one in profile.key_averages() if one.key in ("aten::bmm", "aten::mm")] == [4]


@pytest.mark.parametrize("rows", [6, 12])
@pytest.mark.parametrize(("scale", "dtype"), [(s, FP32) for s in (1e-36, 1e-15, 1e15, 1e38)] + [(1e300, FP64)])
@CENTERED
def test_the_scale_does_not_matter(rows, scale, dtype, centered):
    x, y = (z / 8 for z in pair(rows, 5, 3, dtypes=(dtype, dtype)))
    plain, scaled = (linear_cka_cuda.linear_cka(z, y, centered, *BOTH) for z in (x, x * scale))
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[1].double() * scale, plain[1].double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled[2], plain[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [3, 9])
def test_constant_columns_have_cka_zero_and_gradient_zero(width):
    """Values like 0.1 leave rounding behind in a plain mean of 7."""
    _, y = pair(7, 5, 3, (2,))
    x = (0.1 * matrix(width, seed=3)).float().expand(2, 7, width).contiguous()
    for found in linear_cka_cuda.linear_cka(x, y, True, *BOTH):
        assert not found.any()


def test_one_zero_matrix_and_one_nan_leave_the_batch_alone():
    x, y = pair(19, 4, 5, (4,))
    x[1] = 0
    y[2, 3, 1] = torch.nan
    values, *gradients = linear_cka_cuda.linear_cka(x, y, False, *BOTH)
    assert values.isnan().tolist() == [False, False, True, False]
    assert values[1] == 0
    assert not any(one[1].any() for one in gradients)
    keep = torch.tensor([0, 3])
    alone = linear_cka_cuda.linear_cka(x[keep], y[keep], False, *BOTH)
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
    values, *gradients = linear_cka_cuda.linear_cka(x, y, False, *BOTH)
    assert values == 0
    assert all(one.isfinite().all() for one in gradients)


def test_views_that_start_anywhere():
    """Neighbours that do not lie at a multiple of their size are read one by one."""
    base = matrix(1000, dtype=FP32)
    check(base[1:].as_strided((13, 6), (6, 1)), base[103:].as_strided((13, 4), (4, 1)))


@pytest.mark.parametrize("wanted", [(False, False), (True, True)])
def test_opcheck(wanted):
    x, y = (z.requires_grad_(one) for z, one in zip(pair(23, 10, 6, (2,), (FP64, FP64)), wanted, strict=True))
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.fedkernels.linear_cka.default, (x, y, True, *wanted), test_utils=utilities)


def test_autocast_does_not_narrow():
    x, y = pair(23, 10, 6)
    kernel = y @ y.mT

    def everything():
        return [
            *linear_cka_cuda.linear_cka(x, y, True, *BOTH),
            *linear_cka_cuda.linear_cka_to_kernel(x, kernel, True, True),
            linear_cka_cuda.linear_cka_pairwise([x, y], [], True),
        ]

    plain = everything()
    with torch.autocast("cpu", torch.bfloat16):
        inside = everything()
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


# ---- against a kernel ----


@CENTERED
@pytest.mark.parametrize(
    ("rows", "width", "batch"), [(2, 1, ()), (7, 9, (3,)), (150, 3, (2, 1)), (70, 131, ()), (700, 3, ())]
)
def test_to_kernel_equals_the_reference(rows, width, batch, centered):
    x, y = pair(rows, width, 5, batch)
    check_to_kernel(x, y @ y.mT, centered)


@CENTERED
@pytest.mark.parametrize("dtypes", [(FP64, FP64), (FP32, FP64), (FP64, BF16), (BF16, FP32), (FP16, FP16)])
def test_to_kernel_in_other_dtypes(dtypes, centered):
    x, y = pair(23, 9, 5, dtypes=(dtypes[0], FP64))
    check_to_kernel(x, (y @ y.mT).to(dtypes[1]), centered, tolerance=1e-12 if FP64 in dtypes else 5e-6)


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


# ---- lists ----


@CENTERED
@pytest.mark.parametrize("entries", [1 << 24, 1, 300])
def test_pairwise_equals_the_reference(monkeypatch, entries, centered):
    monkeypatch.setattr(linear_cka_cuda, "_MOST_ENTRIES", entries)  # products in one piece, and in several
    shared = matrix(40, 4)
    widths = [3, 17, 1, 40, 8]
    xs = [(matrix(40, d, seed=n) + shared[:, : min(d, 4)].sum(1, True)).float() for n, d in enumerate(widths)]
    ys = [(matrix(40, d, seed=10 + d) + shared[:, :1]).float() for d in (5, 33)]
    for others in (ys, []):
        found = linear_cka_cuda.linear_cka_pairwise(xs, others, centered)
        wide = [[x.double() for x in some] for some in (xs, others or xs)]
        torch.testing.assert_close(found.double(), reference.linear_cka_pairwise(*wide, centered), rtol=2e-6, atol=0)
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


def test_no_problems():
    for found in (
        linear_cka_cuda.linear_cka(torch.ones(0, 5, 3), torch.ones(0, 5, 2), True, True, False),
        linear_cka_cuda.linear_cka_to_kernel(torch.ones(0, 5, 3), torch.ones(0, 5, 5), True, True),
    ):
        assert [one.shape for one in found[:2]] == [(0,), (0, 5, 3)]


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
    ],
    indirect=True,
)
def test_faults_are_found():
    x, y = pair(70, 13, 9)
    with pytest.raises(AssertionError):
        check(3 * x, 40 * y, True)
