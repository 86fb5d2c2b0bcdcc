"""fedkernels/internal/linear_cka_cuda.py on the emulated csrc/cuda/linear_cka_*.cu against the reference in float64."""

import pytest
import torch

from fedkernels.internal import linear_cka_cuda
from fedkernels.internal.linear_cka_cuda import linear_cka, linear_cka_pairwise, linear_cka_to_kernel
from fedkernels.reference import linear_cka as reference
from tests.fedkernels.test_linear_cka import matrix

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CENTERED = pytest.mark.parametrize("centered", [False, True])
BOTH, NEITHER = (True, True), (False, False)  # gradients
TOLERANCE = {linear_cka: 2e-6, linear_cka_to_kernel: 5e-6}  # in float32


def pair(rows, x_width, y_width=5, batch=(), dtypes=(FP32, FP32), call=linear_cka):
    """With something in common, and columns that are not centred. The second is a kernel where the call takes one."""
    x, y = matrix(*batch, rows, x_width), matrix(*batch, rows, y_width, seed=1) - 0.5
    shared = min(x_width, y_width)
    y[..., :shared] += x[..., :shared]
    return x.to(dtypes[0]), (y if call is linear_cka else y @ y.mT).to(dtypes[1])


def check(bindings, call, x, y, centered=False, wanted=BOTH, tolerance=2e-6):
    """`call`: linear_cka, or linear_cka_to_kernel, whose gradient is that in x alone."""
    wanted = wanted if call is linear_cka else wanted[:1]
    value, *gradients = bindings.results(call, x, y, centered, *wanted)
    wide = [z.double().requires_grad_() for z in (x, y)]
    truth = getattr(reference, call.__name__)(*wide, centered)
    assert value.dtype == (FP64 if FP64 in (x.dtype, y.dtype) else FP32)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=tolerance, atol=tolerance / 10)
    exact = torch.autograd.grad(truth.sum(), wide)[: len(wanted)]
    for found, true, z, one in zip(gradients, exact, (x, y), wanted, strict=False):
        assert found.shape == (z.shape if one else (0,))
        if one:  # two terms of the size of 1 / |z| may cancel
            sizes = true.abs().amax(dim=(-2, -1)) + 1 / z.double().norm(dim=(-2, -1))
            assert ((found.double() - true).abs() <= tolerance * sizes[..., None, None]).all()


@CENTERED
@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [((FP64, FP32), BOTH), ((FP32, FP64), (False, True)), ((BF16, FP32), (True, False)), ((FP32, FP16), NEITHER)],
    ids=str,
)
@pytest.mark.parametrize(("call", "x_width"), [(linear_cka, 10), (linear_cka, 30), (linear_cka_to_kernel, 9)])
def test_two_dtypes_and_only_the_gradients_that_are_wanted(bindings, call, x_width, dtypes, wanted, centered):
    of_wide = 1e-13 if call is linear_cka else 1e-12
    x, y = pair(23, x_width, 6, (2,), dtypes, call)
    check(bindings, call, x, y, centered, wanted, tolerance=of_wide if FP64 in dtypes else TOLERANCE[call])


@pytest.mark.parametrize("rows", [9, 31])
def test_any_number_of_pairs_takes_as_many_calls(bindings, rows):
    """Two calls of kernels and four products, of all pairs at a time."""
    with bindings.on_cuda() as called, torch.profiler.profile() as profile:
        linear_cka(*pair(rows, 8, 6, (70,)), True, *BOTH)
    assert called == ["linear_cka_prepare", "linear_cka_combine"]
    assert [one.count for one in profile.key_averages() if one.key in ("aten::bmm", "aten::mm")] == [4]


@CENTERED
@pytest.mark.parametrize("call", TOLERANCE)
@pytest.mark.parametrize("width", [3, 9])
def test_zeros_and_a_nan_leave_the_batch_alone(bindings, call, width, centered):
    """Constant columns are zero once they are centred: values like 0.1 leave rounding behind in a plain mean of 7."""
    x, y = pair(7, width, 3, (5,), call=call)
    row = (0.1 * matrix(width, seed=3)).float() * centered
    constant = row.expand(7, width)
    x[1] = constant
    y[2] = constant[:, :3] if call is linear_cka else constant @ constant.mT
    y[3, 3, 1] = torch.nan
    wanted = BOTH if call is linear_cka else (True,)
    values, *gradients = bindings.results(call, x, y, centered, *wanted)
    assert values.isnan().tolist() == [False, False, False, True, False]
    assert (values == 0).tolist() == [False, True, True, False, False]
    assert not any(one[1:3].any() for one in gradients)
    keep = torch.tensor([0, 4])
    alone = bindings.results(call, x[keep], y[keep], centered, *wanted)
    torch.testing.assert_close([values[keep], *(one[keep] for one in gradients)], list(alone), rtol=1e-5, atol=1e-7)


def test_a_similarity_of_zero_is_not_negative(bindings):
    """In sample space it is a sum of products, which rounding may leave below 0."""
    x, y = torch.zeros(8, 16), torch.zeros(8, 16)
    x[:4], y[4:] = matrix(4, 16, dtype=FP32), matrix(4, 16, seed=1, dtype=FP32)
    value, *gradients = bindings.results(linear_cka, x, y, False, *BOTH)
    assert value == 0
    assert all(one.isfinite().all() for one in gradients)


@pytest.mark.parametrize("wanted", [NEITHER, BOTH])
def test_opcheck(bindings, wanted):
    """With test_faketensor's comparison by hand, for it takes the margin before a result for a difference."""
    operator = torch.ops.fedkernels.linear_cka.default
    x, y = (z.requires_grad_(one) for z, one in zip(pair(23, 10, 6, (2,), (FP64, FP64)), wanted, strict=True))
    with bindings.on_cuda():
        utilities = "test_schema", "test_autograd_registration"
        torch.library.opcheck(operator, (x, y, True, *wanted), test_utils=utilities)
        found = operator(x, y, True, *wanted)
    for one, fake in zip(found, operator(x.to("meta"), y.to("meta"), True, *wanted), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_autocast_does_not_narrow(bindings):
    x, y = pair(23, 10, 6)

    def everything(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pairs = linear_cka(x, y, True, *BOTH)
            return *pairs, *linear_cka_to_kernel(x, kernel, True, True), linear_cka_pairwise([x, y], [], True)

    kernel = y @ y.mT
    plain, inside = (bindings.results(everything, enabled) for enabled in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


@CENTERED
def test_unusual_inputs(bindings, centered):
    """One row, chunks of many, many pairs; neighbours that do not lie at a multiple of their size, a kernel that is not
    symmetric, and a large mean.
    """
    for sizes in ((1 + centered, 1, 1), (2100, 2, 5), (9, 4, 5, (70,))):
        check(bindings, linear_cka, *pair(*sizes), centered)
    base = matrix(1000, dtype=FP32)
    check(bindings, linear_cka, base[1:].as_strided((13, 6), (6, 1)), base[103:].as_strided((13, 4), (4, 1)), centered)
    kernel = matrix(23, 23, seed=1, dtype=FP32)
    kernel[:, 3] += 2
    check(bindings, linear_cka_to_kernel, matrix(23, 5, dtype=FP32), kernel, centered, NEITHER, 5e-6)
    for dtype, tolerance in ((FP32, 5e-6), (FP64, 1e-12)):  # nothing that matters may cancel
        x, kernel = pair(90, 4, 3, (), (dtype, dtype), linear_cka_to_kernel)
        check(bindings, linear_cka_to_kernel, x + 10, kernel + 1000, True, tolerance=tolerance)


@CENTERED
@pytest.mark.parametrize("entries", [1 << 24, 1, 300])
def test_pairwise_equals_the_reference(bindings, monkeypatch, entries, centered):
    monkeypatch.setattr(linear_cka_cuda, "_MOST_ENTRIES", entries)  # products in one piece, and in several
    shared = matrix(40, 4)
    widths = [3, 17, 1, 40, 8]
    xs = [(matrix(40, d, seed=n) + shared[:, : min(d, 4)].sum(1, True)).float() for n, d in enumerate(widths)]
    ys = [(matrix(40, d, seed=10 + d) + shared[:, :1]).float() for d in (5, 33)]
    for others in (ys, []):
        found = bindings.results(linear_cka_pairwise, xs, others, centered)
        wide = [[x.double() for x in some] for some in (xs, others or xs)]
        torch.testing.assert_close(found.double(), reference.linear_cka_pairwise(*wide, centered), rtol=2e-6, atol=0)
    assert torch.equal(found, found.T)


def test_pairwise_of_more_matrices_than_a_call_takes(bindings):
    xs = [matrix(9, 1 + n % 3, seed=n, dtype=FP32 if n % 2 else BF16) for n in range(19)]
    xs[17] = torch.zeros(9, 3)
    xs[18][2, 0] = torch.nan
    found = bindings.results(linear_cka_pairwise, xs, [], True)
    truth = reference.linear_cka_pairwise([x.double() for x in xs], [x.double() for x in xs], True)
    torch.testing.assert_close(found.double(), truth, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert not found[17, :18].any()
