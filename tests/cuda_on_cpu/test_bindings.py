"""csrc/ops/*_cuda.cpp, and the Python that only tensors on a GPU take, on the emulated kernels.

The cases are those of tests/fedkernels/test_cuda.py.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import fedkernels
from fedkernels import (
    CKAAccumulator,
    MinibatchCKA,
    ViewOptions,
    apply_deltas,
    client_weights,
    debiased_cka,
    debiased_cka_pairwise,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    unbalanced_ot,
)
from fedkernels.internal import native, transport_warnings
from fedssl.regularizers.uniformity import Uniformity
from tests.cuda_on_cpu.bindings import IN_PYTHON
from tests.cuda_on_cpu.emulation import ORDERS, SANITIZED, assert_same
from tests.cuda_on_cpu.host_reads import HostReadError, no_host_reads
from tests.fedkernels import test_cuda
from tests.fedkernels.test_cuda import FP16, FP32, FP64, Case, assert_near, randn, with_gradients
from tests.fedssl.small_models import local_round, scalar_model, step_of

OF_REFERENCES = "apply_deltas", "delta_gram"  # which have no CUDA kernels

pytestmark = pytest.mark.skipif(SANITIZED, reason="margins around all memory find here what AddressSanitizer would")

TAKES_LONG = "unbalanced_ot", "unbalanced_ot, large"  # the case with masks has the former's sizes
# test_contrastive.py has the losses, but for these.
UNUSUAL_LOSSES = {name for name in test_cuda.OF_LOSSES if name.endswith(("one row", "two dtypes", "wide rows"))}
CASES = {
    name: case
    for name, case in test_cuda.CASES.items()
    if name not in {*TAKES_LONG, *test_cuda.OF_LOSSES} - UNUSUAL_LOSSES and not name.startswith(OF_REFERENCES)
}
CASES |= {
    "unbalanced_ot, a team of blocks, float16": Case(
        lambda cost: [unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, tol=1e-3)], [randn(2, 5, 150)], FP16, 5e-3
    ),
}


def exact(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Case:
    """The value and the gradients in float32."""
    return Case(with_gradients(call), list(tensors), FP32, 1e-5)


def of_batches(make: type[CKAAccumulator] | type[MinibatchCKA]) -> Case:
    def call(x, y):
        accumulator = make()
        for start in range(0, len(x), 30):
            accumulator.update(x[start : start + 30], y[start : start + 30])
        return [accumulator.compute()]

    return Case(call, [randn(100, 9), randn(100, 50, seed=1)], FP32, 1e-5)


X, Y = randn(40, 9), randn(40, 50, seed=1)
# What has no CUDA kernels of its own, and calls none where its reference serves.
WITHOUT_OWN_KERNELS = {
    "linear_cka_to_kernel, a gradient in the kernel": exact(linear_cka_to_kernel, X, Y @ Y.T),
    "linear_cka_pairwise, gradients": exact(lambda x, y: linear_cka_pairwise([x, y], [y]), X, Y),
    "linear_cka, broadcast": exact(lambda x: linear_cka(x, x[:1, ..., :3].detach()), randn(2, 3, 20, 9)),
    **{name: test_cuda.CASES[name] for name in test_cuda.CASES if name.startswith(OF_REFERENCES)},
    "debiased_cka": exact(debiased_cka, randn(2, 40, 9), randn(2, 40, 50, seed=1)),
    "debiased_cka_pairwise": Case(lambda x, y: [debiased_cka_pairwise([x, y], [y])], [X, Y], FP32, 1e-5),
    "CKAAccumulator": of_batches(CKAAccumulator),
    "MinibatchCKA": of_batches(MinibatchCKA),
    "unbalanced_ot, interior point": Case(
        with_gradients(lambda cost: unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, method="interior_point", tol=1e-9)),
        [randn(2, 5, 6).abs()],
        FP64,
        1e-6,
    ),
}


def inputs_and_truth(case):
    inputs = [tensor.to(case.dtype) for tensor in case.tensors]
    return inputs, case.call(*(tensor.double() for tensor in inputs))


def test_every_operator_is_there(bindings):
    parts = {*native.PARTS, *native.CONTRASTIVE_PARTS}
    assert {*native.COMPILED, *parts} - native.CPU_ONLY <= {*bindings.operators, *IN_PYTHON}


@pytest.mark.parametrize("name", CASES)
def test_case(bindings, name):
    case = CASES[name]
    inputs, truth = inputs_and_truth(case)
    with bindings.on_cuda() as called, no_host_reads(inputs) as watch:
        found = case.call(*inputs)
    assert called
    # It sees what C++ calls; that of the contrastive losses calls nothing.
    assert watch.seen_in_bindings or any(one.startswith("contrastive_") for one in called)
    assert_near(found, truth, case.tolerance)
    with bindings.on_cuda(ORDERS[1]):
        assert_same(found, case.call(*inputs))


@pytest.mark.parametrize("name", WITHOUT_OWN_KERNELS)
def test_without_own_kernels(bindings, name):
    """And the host does not wait for values, but in the interior point, whose reference looks at them."""
    case = WITHOUT_OWN_KERNELS[name]
    inputs, truth = inputs_and_truth(case)
    with bindings.on_cuda() as called, nullcontext() if "interior" in name else no_host_reads(inputs):
        found = case.call(*inputs)
    assert not called
    assert_near(found, truth, case.tolerance)


@pytest.mark.parametrize(
    ("call", "width", "other"),
    [
        (linear_cka, 9, 5),
        (linear_cka, 200, 5),
        (linear_cka_to_kernel, 9, 20),
        (lambda x, y: linear_cka_to_kernel(x, y, True), 9, 20),
    ],
)
def test_no_problems(bindings, call, width, other):
    x, y = torch.ones(0, 20, width, requires_grad=True), torch.ones(0, 20, other)
    with bindings.on_cuda() as called:
        value = call(x, y)
        (gradient,) = torch.autograd.grad(value.sum(), x)
    assert called
    assert value.shape == (0,)
    assert gradient.shape == x.shape


HALF, FLOAT, DOUBLE = torch.ones(4, 3, dtype=FP16), torch.ones(4, 3), torch.ones(4, dtype=FP64)
IMAGES, SAMPLES = torch.ones(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2)
ONE, LONG = torch.ones(1), torch.ones(1).expand(1, 2**24 + 1)
NOTHING = torch.ones(0)
OF_SIGMOID = 1.0, [NOTHING] * 6, NOTHING, 1.0, NOTHING, NOTHING, DOUBLE, NOTHING, NOTHING
OF_FINISH = 0, False, False, 1.0, 1.0, None, None, FLOAT
NO_OPTIONS = *[None] * 6, False, False, False
NO_GRADIENTS = False, False, False, ONE, NOTHING, None, None
OF_VIEWS = 1, 2, 3, 4, ViewOptions().numbers(), False, False


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("client_weights", (torch.ones(129, 129), 1e-8), "K <= 128"),
        ("contrastive_in_one", (HALF, HALF[:3], 0.5, True), "N >= B"),
        ("contrastive_in_one", (HALF, FLOAT, 0.5, True), "both float16"),
        ("contrastive_in_one", (HALF, HALF, 0.5, True), "64, 128 or 256 columns"),
        ("contrastive_sigmoid", (FLOAT, [0, 1, 3, 0, 0, 0], *OF_SIGMOID), "a tile of a matrix"),
        ("contrastive_sigmoid", (HALF, [0, 0, 3, 0, 0, 0], *OF_SIGMOID), "float32 or float64"),
        ("contrastive_sigmoid", (FLOAT, [1, 0, 3, 0, 0, 0], *OF_SIGMOID), "long enough"),
        ("contrastive_finish", (FLOAT, *OF_FINISH, FLOAT, *NO_GRADIENTS), "those of the tile"),
        ("contrastive_finish", (FLOAT, *OF_FINISH, FLOAT[:3], *NO_GRADIENTS), "the memory must"),
        ("contrastive_one_tile", (HALF, FLOAT, 0, False, False, *[1.0] * 5, *NO_OPTIONS), "one dtype"),
        (
            "contrastive_one_tile",
            (FLOAT, FLOAT[:3], 0, True, False, 1.0, 0.0, *[1.0] * 3, *NO_OPTIONS),
            "as many rows as columns",
        ),
        (
            "contrastive_one_tile",
            (FLOAT, FLOAT[:3], 0, False, False, *[1.0] * 5, *NO_OPTIONS),
            "as many rows as columns",
        ),
        ("linear_cka_prepare", ([FLOAT, FLOAT[:3]], False), "the same L"),
        ("linear_cka_prepare", ([FLOAT, FLOAT.int()], False), "must be float16"),
        ("linear_cka_prepare", ([FLOAT] * 17, False), "1 to 16 matrices"),
        ("linear_cka_combine", (HALF[None], HALF[None], FLOAT[:1], True, True, True), "float32 or float64"),
        ("two_views", (IMAGES.float(), SAMPLES, *OF_VIEWS), "images must be uint8"),
        ("two_views", (IMAGES, SAMPLES.int(), *OF_VIEWS), "samples must be contiguous int64"),
        ("two_views", (IMAGES[..., :1].repeat(1, 1, 1, 1025), SAMPLES, *OF_VIEWS), "sides of at most 1024"),
        ("unbalanced_ot", (FLOAT, FLOAT[0], FLOAT[0], 0.8, 0.9, 1e-3, 9, "steepest"), "a and b must have shapes"),
        ("unbalanced_ot", (LONG, ONE, LONG[0], 0.8, 0.9, 1e-3, 9, "accelerated"), "at most 2.24 rows and columns"),
    ],
)
def test_bad_arguments_are_refused(bindings, name, arguments, message):
    """Those of a direct call: Python's checks come first."""
    with pytest.raises(RuntimeError, match=message):
        bindings.operators[name](*arguments)


@pytest.mark.parametrize("name", ["info_nce", "clip_loss", "nt_xent", "sigmoid_loss"])
def test_second_derivatives_in_rows_that_are_not_contiguous_are_refused(bindings, name):
    first, second = (randn(24, 37, seed=seed).T.requires_grad_() for seed in (1, 2))
    more = (0.3, -2.0) if name == "sigmoid_loss" else (0.3,)
    with bindings.on_cuda():
        (gradient,) = torch.autograd.grad(getattr(fedkernels, name)(first, second, *more), first, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
            torch.autograd.grad(gradient.square().sum() + first.sum(), first)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: float(x.sum()),
        lambda x: bool(x.isnan().any()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.empty(3).copy_(x),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Stream.synchronize(None),
    ],
)
def test_a_host_read_is_found(read):
    x = torch.ones(3)
    with no_host_reads([x]):
        assert float(torch.ones(2).sum()) == 2  # of the host
        with pytest.raises(HostReadError):
            read((2 * x)[:])


def test_values_that_the_host_does_not_see(bindings):
    """Where the CPU raises an error or warns, a GPU gives NaN, or warns later."""
    bad, start = torch.diag(torch.tensor([1.0, 2.0, 4.0])).repeat(4, 1, 1), torch.zeros(4)
    bad[1, 0, 2], bad[2, 0, 1], bad[3, 1, 1] = torch.nan, 0.5, -1.0
    weights, bounds = torch.tensor([torch.inf]), torch.tensor([0.5, 0.6, 0.1])
    cost = torch.full((2, 2), 9.0)
    with bindings.on_cuda(), no_host_reads([bad, start, weights, bounds, cost]):
        of_bad = client_weights(bad)
        of_bounds = client_weights(bad[0], lower_bounds=bounds)
        apply_deltas([start], [[bad[0, 0, :1].expand(4)]], weights)
        value = unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)
    torch.testing.assert_close(of_bad[0], torch.tensor([4.0, 2.0, 1.0]) / 7)
    assert of_bad[1:].isnan().all()
    assert of_bounds.isnan().all()
    assert not start.isfinite().any()
    assert value == pytest.approx(1.6)


def test_a_later_call_warns_of_what_an_earlier_one_found(bindings, monkeypatch):
    """On a GPU the host does not wait for it, and looks at nothing while a graph is captured."""
    dear, cost = torch.full((2, 2), 9.0), randn(2, 6, 5).abs()
    with bindings.on_cuda(), no_host_reads([dear, cost]), warnings.catch_warnings():
        warnings.simplefilter("error")
        unbalanced_ot(dear, 1.0, 1.0, 0.8, 0.8)
        bindings.arrival.query.return_value = False  # the solution is not there yet
        unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)
        bindings.arrival.query.return_value = True
        with monkeypatch.context() as patch:
            patch.setattr(transport_warnings, "_is_captured", lambda gpu: True)
            unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)
        with pytest.warns(UserWarning, match="transports nothing in 1 of 1 problems of an earlier call on a GPU"):
            unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8, tol=1e-9, max_iterations=20)
        with pytest.warns(RuntimeWarning, match=r"reached in 2 of 2 problems of an earlier call on a GPU at .* gap"):
            unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)
        unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)


def test_a_step_of_fedu2s_regularizer_does_not_wait(bindings):
    """Neither for the plan, nor for what it logs, nor for an earlier step's warnings."""
    views = [randn(6, 8, seed=seed).requires_grad_() for seed in (0, 1)]
    term = Uniformity(name="uniformity", draws=2).start_round(local_round(scalar_model()))
    with bindings.on_cuda() as called, no_host_reads(views):
        for _ in range(2):
            term(step_of(*views)).backward()
    assert called == ["unbalanced_ot"] * 2
    assert all(view.grad.any() for view in views)
