"""Every operator against its reference in float64, on shapes, strides and dtypes that hypothesis draws.

The references are held to independent solutions in the tests of each operator. Here the compiled operators, or what
serves in their place, are held to the references where blocking, padding and widening go wrong: at sizes beside the
kernels' tiles and blocks, on views of memory whose other entries are NaN, and on every instruction set.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedkernels
from fedkernels import reference
from fedkernels.reference import unbalanced_ot as reference_ot
from tests.fedkernels.conftest import rounding_of_weights

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Tiles have 4, 6 or 8 rows and 4 to 32 columns, blocks 252 or 256 rows, and hypothesis adds the primes.
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 251, 252, 253, 255, 256, 257)
SIZES = st.one_of(st.sampled_from(EDGES), st.integers(1, 300))
DTYPES = st.sampled_from([FP32, FP64, BF16, FP16])
LAYOUTS = st.sampled_from(["plain", "transposed", "sliced", "shifted", "expanded"])
SEEDS = st.integers(0, 9999)


def examples(count):
    return settings(derandomize=True, deadline=None, max_examples=count)


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values at other strides, surrounded by NaN; "expanded" repeats the first row instead."""
    if layout == "plain":
        return values.clone()
    if layout == "transposed":
        return values.mT.contiguous().mT
    if layout == "expanded":
        return values[..., :1, :].expand(values.shape)
    *batch, rows, columns = values.shape
    if layout == "sliced":
        around = values.new_full((*batch, 2 * rows + 1, 3 * columns + 2), torch.nan)
        view = around[..., 1::2, 2::3]
    else:  # "shifted": contiguous, but not at the start of its storage
        view = values.new_full((values.numel() + 1,), torch.nan)[1:].view(values.shape)
    return view.copy_(values)


def inputs(*specifications) -> tuple[list[Tensor], list[Tensor]]:
    """(values in float64, dtype, layout, needs a gradient) each -> the operator's tensors, and the same in float64."""
    narrow = [
        laid_out(values.to(dtype), layout).requires_grad_(needed) for values, dtype, layout, needed in specifications
    ]
    return narrow, [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in narrow]


def precision(*tensors: Tensor) -> float:
    """Of sums: 1e-11 where an input is float64, 1e-5 where all are narrower."""
    return 1e-11 if any(tensor.dtype == FP64 for tensor in tensors) else 1e-5


def assert_near(actual: Tensor, truth: Tensor, scale: float, tol: float) -> None:
    """Equal within tol of the size of what is summed, and one rounding to the dtype of `actual`."""
    limits = torch.finfo(actual.dtype)
    atol = tol * scale + limits.smallest_normal * limits.eps  # a rounding among the subnormals
    torch.testing.assert_close(actual.double(), truth, rtol=max(limits.eps, tol), atol=atol)


def assert_gradients_near(value, truth, narrow, wide, scales, tol, seed) -> None:
    """The gradients of both values, weighted by the same random numbers."""
    weights = 0.5 + torch.rand(truth.shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)
    asked = [(x, y, scale) for x, y, scale in zip(narrow, wide, scales, strict=True) if x.requires_grad]
    if not asked:
        assert not value.requires_grad
        return
    of_narrow = torch.autograd.grad((value * weights).sum(), [x for x, _, _ in asked])
    of_wide = torch.autograd.grad((truth * weights).sum(), [y for _, y, _ in asked])
    for (x, _, scale), grad, true_grad in zip(asked, of_narrow, of_wide, strict=True):
        assert grad.dtype == x.dtype
        # Where terms cancel, narrow gradients are no better than the sums that they come from.
        assert_near(grad, true_grad, scale + float(true_grad.abs().max()), tol)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


# ---- the contrastive losses ---------------------------------------------------------------------------------

TEMPERATURES = st.sampled_from([0.05, 0.2, 1.0, 10.0])
REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


def check_info_nce(batch, more, d, dtypes, layouts, needed, temperature, reduction, seed):
    query, key = randn(batch, d, seed=seed) / d**0.5, randn(batch + more, d, seed=seed + 1) / d**0.5
    narrow, wide = inputs((query, dtypes[0], layouts[0], needed[0]), (key, dtypes[1], layouts[1], needed[1]))
    value = fedkernels.info_nce(*narrow, temperature, reduction)
    truth = reference.info_nce.info_nce(*wide, temperature, reduction)
    assert value.dtype == (FP64 if FP64 in dtypes else FP32)
    tol, total = precision(*narrow), batch if reduction == "sum" else 1
    assert_near(value, truth, 1 + total * largest(query) * largest(key) / temperature, tol)
    scales = (largest(key) / temperature, largest(query) / temperature)
    tol = max(tol, rounding_of_weights(fedkernels.info_nce, *dtypes))
    assert_gradients_near(value, truth, narrow, wide, scales, tol, seed)


def check_nt_xent(batch, d, dtypes, layouts, needed, temperature, reduction, seed):
    both = randn(2, batch, d, seed=seed) / d**0.5
    narrow, wide = inputs((both[0], dtypes[0], layouts[0], needed[0]), (both[1], dtypes[1], layouts[1], needed[1]))
    value = fedkernels.nt_xent(*narrow, temperature, reduction)
    truth = reference.nt_xent.nt_xent(*wide, temperature, reduction)
    assert value.dtype == (FP64 if FP64 in dtypes else FP32)
    tol, total = precision(*narrow), 2 * batch if reduction == "sum" else 1
    assert_near(value, truth, 1 + total * largest(both) ** 2 / temperature, tol)
    tol = max(tol, rounding_of_weights(fedkernels.nt_xent, *dtypes))
    assert_gradients_near(value, truth, narrow, wide, (largest(both) / temperature,) * 2, tol, seed)


PAIRS = (st.tuples(DTYPES, DTYPES), st.tuples(LAYOUTS, LAYOUTS), st.tuples(st.booleans(), st.booleans()))


@examples(120)
@given(SIZES, st.one_of(st.just(0), SIZES), SIZES, *PAIRS, TEMPERATURES, REDUCTIONS, SEEDS)
def test_info_nce(batch, more, d, dtypes, layouts, needed, temperature, reduction, seed):
    check_info_nce(batch, more, d, dtypes, layouts, needed, temperature, reduction, seed)


@examples(100)
@given(SIZES, SIZES, *PAIRS, TEMPERATURES, REDUCTIONS, SEEDS)
def test_nt_xent(batch, d, dtypes, layouts, needed, temperature, reduction, seed):
    check_nt_xent(batch, d, dtypes, layouts, needed, temperature, reduction, seed)


@pytest.mark.cpu_only(reason="the blocks of the CPU kernels")
def test_the_edges_of_the_blocks():
    """Beside every size at which a kernel of info_nce or nt_xent begins a new tile, block or group."""
    used, wanted = fedkernels.build_info().get("cpu_used"), os.environ.get("FEDKERNELS_CPU")
    if wanted and used != wanted:
        pytest.skip(f"asked for {wanted}, {used} is used")
    widths = (1, 3, 31, 32, 33, 255, 256, 257, 513)
    for case, batch in enumerate((1, 2, 5, 17, 252, 253, 255, 256, 257, 505, 511, 512, 513)):
        for index, d in enumerate(widths[case % 3 :: 3]):
            for dtype in (FP32, FP64)[: 1 + case % 2]:
                seed = 1000 * batch + d
                for needed in ((True, False), (True, True)):
                    more = (0, 1, 300)[(index + needed[1]) % 3]
                    check_info_nce(batch, more, d, (dtype, dtype), ("plain", "plain"), needed, 0.2, "sum", seed)
                check_nt_xent(batch, d, (dtype, dtype), ("plain", "plain"), (True, True), 0.2, "mean", seed)


@pytest.mark.cpu_only(reason="instruction sets of the CPU")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("isa", [pytest.param("baseline", marks=pytest.mark.nightly), "avx2", "avx512"])
def test_the_edges_on_every_instruction_set(isa):
    info = fedkernels.build_info()
    if isa not in info["cpu_compiled"].split():
        pytest.skip(f"{isa} is not compiled on this machine")
    if isa == info["cpu_used"]:
        pytest.skip(f"{isa} is used here: the test above tried it")
    test = f"{Path(__file__)}::{test_the_edges_of_the_blocks.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test],
        env=os.environ | {"FEDKERNELS_CPU": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "1 skipped" in done.stdout:
        pytest.skip(f"this processor has no {isa}")
    assert "1 passed" in done.stdout


# ---- CKA ----------------------------------------------------------------------------------------------------

BATCHES = st.sampled_from([((), ()), ((3,), (3,)), ((2, 1), (3,)), ((), (2,))])
CENTERED = st.booleans()


def gradient_scale(x: Tensor) -> float:
    """Of d CKA / dx: it is a few times 1 / |x|_2, and |x|_F^2 <= rank |x|_2^2."""
    norms = x.detach().flatten(end_dim=-3).norm(dim=(-2, -1)) if x.ndim > 2 else x.detach().norm()
    smallest = float(norms.min())
    return 4 * min(x.shape[-2:]) ** 0.5 / smallest if smallest else 0.0


@examples(90)
@given(SIZES, SIZES, SIZES, BATCHES, *PAIRS, CENTERED, SEEDS)
def test_linear_cka(rows, d1, d2, batches, dtypes, layouts, needed, centered, seed):
    x = randn(*batches[0], rows, d1, seed=seed) + 0.3
    y = randn(*batches[1], rows, d2, seed=seed + 1) - 0.2
    narrow, wide = inputs((x, dtypes[0], layouts[0], needed[0]), (y, dtypes[1], layouts[1], needed[1]))
    value = fedkernels.linear_cka(*narrow, centered)
    truth = reference.linear_cka.linear_cka(*wide, centered)
    assert value.dtype == (FP64 if FP64 in dtypes else FP32)
    tol = precision(*narrow)
    assert_near(value, truth, 1, tol)
    assert_gradients_near(value, truth, narrow, wide, [gradient_scale(z) for z in wide], tol, seed)


@examples(60)
@given(SIZES, SIZES, SIZES, BATCHES, st.tuples(DTYPES, DTYPES), LAYOUTS, PAIRS[2], CENTERED, SEEDS)
def test_linear_cka_to_kernel(rows, d, rank, batches, dtypes, layout, needed, centered, seed):
    x = randn(*batches[0], rows, d, seed=seed) + 0.3
    y = randn(*batches[1], rows, rank, seed=seed + 1) - 0.2
    kernel_layout = "plain" if layout == "expanded" else layout  # which would not be symmetric
    narrow, wide = inputs((x, dtypes[0], layout, needed[0]), (y @ y.mT / rank, dtypes[1], kernel_layout, needed[1]))
    value = fedkernels.linear_cka_to_kernel(*narrow, centered)
    truth = reference.linear_cka.linear_cka_to_kernel(*wide, centered)
    assert value.dtype == (FP64 if FP64 in dtypes else FP32)
    tol = precision(*narrow)
    assert_near(value, truth, 1, tol)
    assert_gradients_near(value, truth, narrow, wide, [gradient_scale(z) for z in wide], tol, seed)


MATRICES = st.lists(st.tuples(st.integers(1, 80), DTYPES, LAYOUTS, st.booleans()), min_size=1, max_size=4)


@examples(40)
@given(SIZES, MATRICES, MATRICES, CENTERED, SEEDS)
def test_linear_cka_pairwise(rows, of_xs, of_ys, centered, seed):
    drawn = [(randn(rows, of[0], seed=seed + i) + 0.3, *of[1:]) for i, of in enumerate(of_xs + of_ys)]
    narrow, wide = inputs(*drawn)
    value = fedkernels.linear_cka_pairwise(narrow[: len(of_xs)], narrow[len(of_xs) :], centered)
    truth = reference.linear_cka.linear_cka_pairwise(wide[: len(of_xs)], wide[len(of_xs) :], centered)
    tol = precision(*narrow)
    assert value.dtype == (FP64 if tol < 1e-10 else FP32)
    assert_near(value, truth, 1, tol)
    scales = [4 * gradient_scale(z) for z in wide]  # the sum of as many
    assert_gradients_near(value, truth, narrow, wide, scales, tol, seed)


# ---- transport ----------------------------------------------------------------------------------------------


@examples(30)
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
@given(
    SIZES,
    st.integers(1, 40),
    st.sampled_from([(), (2,), (1, 3), (0, 2)]),
    st.tuples(DTYPES, DTYPES, DTYPES),
    LAYOUTS,
    st.tuples(st.floats(0.2, 3), st.floats(0.2, 3)),
    SEEDS,
)
def test_unbalanced_ot(rows, columns, batch, dtypes, layout, taus, seed):
    """Two solvers need not find the same plan: both values are certified, and row and column sums are unique."""
    shape = (*batch, rows, columns)
    masses = [0.2 + randn(*batch, size, seed=seed + size).abs() for size in (rows, columns)]
    narrow, wide = inputs(
        (2 * randn(*shape, seed=seed).sigmoid(), dtypes[0], layout, True),
        (masses[0], dtypes[1], "plain", True),
        (masses[1], dtypes[2], "plain", True),
    )
    tol = 1e-4
    value = fedkernels.unbalanced_ot(*narrow, *taus, tol=tol)
    plan, info = fedkernels.unbalanced_ot_plan(*narrow, *taus, tol=tol)
    assert value.dtype == plan.dtype == (FP64 if FP64 in dtypes else FP32)
    assert value.shape == info.gap.shape == batch
    if 0 in batch:
        return
    cost, a, b = (tensor.detach() for tensor in wide)
    with torch.no_grad():
        truth = reference_ot.unbalanced_ot(cost, a, b, *taus, tol=tol)
        size = reference_ot.objective(cost.abs(), a, b, *taus, plan.double())
    sums = precision(*narrow)
    assert (plan >= 0).all()
    assert (info.gap <= tol).all()
    assert ((value - truth).abs() <= (2 * tol + sums) * size).all()
    torch.testing.assert_close(
        reference_ot.objective(cost, a, b, *taus, plan.double()), value.double(), rtol=10 * sums, atol=sums
    )

    to_cost, to_a, to_b = torch.autograd.grad(value.sum(), narrow)
    assert [grad.dtype for grad in (to_cost, to_a, to_b)] == list(dtypes)
    assert_near(to_cost, plan.double(), largest(plan), sums)
    assert_near(to_a, taus[0] * (a - plan.double().sum(-1)), 10 * taus[0], sums)
    assert_near(to_b, taus[1] * (b - plan.double().sum(-2)), 10 * taus[1], sums)


# ---- the server's step --------------------------------------------------------------------------------------


@examples(60)
@given(st.integers(1, 60), st.integers(1, 150), st.sampled_from([(), (2,), (2, 1)]), DTYPES, LAYOUTS, SEEDS)
def test_client_weights(clients, entries, batch, dtype, layout, seed):
    deltas = randn(*batch, clients, entries, seed=seed) + 0.5 * randn(*batch, 1, entries, seed=seed + 1)
    layout = "plain" if layout == "expanded" else layout  # which would not be symmetric
    well_conditioned = entries > 2 * clients
    dtype = (
        dtype if well_conditioned else FP64
    )  # a matrix of deficient rank is a Gram matrix no more once it is rounded
    (gram,), (wide,) = inputs((deltas @ deltas.mT / entries, dtype, layout, False))
    weights, truth = fedkernels.client_weights(gram), reference.client_weights.client_weights(wide)
    assert weights.dtype == (FP64 if dtype == FP64 else FP32)
    assert weights.shape == gram.shape[:-1]
    assert (weights >= 0).all()
    weights, tol = weights.double(), 1e-9 if dtype == FP64 else 1e-6
    torch.testing.assert_close(weights.sum(-1), torch.ones(batch, dtype=FP64), rtol=0, atol=tol)
    found, optimum = ((p * (wide @ p[..., None]).squeeze(-1)).sum(-1) for p in (weights, truth))
    torch.testing.assert_close(found, optimum, rtol=1e-7, atol=tol * largest(wide))
    if well_conditioned:  # the optimum is in one place
        torch.testing.assert_close(weights, truth, rtol=0, atol=1e-6)


SHAPES = st.lists(
    st.one_of(st.lists(st.integers(0, 9), max_size=3), st.lists(SIZES, min_size=1, max_size=2)), min_size=1, max_size=4
)


def parameters(shapes, dtypes, layouts, seed) -> list[Tensor]:
    drawn = zip(shapes, dtypes, layouts, strict=False)
    return [
        laid_out(values.to(dtype), layout) if values.ndim > 1 and values.numel() else values.to(dtype)
        for values, dtype, layout in ((randn(*shape, seed=seed + i), *rest) for i, (shape, *rest) in enumerate(drawn))
    ]


FOUR_DTYPES, FOUR_LAYOUTS = (st.lists(kind, min_size=4, max_size=4) for kind in (DTYPES, LAYOUTS))


@pytest.mark.cpu_only(reason="float32 parameters are summed in float32 there: see test_cuda.py")
@examples(60)
@given(st.integers(1, 13), SHAPES, FOUR_DTYPES, FOUR_DTYPES, FOUR_LAYOUTS, SEEDS)
def test_delta_gram(clients, shapes, dtypes, client_dtypes, layouts, seed):
    start = parameters(shapes, dtypes, layouts, seed)
    others = [parameters(shapes, client_dtypes, layouts[::-1], seed + 10 * k) for k in range(1, clients + 1)]
    gram, truth = fedkernels.delta_gram(start, others), reference.delta_gram.delta_gram(start, others)
    assert torch.equal(gram, gram.T)
    torch.testing.assert_close(gram, truth, rtol=1e-12, atol=1e-12 * (1 + largest(truth)))


@examples(60)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=9), SHAPES, FOUR_DTYPES, FOUR_DTYPES, FOUR_LAYOUTS, SEEDS)
def test_apply_deltas(weights, shapes, dtypes, client_dtypes, layouts, seed):
    """Equal to the last bit, and no entry beside a view is touched."""
    layouts = ["plain" if layout == "expanded" else layout for layout in layouts]  # cannot be written to
    start = parameters(shapes, dtypes, layouts, seed)
    others = [parameters(shapes, client_dtypes, layouts[::-1], seed + 10 * k) for k in range(1, len(weights) + 1)]
    truth = [tensor.clone() for tensor in start]
    reference.apply_deltas.apply_deltas(truth, others, torch.tensor(weights, dtype=FP64))
    around = [tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.numel() for tensor in start]
    fedkernels.apply_deltas(start, others, weights)
    for tensor, true, spare in zip(start, truth, around, strict=True):
        assert torch.equal(tensor, true)
        if not tensor.isnan().any():
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            assert int(whole.isnan().sum()) == spare
