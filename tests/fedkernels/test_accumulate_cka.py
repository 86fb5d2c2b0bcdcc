"""CKA from batches against CKA of all samples, and its state over workers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from fedkernels import (
    CKAAccumulator,
    MinibatchCKA,
    debiased_cka,
    debiased_cka_pairwise,
    linear_cka,
    linear_cka_pairwise,
)
from tests.fedkernels.refusals import refusals
from tests.fedkernels.test_debiased_cka import song_hsic
from tests.fedkernels.test_linear_cka import matrix

pytestmark = pytest.mark.cpu_only(reason="batches on a GPU have no kernels of their own")

SIZES = (5, 64, 1, 30)  # of the batches
BOTH = pytest.mark.parametrize("make", [CKAAccumulator, MinibatchCKA])


def pair(dtype=torch.float64, offset=0.0):
    x, y = matrix(sum(SIZES), 7, seed=1) + offset, matrix(sum(SIZES), 12, seed=2)
    return x.to(dtype), (y + x[:, :1]).to(dtype)


def layers(dtype=torch.float64):
    xs = [matrix(sum(SIZES), width, seed=width).to(dtype) for width in (3, 8, 5)]
    return xs, [matrix(sum(SIZES), 6, seed=9).to(dtype), xs[1].exp()]


def accumulated(x, y, make=CKAAccumulator, sizes=SIZES):
    accumulator, start = make(), 0
    for size in sizes:
        rows = slice(start, start + size)
        if isinstance(x, torch.Tensor):
            accumulator.update(x[rows], y[rows])
        else:
            accumulator.update([z[rows] for z in x], [z[rows] for z in y])
        start += size
    return accumulator


def wide_pair(rows=2500, offset=0.0):
    """Float32, wider than a strip of a symmetric product and longer than two blocks."""
    x, y = matrix(rows, 150, seed=3) + offset, matrix(rows, 40, seed=4)
    return x.float(), (y + x[:, :40]).float()


DRIFT = torch.linspace(0, 20, 2500)[:, None]


@pytest.mark.parametrize(
    "change",
    [
        # Near 3e4 float32 entries are multiples of 1/512, whose sums of squares float32 rounds down more often than up.
        pytest.param(lambda x, y: (x + 3e4, y + 3e4), id="a large mean"),
        # The first batch's means are ten standard deviations away from those of all samples.
        pytest.param(lambda x, y: (x + DRIFT, y - DRIFT), id="means that drift"),
        pytest.param(lambda x, y: (1e14 * x, 1e-14 * y), id="cubes out of range"),
    ],
)
def test_large_numbers_cost_no_precision(change):
    x, y = change(*wide_pair())
    accumulator = accumulated(x, y, sizes=(250, 1500, 1, 749))
    assert accumulator.count == 2500
    exact = x.double(), y.double()
    for debiased, truth in ((False, linear_cka(*exact, centered=True)), (True, debiased_cka(*exact))):
        torch.testing.assert_close(accumulator.compute(debiased), truth, rtol=5e-6, atol=0, check_dtype=False)


@pytest.mark.parametrize("sizes", [(300, 2200), (300, 724, 1024, 452), (300, 1, 2199)])
def test_the_sizes_of_later_batches_do_not_matter(sizes):
    x, y = wide_pair(offset=100.0)
    truth, accumulator = accumulated(x, y, sizes=(300, 1100, 1100)), accumulated(x, y, sizes=sizes)
    assert torch.equal(accumulator.compute(), truth.compute())
    assert torch.equal(accumulator.compute(debiased=True), truth.compute(debiased=True))


def assert_of_all_pairs(make, rows, x_widths, y_widths, dtype):
    """One batch, whose columns are not contiguous."""
    xs, ys = (
        [(matrix(width, rows, seed=width + side) + 0.5).to(dtype).T for width in widths]
        for side, widths in enumerate((x_widths, y_widths))
    )
    ys[0] = ys[0] + xs[0][:, :1]
    accumulator, exact = accumulated(xs, ys, make, (rows,)), ([x.double() for x in xs], [y.double() for y in ys])
    close = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    if make is CKAAccumulator:
        found, truth = accumulator.compute(), linear_cka_pairwise(*exact, centered=True)
        torch.testing.assert_close(found, truth, **close, check_dtype=False)
    found = accumulator.compute(debiased=True) if make is CKAAccumulator else accumulator.compute()
    torch.testing.assert_close(found, debiased_cka_pairwise(*exact), **close, check_dtype=False)


WIDTHS = st.lists(st.integers(2, 70), min_size=1, max_size=4)


@BOTH
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(6, 300), WIDTHS, WIDTHS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_any_number_of_representations_of_any_widths(make, rows, x_widths, y_widths, dtype):
    assert_of_all_pairs(make, rows, x_widths, y_widths, dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(300, 321), (40,) * 40, (257, 5, 290), (2, 700)])
def test_more_columns_than_a_piece_has(make, widths, dtype):
    """In the space of the samples, and in that of the features."""
    for rows in (250, 400):
        assert_of_all_pairs(make, rows, widths[: len(widths) // 2], widths[len(widths) // 2 :], dtype)


@pytest.mark.parametrize("rows", [20, 200])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_squares_of_products_may_be_out_of_float32s_range(rows, scale):
    x, y = matrix(rows, 30, seed=1).float(), matrix(rows, 9, seed=2).float()
    value, truth = (accumulated(z, y, MinibatchCKA, (rows,)).compute() for z in (scale * x, x))
    torch.testing.assert_close(value, truth, rtol=1e-4, atol=1e-5)


@BOTH
def test_two_workers_with_lists_join(make):
    xs, ys = layers()
    whole = accumulated(xs, ys, make, (50, 30, 20))
    first = accumulated([x[:50] for x in xs], [y[:50] for y in ys], make, (50,))
    other = accumulated([x[50:] for x in xs], [y[50:] for y in ys], make, (30, 20))
    before = first.compute()
    joined = make() + first + other + make()
    torch.testing.assert_close(joined.compute(), whole.compute(), rtol=1e-10, atol=1e-12)
    assert torch.equal(first.compute(), before)
    if make is CKAAccumulator:
        torch.testing.assert_close(joined.compute(), linear_cka_pairwise(xs, ys, True), rtol=1e-10, atol=0)
        torch.testing.assert_close(joined.compute(True), debiased_cka_pairwise(xs, ys), rtol=1e-10, atol=1e-12)
        assert joined.count == 100


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_joined_goes_on_alone(make, dtype):
    """In the dtype of the accumulators that it was made of, which its further batches do not change."""
    x, y = pair(dtype)
    first = accumulated(x, y, make, (50,))
    before = first.compute()
    joined = make() + first
    joined.update(x[50:], y[50:])
    torch.testing.assert_close(joined.compute(), accumulated(x, y, make, (50, 50)).compute())
    assert torch.equal(first.compute(), before)


@BOTH
@pytest.mark.parametrize("wide", ["x", "y"])
def test_one_float64_makes_all_float64(make, wide):
    x, y = pair()
    x, y = (x.float(), y.double()) if wide == "y" else (x.double(), y.float())
    value = accumulated(x, y, make, (50, 50)).compute()
    assert value.dtype == torch.float64
    assert torch.equal(value, accumulated(x.double(), y.double(), make, (50, 50)).compute())
    assert (make() + accumulated(x, y, make, (50, 50))).compute().dtype == torch.float64


@BOTH
def test_later_batches_are_taken_in_the_dtype_of_the_first(make):
    """MinibatchCKA rounds them to it."""
    x, y = pair(torch.float32) if make is CKAAccumulator else pair(offset=1e4)
    mixed = accumulated(x.float(), y.float(), make, (50,))
    mixed.update(x[50:].double(), y[50:].double())
    assert torch.equal(mixed.compute(), accumulated(x.float(), y.float(), make, (50, 50)).compute())


def of_rows(make, rows, sizes=(25,)):
    xs, ys = layers()
    return accumulated([x[rows] for x in xs], [y[rows] for y in ys], make, sizes)


def reduced(make):
    """The values of 25 samples a rank: of all ranks, of all and 10 more of this one, and of the last rank's alone."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    own = torch.arange(25 * rank, 25 * rank + 25)
    accumulator = of_rows(make, own)
    accumulator.all_reduce()
    values = [accumulator.compute()]
    accumulator.update(*([z[own[:10]] for z in zs] for zs in layers()))
    values.append(accumulator.compute())
    alone = dist.new_group([last])  # without the first process of all
    if rank == last:
        accumulator = of_rows(make, own)
        accumulator.all_reduce(alone)
        values.append(accumulator.compute())
    return values


@BOTH
def test_all_reduce(ranks, make):
    results = ranks(reduced, make)
    rows, sizes = torch.arange(25 * len(results)), len(results) * (25,)
    for (whole, longer, *_), own in zip(results, rows.split(25), strict=True):
        torch.testing.assert_close(whole, of_rows(make, rows, sizes).compute(), rtol=1e-10, atol=1e-12)
        # As many more as the others have would hide a shift by symmetry.
        truth = of_rows(make, torch.cat([rows, own[:10]]), (*sizes, 10)).compute()
        torch.testing.assert_close(longer, truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[-1][2], of_rows(make, rows[-25:]).compute(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rtol", "offset"), [(torch.float32, 1e-4, 1000.0), (torch.float32, 1e-4, 0), (torch.float64, 1e-10, 1000)]
)
def test_minibatches_of_few_wide_samples(dtype, rtol, offset):
    """The norms of the rows, which cancel out, are larger than what remains."""
    x, y = (matrix(6, 3000, seed=seed) + offset for seed in (5, 6))
    y[:, :1000] = x[:, :1000]
    x, y = x.to(dtype), y.to(dtype)
    value = accumulated(x, y, MinibatchCKA, (6,)).compute()
    torch.testing.assert_close(value, debiased_cka(x.double(), y.double()), rtol=rtol, atol=0, check_dtype=False)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-10), (torch.float32, 1.0), (torch.float64, 1e10)])
def test_degenerate_representations_have_cka_zero(dtype, scale):
    """Constant ones. Of samples equally far apart, or equal but for one, unbiased HSIC is 0 but for rounding."""
    constant, one_differs = (scale * matrix(7, seed=3)).expand(30, 7), torch.zeros(30, 5)
    one_differs[3] = 0.3 * scale
    y = matrix(30, 7, seed=1).to(dtype)
    for flat in (constant.to(dtype), (scale * torch.eye(30)).to(dtype), one_differs.to(dtype)):
        for x, other, sizes in ((flat, y, (7, 23)), (y, flat, (30,))):  # a plain mean of 7 equal numbers may be another
            of_batches, whole = (accumulated(x, other, make, sizes) for make in (MinibatchCKA, CKAAccumulator))
            assert of_batches.compute() == whole.compute(debiased=True) == 0
            assert whole.compute() == 0 or flat.shape != constant.shape


def test_minibatches_are_the_mean_of_unbiased_hsic():
    """Nguyen et al. 2021, Eq. 3, for batches of one size, by Song et al.'s formula."""
    x, y = pair()
    sums = torch.zeros(3).double()
    for a, b in zip(x.split(20), y.split(20), strict=True):
        k, l = a @ a.T, b @ b.T
        sums += torch.stack([song_hsic(k, l), song_hsic(k, k), song_hsic(l, l)])
    torch.testing.assert_close(
        accumulated(x, y, MinibatchCKA, 5 * (20,)).compute(), sums[0] / (sums[1] * sums[2]).sqrt()
    )


@BOTH
def test_not_finite_gives_nan_and_leaves_the_other_layers_alone(make):
    xs, ys = layers()
    xs[1] = xs[1].masked_fill(torch.arange(100)[:, None] == 60, torch.nan)
    ys[1][30, 2] = torch.inf
    isnan = accumulated(xs, ys, make, (50, 50)).compute().isnan()
    assert isnan.tolist() == [[False, True], [True, True], [False, True]]


@BOTH
def test_inputs_with_gradients_and_autocast(make):
    x, y = wide_pair()  # more rows than a block has, whose products are formed in update()
    sizes = (300, 2200)
    truth = accumulated(x, y, make, sizes).compute()
    with torch.autocast("cpu", torch.bfloat16):
        value = accumulated(x.requires_grad_(), y, make, sizes).compute()
    assert torch.equal(value, truth)
    assert not value.requires_grad


@BOTH
def test_batches_in_inference_mode_and_outside(make):
    x, y = wide_pair()
    value, other = make(), make()
    with torch.inference_mode():
        value.update(2 * x[:300] / 2, y[:300])
        other.update(x[1500:], y[1500:])
        value.compute()
    value.update(x[300:1500], y[300:1500])
    with torch.inference_mode():
        joined = value + other
    joined.update(x[:300], y[:300])
    whole = accumulated(*(torch.cat([z, z[:300]]) for z in (x, y)), make, (300, 1200, 1000, 300))
    torch.testing.assert_close(joined.compute(), whole.compute())


@pytest.mark.parametrize(("make", "fullgraph"), [(CKAAccumulator, False), (MinibatchCKA, True)])
def test_compiled_it_gives_the_same(make, fullgraph):
    """CKAAccumulator writes rows of a block in place, where torch.compile breaks its graph."""
    x, y = pair()

    def of_two_batches(x, y):
        return accumulated(x, y, make, (50, 50)).compute()

    torch.compiler.reset()
    compiled = torch.compile(of_two_batches, fullgraph=fullgraph, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), of_two_batches(x, y))


X = torch.ones(5, 3)


def started(make=CKAAccumulator):
    accumulator = make()
    accumulator.update(X, X)
    return accumulator


test_bad_input_is_named = refusals(
    (lambda: CKAAccumulator().compute(), ValueError, "CKAAccumulator has no samples: call update"),
    (lambda: MinibatchCKA().compute(), ValueError, "MinibatchCKA has no samples: call update"),
    (lambda: CKAAccumulator().all_reduce(), ValueError, "CKAAccumulator has no samples: call update"),
    (lambda: started().update(X, X[:4]), ValueError, "y must have the L = 5 rows of x, got 4"),
    (lambda: started().update(X, X[:, :2]), ValueError, r"y must have the widths \[3\] of the .*, got \[2\]"),
    (lambda: started().update([X, X], [X]), ValueError, r"x must have the widths \[3\] of the .*, got \[3, 3\]"),
    (lambda: started().update(X.to("meta"), X.to("meta")), ValueError, "device of the first batch"),
    (lambda: started(MinibatchCKA).update(X.to("meta"), X.to("meta")), ValueError, "device of the first batch"),
    (lambda: started().update(X, [X]), TypeError, "x must be a list of tensors"),
    (lambda: started().update(X[:0], X[:0]), ValueError, "x must not be empty"),
    (lambda: started().compute(1), TypeError, "debiased must be True or False, got int"),
    (lambda: accumulated(X[:3], X[:3], sizes=(3,)).compute(True), ValueError, "at least 4 samples, got 3"),
    (lambda: started(MinibatchCKA).update(X[:3], X[:3]), ValueError, "a batch must have at least 4 samples, got 3"),
    (lambda: started(MinibatchCKA).update([X, X], [X]), ValueError, "must hold 1 and 1 representations as the"),
    (lambda: started() + accumulated(X[:, :2], X, sizes=(5,)), ValueError, "of the other accumulator|widths"),
    (lambda: started() + 1, TypeError, "unsupported operand"),
)


def test_a_refused_batch_changes_nothing():
    accumulator = started()
    before = accumulator.count, accumulator.compute()
    with pytest.raises(ValueError, match="widths"):
        accumulator.update(X, X[:, :2])
    assert (accumulator.count, accumulator.compute()) == before
