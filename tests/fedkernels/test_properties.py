"""Every path of the table against its reference in float64, on shapes, strides and dtypes that are drawn.

The references are held to independent solutions in the tests of each operator. Here the compiled operators, or what
serves in their place, are held to the references where blocking, padding and widening go wrong: at sizes beside the
kernels' tiles and blocks, on views of memory whose other entries are NaN, and on every instruction set.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedkernels
from fedkernels import reference
from fedkernels.reference import unbalanced_ot as reference_ot
from tests.fedkernels.conftest import by_reference, rounding_of_weights
from tests.fedkernels.inputs import FP64, randn
from tests.fedkernels.operators import DIFFERENTIABLE, OF_CONTRASTIVE, PATHS, REFERENCES, value_and_gradients

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Tiles have 4, 6 or 8 rows and 4 to 32 columns, blocks 252 or 256 rows. Last come sizes far from these.
EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 251, 252, 253, 255, 256, 257)
SIZES = (*EDGES, 23, 101, 293)
OF_GROUPS = (505, 511, 512, 513)  # of rows, in info_nce and nt_xent
DTYPES = FP32, FP64, BF16, FP16
LAYOUTS = "plain", "transposed", "sliced", "shifted", "expanded"
ANY_SIZE, ANY_DTYPE, ANY_LAYOUT = st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)
FOUR_DTYPES, FOUR_LAYOUTS = (st.lists(one, min_size=4, max_size=4) for one in (ANY_DTYPE, ANY_LAYOUT))
SEEDS = st.integers(0, 9999)


def examples(count):
    return settings(derandomize=True, deadline=None, max_examples=count)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values at other strides, surrounded by NaN; "expanded" repeats the first row instead."""
    if layout == "plain" or values.ndim < 2 or values.numel() == 0:
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


def precision(*tensors: Tensor) -> float:
    """Of sums: 1e-11 where a matrix is float64, 1e-5 where all are narrower."""
    return 1e-11 if any(tensor.dtype == FP64 for tensor in tensors if tensor.ndim) else 1e-5


def assert_near(actual: Tensor, truth: Tensor, scale: float, tol: float) -> None:
    """Equal within tol of the size of what is summed, and one rounding to the dtype of `actual`."""
    limits = torch.finfo(actual.dtype)
    atol = tol * scale + limits.smallest_normal * limits.eps  # a rounding among the subnormals
    torch.testing.assert_close(actual.double(), truth, rtol=max(limits.eps, tol), atol=atol)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def compare(name: str, sizes, seed: int, dtypes, layouts, needed, options) -> None:
    """Value and gradients of a path, and those of its reference for the same inputs in float64.

    The losses of rows count differently.
    """
    path = PATHS[name]
    narrow = []
    for number, (values, dtype, layout, need) in enumerate(
        zip(path.inputs(*sizes, seed), dtypes, layouts, needed, strict=False)
    ):
        plain = number in path.symmetric and layout == "expanded"
        tensor = laid_out(values.to(dtype), "plain" if plain else layout)
        narrow.append(tensor.requires_grad_(need and path.learns(number, tensor)))
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in narrow]

    def weighted(*tensors: Tensor, **source) -> Tensor:
        value = path.call(*tensors, **options, **source)
        values.append(value)
        return value * (0.5 + torch.rand(value.shape, generator=torch.Generator().manual_seed(seed), dtype=FP64))

    values: list[Tensor] = []
    _, *gradients = value_and_gradients(weighted, narrow)
    _, *truths = value_and_gradients(weighted, wide, source=REFERENCES)
    tol, (scale, scales) = precision(*narrow), path.scale(wide, **options)
    assert values[0].dtype == (FP64 if tol < 1e-5 else FP32)
    assert_near(values[0].detach(), values[1].detach(), scale, tol)
    tol = max(tol, rounding_of_weights(fedkernels.info_nce, *(tensor.dtype for tensor in narrow if tensor.ndim > 1)))
    asked = [(tensor, size) for tensor, size in zip(narrow, scales, strict=True) if tensor.requires_grad]
    assert len(gradients) == len(asked)
    for (tensor, size), gradient, truth in zip(asked, gradients, truths, strict=True):
        assert gradient.dtype == tensor.dtype
        # Where terms cancel, narrow gradients are no better than the sums that they come from.
        assert_near(gradient, truth, size + largest(truth), tol)


COMPARED = [name for name, path in PATHS.items() if path.scale is not None]


def in_turn(drawn: random.Random, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Values for four tensors: of the first two each pair, in a drawn order, before any comes again."""
    pairs = [*itertools.product(values, repeat=2)]
    return itertools.cycle([pair + pair[::-1] for pair in drawn.sample(pairs, len(pairs))])


@pytest.mark.parametrize("name", COMPARED)
def test_equals_its_reference_in_float64(name):
    """With each size as a number of rows, as one of columns, and every other one as one of further rows."""
    path, drawn = PATHS[name], random.Random(name)
    of_name = SIZES + OF_GROUPS if name.startswith(("info_nce", "nt_xent")) else SIZES
    sizes = zip(*(drawn.sample(of_name, len(of_name)) for _ in range(3)), strict=True)
    hows = (in_turn(drawn, *values) for values in (DTYPES, LAYOUTS, (False, True)))
    for seed, ((rows, columns, more), *how) in enumerate(zip(sizes, *hows, strict=False)):
        if "pairwise" in name:  # whose products are many; its narrower gradients are sums of rounded ones
            columns, more, widest = 1 + columns % 80, 1 + more % 80, FP64 if FP64 in how[0] else FP32
            how[2] = [need and dtype == widest for dtype, need in zip(how[0], how[2], strict=True)]
        options = {option: drawn.choice(values) for option, values in path.draws.items()}
        print(rows, columns, more, *how, options)  # the last one fails
        compare(name, (rows, columns, more * (seed % 2)), seed, *how, options)


@pytest.mark.references_too
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "with itself" not in name])
def test_gradcheck(name):
    """Of all inputs and of each alone, with fewer columns than rows and with more, for every reduction."""
    path = PATHS[name]
    limits = {"atol": 1e-5, "rtol": 1e-4} if path.exact else {}
    for sizes in ((5, 7, 6), (4, 3, 2))[: 1 if path.by_reference else 2]:
        leaves = path.leaves(path.inputs(*sizes, 5))
        learned = [leaf for leaf in leaves if leaf.requires_grad]
        for wanted in [learned, *([leaf] for leaf in learned if len(learned) > 1)]:
            given = [leaf if any(leaf is one for one in wanted) else leaf.detach() for leaf in leaves]
            # Along random directions: of a solver a few solves, not two for each entry, and of each input once more.
            limits["fast_mode"] = bool(path.exact) or len(wanted) < len(learned)
            for reduction in path.draws.get("reduction", [None]):
                options = dict(path.exact) if reduction is None else {"reduction": reduction}
                assert torch.autograd.gradcheck(lambda *x, options=options: path.call(*x, **options), given, **limits)


@pytest.mark.cpu_only(reason="the blocks of the CPU kernels")
@pytest.mark.parametrize("name", PATHS)
def test_many_blocks(name):
    """Of every path, at a size of several blocks with a rest in each direction."""
    path = PATHS[name]
    rows = 2105 if name.partition(",")[0] in OF_CONTRASTIVE else 605  # a span of 8 blocks of logits has up to 2048
    rows = 1053 if name.startswith("nt_xent") else rows  # whose logits are those of both views
    sizes = (33, 21, 0) if path.exact or "pairwise" in name else (rows, 43, 300)
    sizes = (70, 90, 0) if name.startswith("client_weights") else sizes
    for dtype in (FP32, FP64):
        if path.scale is not None:
            compare(name, sizes, 1, 4 * [dtype], 4 * ["plain"], 4 * [True], {})
            continue
        leaves = path.leaves(path.inputs(*sizes, 1), dtype)
        found = value_and_gradients(path.call, leaves, **path.exact)
        with by_reference():
            truths = value_and_gradients(path.call, path.leaves(leaves), **path.exact)
        for one, truth in zip(found, truths, strict=True):
            tol = 1e-4 if path.exact else 1e-5 if one.dtype == FP32 else 1e-8
            torch.testing.assert_close(one.double(), truth.double(), rtol=tol, atol=tol * largest(truth))


@pytest.mark.cpu_only(reason="instruction sets of the CPU")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("isa", "edges"),
    [("baseline", False), pytest.param("baseline", True, marks=pytest.mark.nightly), ("avx2", True), ("avx512", True)],
)
def test_every_instruction_set(isa, edges):
    """In a process of its own, which chooses it when it starts."""
    info = fedkernels.build_info()
    if isa not in info["cpu_compiled"].split():
        pytest.skip(f"{isa} is not compiled on this machine")
    if isa == info["cpu_used"]:
        pytest.skip(f"{isa} is used here: the tests above tried it")
    code = f"from tests.fedkernels.test_properties import compare_all_blocks; compare_all_blocks({edges})"
    env = os.environ | {"FEDKERNELS_CPU": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.split()[0] != isa:
        pytest.skip(f"this processor has no {isa}")


def compare_all_blocks(edges: bool) -> None:
    """What it prints tells the instruction set, and the path that fails."""
    print(fedkernels.build_info()["cpu_used"])
    for name in PATHS:
        print(name)
        test_many_blocks(name)
    for name in ("info_nce", "nt_xent") if edges else ():
        print(name)
        test_equals_its_reference_in_float64(name)


TAUS = st.tuples(st.floats(0.2, 3), st.floats(0.2, 3))


@examples(30)
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
@given(
    *(ANY_SIZE, st.integers(1, 40), st.sampled_from([(), (1, 3)])),
    *(st.tuples(ANY_DTYPE, ANY_DTYPE, ANY_DTYPE), ANY_LAYOUT, TAUS, SEEDS),
)
def test_unbalanced_ot(rows, columns, batch, dtypes, layout, taus, seed):
    """Two solvers need not find the same plan: both values are certified, and row and column sums are unique."""
    given = [
        2 * randn(*batch, rows, columns, seed=seed).sigmoid(),
        *(0.2 + randn(*batch, size, seed=seed + size).abs() for size in (rows, columns)),
    ]
    narrow = [laid_out(x.to(dtype), layout).requires_grad_() for x, dtype in zip(given, dtypes, strict=True)]
    tol, sums = 1e-4, precision(*narrow)
    value = fedkernels.unbalanced_ot(*narrow, *taus, tol=tol)
    plan, info = fedkernels.unbalanced_ot_plan(*narrow, *taus, tol=tol)
    assert value.dtype == plan.dtype == (FP64 if FP64 in dtypes else FP32)
    cost, a, b = (tensor.detach().double() for tensor in narrow)
    with torch.no_grad():
        truth = reference_ot.unbalanced_ot(cost, a, b, *taus, tol=tol)
        of_plan, size = (reference_ot.objective(one, a, b, *taus, plan.double()) for one in (cost, cost.abs()))
    assert (plan >= 0).all()
    assert (info.gap <= tol).all()
    assert ((value - truth).abs() <= (2 * tol + sums) * size).all()
    torch.testing.assert_close(of_plan, value.double(), rtol=10 * sums, atol=sums)

    to_cost, to_a, to_b = torch.autograd.grad(value.sum(), narrow)
    assert_near(to_cost, plan.double(), largest(plan), sums)
    assert_near(to_a, taus[0] * (a - plan.double().sum(-1)), 10 * taus[0], sums)
    assert_near(to_b, taus[1] * (b - plan.double().sum(-2)), 10 * taus[1], sums)


SHAPES = st.lists(
    st.one_of(st.lists(st.integers(0, 9), max_size=3), st.lists(ANY_SIZE, min_size=1, max_size=2)),
    min_size=1,
    max_size=4,
)


def parameters(shapes, dtypes, layouts, seed) -> list[Tensor]:
    drawn = zip(shapes, dtypes, layouts, strict=False)
    return [laid_out(randn(*shape, seed=seed + i).to(dtype), *how) for i, (shape, dtype, *how) in enumerate(drawn)]


@examples(60)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=13), SHAPES, FOUR_DTYPES, FOUR_DTYPES, FOUR_LAYOUTS, SEEDS)
def test_delta_gram_and_apply_deltas(weights, shapes, dtypes, client_dtypes, layouts, seed):
    """The steps are equal to the last bit, and no entry beside a view is touched."""
    layouts = ["plain" if layout == "expanded" else layout for layout in layouts]  # cannot be written to
    start = parameters(shapes, dtypes, layouts, seed)
    others = [parameters(shapes, client_dtypes, layouts[::-1], seed + 10 * k) for k in range(1, len(weights) + 1)]
    gram, true_gram = fedkernels.delta_gram(start, others), reference.delta_gram.delta_gram(start, others)
    torch.testing.assert_close(gram, true_gram, rtol=1e-12, atol=1e-12 * (1 + largest(true_gram)))
    truth = [tensor.clone() for tensor in start]
    reference.apply_deltas.apply_deltas(truth, others, torch.tensor(weights, dtype=FP64))
    around = [tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.numel() for tensor in start]
    fedkernels.apply_deltas(start, others, weights)
    for tensor, true, spare in zip(start, truth, around, strict=True):
        assert torch.equal(tensor, true)
        if not tensor.isnan().any():
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            assert int(whole.isnan().sum()) == spare
