"""csrc/ops/*_cuda.cpp, and the Python that only tensors on a GPU take, on the emulated kernels.

g++ compiles the bindings with include/ops/cuda.h, for which tensors on the CPU are CUDA's. They take the place of the
CPU's operators as long as a case runs, and the cases are those of tests/fedkernels/test_cuda.py.
"""

import ctypes
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fedkernels import (
    CKAAccumulator,
    MinibatchCKA,
    ViewOptions,
    apply_deltas,
    client_weights,
    clip_loss,
    debiased_cka,
    debiased_cka_pairwise,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    sigmoid_loss,
    supervised_contrastive_loss,
    unbalanced_ot,
)
from fedkernels.internal import checks, contrastive_cuda, linear_cka_cuda, native, transport_warnings
from fedssl.regularizers.uniformity import Uniformity
from tests.cuda_on_cpu.emulation import ORDERS, ROOT, SANITIZED, planted
from tests.cuda_on_cpu.host_reads import HostReadError, no_host_reads
from tests.fedkernels import test_cuda
from tests.fedkernels.test_cuda import (
    BF16,
    FP16,
    FP32,
    FP64,
    MORE,
    ROWS,
    Case,
    assert_equal,
    assert_near,
    randn,
    with_gradients,
)
from tests.fedssl.regularizers.terms import Local, step_of

OPS = ROOT / "csrc/ops"
SOURCES = sorted(OPS.glob("*_cuda.cpp"))
OF_REFERENCES = "apply_deltas", "delta_gram"  # which have no CUDA kernels
# What fedkernels/linear_cka.py and fedkernels/internal/contrastive.py register for CUDA.
IN_PYTHON = {
    **contrastive_cuda.OPERATORS,
    "linear_cka": linear_cka_cuda.linear_cka,
    "linear_cka_to_kernel": linear_cka_cuda.linear_cka_to_kernel,
    "linear_cka_pairwise": linear_cka_cuda.linear_cka_pairwise,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*verriding a previously registered kernel"),
    pytest.mark.skipif(SANITIZED, reason="margins around all memory find here what AddressSanitizer would"),
]


def without_those_for_the_cpu(operator: Callable[..., object]) -> Callable[..., object]:
    return lambda name, *tensors: None if name in native.CPU_ONLY else operator(name, *tensors)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """What a copy that nobody waits for brings to the host: `no_host_reads` does not see it."""
    with _disable_current_modes():
        return tensor.clone()


class Bindings:
    """The operators of some C++ as torch.ops.<library>'s."""

    def __init__(self, compiler, texts: Sequence[str], library: str, kernels: str = "*.cu") -> None:
        if native.module is None:
            pytest.skip("the operators are declared by fedkernels._C, which is not compiled")
        text = "\n".join(texts)  # of all files, for torch's headers are most of the work
        names = re.findall(r'm\.impl\("(\w+)"', text)
        self.declared = torch.library.Library(library, "FRAGMENT")
        for name in names:
            self.declared.define(name + native.SCHEMAS[name])
        self.handle = compiler.bindings(text, library, kernels)
        self.operators = {name: getattr(getattr(torch.ops, library), name).default for name in names}
        self.arrival = Mock(**{"query.return_value": True})  # of what is copied to the host meanwhile

    @contextmanager
    def on_cuda(self, order: tuple[int, bool] = ORDERS[0]) -> Iterator[list[str]]:
        """Tensors on the CPU count as CUDA's, and fedkernels' operators are these. -> the names of those called

        Those for the CPU alone are not found, as on a GPU.
        """
        self.handle.cuda_on_cpu_settings(order[0], int(order[1]), 4, ctypes.c_size_t(227 << 10))
        called: list[str] = []

        def noting(name, operator):
            def call(*arguments):
                called.append(name)
                return operator(*arguments)

            return call

        with torch.library._scoped_library("fedkernels", "IMPL") as registered, pytest.MonkeyPatch.context() as patch:
            for name, operator in {**self.operators, **IN_PYTHON}.items():
                registered.impl(name, noting(name, operator), "CPU")
            patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
            patch.setattr(native, "CUDA", frozenset({*native.COMPILED} - native.CPU_ONLY))
            patch.setattr(checks, "has_values", lambda tensor: False)
            patch.setattr(transport_warnings, "_unread", None)
            patch.setattr(transport_warnings, "_is_captured", lambda gpu: False)
            patch.setattr(transport_warnings, "_copy_to_host", lambda facts: (host_copy(facts), self.arrival))
            patch.setattr(native, "operator", without_those_for_the_cpu(native.operator))
            yield called


CASES = {
    name: case
    for name, case in test_cuda.CASES.items()
    if name != "unbalanced_ot, large" and not name.startswith(OF_REFERENCES)  # the former takes minutes here
}
CASES |= {
    "unbalanced_ot, a team of blocks, float16": Case(
        lambda cost: [unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, tol=1e-3)], [randn(2, 5, 150)], FP16, 5e-3
    ),
    "linear_cka, one gradient": Case(
        with_gradients(lambda x: linear_cka(x, x[..., :3].detach())), [randn(2, 3, 20, 9)], BF16, 1e-2
    ),
    "linear_cka_pairwise, more than one call takes": Case(
        lambda *zs: [linear_cka_pairwise(zs, zs)], [randn(9, 1 + n % 3, seed=n) for n in range(19)], FP32, 1e-5
    ),
}
NUMBERS = torch.arange(len(MORE))


def of_batches(make: type[CKAAccumulator] | type[MinibatchCKA]) -> Callable[..., list[torch.Tensor]]:
    def call(x, y):
        accumulator = make()
        for start in range(0, len(x), 30):
            accumulator.update(x[start : start + 30], y[start : start + 30])
        return [accumulator.compute()]

    return call


SIMILARITIES = {"similarity_logsumexp", "similarity_logsumexp_gradients"}
# What has no CUDA kernels of its own: the kernels of others that it calls, or none where its reference serves.
WITHOUT_OWN_KERNELS = {
    "info_nce, a tensor of temperature": (
        {"info_nce"},
        Case(with_gradients(lambda q, k, t: info_nce(q, k, t)), [ROWS, MORE, torch.tensor(0.3)], FP32, 1e-5),
    ),
    "info_nce, an offset and negatives": (
        {"info_nce"},
        Case(
            with_gradients(lambda q, k, n: info_nce(q, k, 0.3, positives=4, negatives=n)),
            [ROWS, MORE, ROWS],
            FP32,
            1e-5,
        ),
    ),
    "info_nce, positives and labels": (
        SIMILARITIES,
        Case(
            with_gradients(
                lambda q, k: info_nce(q, k, 0.3, positives=NUMBERS[1:38], labels=(NUMBERS[:37] % 5, NUMBERS % 5))
            ),
            [ROWS, MORE],
            FP32,
            1e-5,
        ),
    ),
    "info_nce, excluded": (
        SIMILARITIES,
        Case(
            with_gradients(lambda q, k: info_nce(q, k, 0.3, excluded=NUMBERS[:37, None] % 7 == NUMBERS % 5)),
            [ROWS, MORE],
            FP32,
            1e-5,
        ),
    ),
    "nt_xent, a tensor of temperature": (
        {"nt_xent"},
        Case(with_gradients(lambda p, q, t: nt_xent(p, q, t)), [ROWS, MORE[:37], torch.tensor(0.3)], FP32, 1e-5),
    ),
    "clip_loss": (SIMILARITIES, Case(with_gradients(lambda p, q: clip_loss(p, q, 0.7)), [ROWS, MORE[:37]], FP32, 1e-5)),
    "supervised_contrastive_loss, an even number of rows": (
        {"nt_xent", "nt_xent_gradients"},
        Case(with_gradients(lambda z: supervised_contrastive_loss(z, NUMBERS[:36] % 5, 2.0)), [ROWS[:36]], FP32, 1e-5),
    ),
    "supervised_contrastive_loss, an odd number of rows": (
        SIMILARITIES,
        Case(with_gradients(lambda z: supervised_contrastive_loss(z, NUMBERS[:37] % 5, 2.0)), [ROWS], FP32, 1e-5),
    ),
    "sigmoid_loss": (
        {"sigmoid_loss"},
        Case(with_gradients(lambda p, q: sigmoid_loss(p, q, 0.7, -2.0)), [ROWS, MORE[:37]], FP32, 1e-5),
    ),
    "linear_cka_to_kernel, a gradient in the kernel": (
        set(),
        Case(with_gradients(linear_cka_to_kernel), [randn(40, 9), randn(40, 50) @ randn(40, 50).T], FP32, 1e-5),
    ),
    "linear_cka_pairwise, gradients": (
        set(),
        Case(with_gradients(lambda x, y: linear_cka_pairwise([x, y], [y])), [randn(40, 9), randn(40, 50)], FP32, 1e-5),
    ),
    "linear_cka, broadcast": (
        set(),
        Case(with_gradients(lambda x: linear_cka(x, x[:1, ..., :3].detach())), [randn(2, 3, 20, 9)], FP32, 1e-5),
    ),
    **{name: (set(), test_cuda.CASES[name]) for name in test_cuda.CASES if name.startswith(OF_REFERENCES)},
    "debiased_cka": (
        set(),
        Case(with_gradients(debiased_cka), [randn(2, 40, 9), randn(2, 40, 50, seed=1)], FP32, 1e-5),
    ),
    "debiased_cka_pairwise": (
        set(),
        Case(lambda x, y: [debiased_cka_pairwise([x, y], [y])], [randn(40, 9), randn(40, 50, seed=1)], FP32, 1e-5),
    ),
    "CKAAccumulator": (set(), Case(of_batches(CKAAccumulator), [randn(100, 9), randn(100, 50, seed=1)], FP32, 1e-5)),
    "MinibatchCKA": (set(), Case(of_batches(MinibatchCKA), [randn(100, 9), randn(100, 50, seed=1)], FP32, 1e-5)),
    "unbalanced_ot, interior point": (
        set(),
        Case(
            with_gradients(lambda cost: unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, method="interior_point", tol=1e-9)),
            [randn(2, 5, 6).abs()],
            FP64,
            1e-6,
        ),
    ),
}
# In a file of csrc/ops, and the case that finds it.
FAULTS = {
    "client_weights": ("client_weights", "device.stream()", "nullptr"),
    "info_nce, float32": ("contrastive", "tile.scale = scale;", "tile.scale = 1.01 * scale;"),
    "linear_cka, centered": ("linear_cka", "given.centered = centered;", "given.centered = !centered;"),
    "two_views": ("two_views", "batch.views[1] = data_or_null(second)", "batch.views[1] = data_or_null(first)"),
    "unbalanced_ot": ("unbalanced_ot", "tau_a,\n                                     tau_b", "tau_b, tau_a"),
}


@pytest.fixture(scope="module")
def bindings(compiler):
    return Bindings(compiler, [path.read_text(encoding="utf-8") for path in SOURCES], "cuda_on_cpu")


@pytest.fixture(scope="module")
def faulty(compiler):
    texts = [planted(OPS / f"{name}_cuda.cpp", *fault) for name, *fault in FAULTS.values()]
    return Bindings(compiler, texts, "cuda_on_cpu_faulty")


def check(bindings, name):
    case = CASES[name]
    inputs = [tensor.to(case.dtype) for tensor in case.tensors]
    truth = case.call(*(tensor.double() for tensor in inputs))
    with bindings.on_cuda() as called, no_host_reads(inputs) as watch:
        found = case.call(*inputs)
    assert called
    # It sees what C++ calls; that of the contrastive losses calls nothing.
    assert watch.seen_in_bindings or any(one.startswith("contrastive_") for one in called)
    assert_near(found, truth, case.tolerance)
    with bindings.on_cuda(ORDERS[1]):
        again = case.call(*inputs)
    assert_equal(again, found)


def test_every_operator_is_there(bindings):
    parts = {*native.PARTS, *native.CONTRASTIVE_PARTS}
    assert {*native.COMPILED, *parts} - native.CPU_ONLY <= {*bindings.operators, *IN_PYTHON}


@pytest.mark.parametrize("name", CASES)
def test_case(bindings, name):
    check(bindings, name)


@pytest.mark.parametrize("name", WITHOUT_OWN_KERNELS)
def test_without_own_kernels(bindings, name):
    """And the host does not wait for values, but in the interior point, whose reference looks at them."""
    kernels, case = WITHOUT_OWN_KERNELS[name]
    inputs = [tensor.to(case.dtype) for tensor in case.tensors]
    truth = case.call(*(tensor.double() for tensor in inputs))
    with bindings.on_cuda() as called, nullcontext() if "interior" in name else no_host_reads(inputs):
        found = case.call(*inputs)
    assert {name for name in called if not name.startswith("contrastive_")} == kernels
    assert_near(found, truth, case.tolerance)


def test_no_problems(bindings):
    for call, *shapes in (
        (linear_cka, (0, 20, 9), (0, 20, 5)),
        (linear_cka, (0, 20, 200), (0, 20, 5)),
        (linear_cka_to_kernel, (0, 20, 9), (0, 20, 20)),
        (lambda x, y: linear_cka_to_kernel(x, y, True), (0, 20, 9), (0, 20, 20)),
    ):
        x, y = (torch.ones(shape, requires_grad=n == 0) for n, shape in enumerate(shapes))
        with bindings.on_cuda() as called:
            value = call(x, y)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        assert called
        assert value.shape == (0,)
        assert gradient.shape == x.shape


def test_bad_arguments_are_refused(bindings):
    """Those of a direct call: Python's checks come first."""
    ops = bindings.operators
    images, samples, options = torch.ones(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2), ViewOptions().numbers()
    wide = torch.ones(2, 3, 4, 1025, dtype=torch.uint8)
    x, half = torch.ones(4, 3), torch.ones(4, 3, dtype=FP16)
    one, long = torch.ones(1), torch.ones(1).expand(1, 2**24 + 1)
    for name, arguments, message in (
        ("client_weights", (torch.ones(129, 129), 1e-8), "K <= 128"),
        ("contrastive_in_one", (half, half[:3], 0.5, True), "N >= B"),
        ("contrastive_in_one", (half, x, 0.5, True), "both float16"),
        ("contrastive_in_one", (half, half, 0.5, True), "64, 128 or 256 columns"),
        ("contrastive_sigmoid", (x, [0, 1, 3, 0, 0], x[:, 0].double().contiguous(), True), "a tile of a matrix"),
        ("contrastive_sigmoid", (half, [0, 0, 3, 0, 0], x[:, 0].double().contiguous(), True), "float32 or float64"),
        ("contrastive_sigmoid", (x, [1, 0, 3, 0, 0], x[:, 0].double().contiguous(), True), "long enough"),
        ("linear_cka_prepare", ([x, x[:3]], False), "the same L"),
        ("linear_cka_prepare", ([x, x.int()], False), "must be float16"),
        ("linear_cka_combine", (half[None], half[None], torch.ones(1, 2), True, True, True), "float32 or float64"),
        ("linear_cka_prepare", ([x] * 17, False), "1 to 16 matrices"),
        ("two_views", (images.float(), samples, 1, 2, 3, 4, options, False, False), "images must be uint8"),
        ("two_views", (images, samples.int(), 1, 2, 3, 4, options, False, False), "samples must be contiguous int64"),
        ("two_views", (wide, samples, 1, 2, 3, 4, options, False, False), "sides of at most 1024"),
        ("unbalanced_ot", (x, x[0], x[0], 0.8, 0.9, 1e-3, 9, "steepest"), "a and b must have shapes"),
        ("unbalanced_ot", (long, one, long[0], 0.8, 0.9, 1e-3, 9, "accelerated"), "at most 2.24 rows and columns"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops[name](*arguments)


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
    bad, start = torch.eye(3).repeat(2, 1, 1), torch.zeros(4)
    bad[1, 0, 2] = torch.nan
    weights, bounds = torch.tensor([torch.inf]), torch.tensor([0.5, 0.6, 0.1])
    cost = torch.full((2, 2), 9.0)
    with bindings.on_cuda(), no_host_reads([bad, start, weights, bounds, cost]):
        of_bad = client_weights(bad)
        of_bounds = client_weights(bad[0], lower_bounds=bounds)
        apply_deltas([start], [[bad[0, 0, :1].expand(4)]], weights)
        value = unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8)
    assert torch.equal(of_bad[0], torch.full((3,), 1 / 3))
    assert of_bad[1].isnan().all()
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
    term = Uniformity(name="uniformity", draws=2).start_round(Local())
    with bindings.on_cuda() as called, no_host_reads(views):
        for _ in range(2):
            term(step_of(*views)).backward()
    assert called == ["unbalanced_ot"] * 2
    assert all(view.grad.any() for view in views)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(faulty, name):
    with pytest.raises((AssertionError, RuntimeError)):
        check(faulty, name)
