"""What only a GPU shows: its own precision, streams, graphs, devices, and no waiting of the host.

The tests of each operator run there too, by conftest.py. Those called test_small_case are what compute-sanitizer sees.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fedkernels as fk
from fedkernels.internal import contrastive_cuda, native
from tests.fedkernels.inputs import FP64, randn

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def with_gradients(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def call(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        value = function(*leaves)
        return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

    return call


def centered_cka(x, y):
    return fk.linear_cka(x, y, True)


def to_kernel(centered: bool) -> Callable[..., list[Tensor]]:
    return lambda x, kernel: with_gradients(lambda x: fk.linear_cka_to_kernel(x, kernel, centered))(x)


def weighted(losses):
    """Losses that are not reduced and count differently, some less than nothing."""
    return losses * torch.arange(-3, len(losses) - 3, device=losses.device) * 100.0


def in_tf32(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """With products of float32 in tf32 where there are such."""

    def call(*tensors):
        settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
        settings.fp32_precision = "tf32"
        try:
            return function(*tensors)
        finally:
            settings.fp32_precision = before

    return call


def pairwise(*tensors):
    return [fk.linear_cka_pairwise(tensors[:2], tensors[1:], True), fk.linear_cka_pairwise(tensors, tensors)]


def transport(cost, a, b, **masks):
    def value_of(*given):
        return fk.unbalanced_ot(*given, 0.8, 0.9, tol=1e-7, **masks)

    value, of_cost, of_a, of_b = with_gradients(value_of)(cost, a, b)
    _, info = fk.unbalanced_ot_plan(cost, a, b, 0.8, 0.9, tol=1e-7, **masks)
    return [value, of_cost.sum(-1), of_cost.sum(-2), of_a, of_b, info.transported_mass]


def masked_transport(cost, a, b):
    return transport(cost, a, b, row_mask=a.cumsum(-1) < 25, column_mask=b.cumsum(-1) > 3)


def gram(start, *clients):
    return [fk.delta_gram([start, start[0]], [[client, client[1]] for client in clients])]


def step(start, *clients, weights=None):
    start, weights = start.clone(), torch.linspace(-0.2, 0.7, len(clients)) if weights is None else weights
    fk.apply_deltas([start], [[client] for client in clients], weights)
    return [start]


def step_by_weights_there(*models):
    return step(*models, weights=models[1][1, : len(models) - 1])


def views(dtype):
    """Of images whose bytes come as floating numbers."""
    memory_format = torch.channels_last if dtype == BF16 else torch.contiguous_format

    def call(images):
        samples, options = torch.arange(len(images), device=images.device), fk.ViewOptions(solarize=0.3, hue=0.5)
        images = images.to(torch.uint8)
        return list(fk.two_views(images, samples, fk.ViewKey(5), options, dtype=dtype, memory_format=memory_format))

    return call


class Case(NamedTuple):
    call: Callable[..., list[Tensor]]
    tensors: list[Tensor]  # float64
    dtype: torch.dtype
    tolerance: float  # of each output, relative to its largest entry


# Beside the rounding of a gradient to its dtype. The positives' weights are not rounded to 16 bits, others are.
ROUNDING = {BF16: 1e-3, FP16: 3e-4, FP32: 1e-5, FP64: 1e-12}


def of(function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype, *, tf32: bool = False) -> Case:
    """The value and the gradients in all tensors."""
    call = with_gradients(function)
    return Case(in_tf32(call), tensors, dtype, 2e-3) if tf32 else Case(call, tensors, dtype, ROUNDING[dtype])


def contrastive(name: str, tensors: list[Tensor], *not_reduced: torch.dtype) -> dict[str, Case]:
    """In every dtype, and in these with a gradient for each row's loss."""
    loss = getattr(fk, name)

    def losses(p, q):
        return weighted(loss(p, q, 0.3, "none"))

    cases = {}
    for dtype in ROUNDING:
        of_dtype = str(dtype).removeprefix("torch.")
        cases[f"{name}, {of_dtype}"] = of(lambda p, q: loss(p, q, 0.3), tensors, dtype)
        if dtype in not_reduced:
            cases[f"{name}, not reduced, {of_dtype}"] = of(losses, tensors, dtype)
    cases[f"{name}, tf32"] = of(lambda p, q: loss(p, q, 0.3), tensors, FP32, tf32=True)
    cases[f"{name}, not reduced, tf32"] = of(losses, tensors, FP32, tf32=True)
    return cases


def with_numbers(name: str, loss: Callable[..., Tensor], rows: list[Tensor], *numbers: float) -> dict[str, Case]:
    """In every dtype, with gradients in a scale and a bias, and of one row."""
    inputs = [*rows, *torch.tensor(numbers, dtype=FP64).unbind()]
    one = [*(tensor[:1] for tensor in rows), *inputs[len(rows) :]]
    cases = {f"{name}, {str(dtype).removeprefix('torch.')}": of(loss, inputs, dtype) for dtype in ROUNDING}
    return cases | ({f"{name}, one row": of(loss, one, BF16)} if len(rows) == 2 else {})  # SupCon's reference serves


def supervised(rows: Tensor, temperature: Tensor) -> Tensor:
    return fk.supervised_contrastive_loss(rows, torch.arange(len(rows), device=rows.device) % 5, temperature, "sum")


def weights_of(gram: Tensor, dtype: torch.dtype = FP64, tolerance: float = 1e-6) -> Case:
    return Case(lambda g: [fk.client_weights(g)], [gram], dtype, tolerance)


ROWS, MORE = randn(37, 40, seed=1) / 6, randn(150, 40, seed=2) / 6
WIDE = [randn(20, 600, seed=5) / 24, randn(30, 600, seed=6) / 24]
COST = (2 * randn(3, 30, 20, seed=3)).sigmoid()
LARGE_COST = (2 * randn(150, 140, seed=4)).sigmoid()  # more than one block holds
PROBLEMS, LARGE_PROBLEM = (
    [cost, *(torch.ones((*cost.shape[:-2], size)).double() for size in cost.shape[-2:])] for cost in (COST, LARGE_COST)
)
CLIENTS = [randn(67, 61, seed=10 + k) for k in range(13)]
GRAM = CLIENTS[0][:9] @ CLIENTS[0][:9].T
SAMPLES = randn(600, 20, seed=7)  # what two representations have in common
LARGE = [SAMPLES @ randn(20, d, seed=d) + randn(600, d, seed=d + 1) for d in (150, 140)]
KERNEL = [LARGE[0], LARGE[1] @ LARGE[1].T]
BYTES, LARGE_BYTES = (
    torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).double()
    for shape in ((7, 3, 20, 35), (3, 3, 90, 200))
)
CASES = {
    **contrastive("info_nce", [ROWS, MORE], BF16, FP16, FP32),
    **contrastive("nt_xent", [ROWS, MORE[:37]], BF16, FP64),
    **with_numbers("clip_loss", fk.clip_loss, [ROWS, MORE[:37]], 3.0),
    **with_numbers("sigmoid_loss", fk.sigmoid_loss, [ROWS, MORE[:37]], 3.0, -4.0),
    **with_numbers("supervised", supervised, [MORE], 0.3),
    "info_nce, one row": of(lambda q, k: fk.info_nce(q, k, 0.3), [ROWS[:1], MORE], BF16),
    "info_nce, labels": of(
        lambda q, k: fk.info_nce(
            q, k, 0.3, positives=3, labels=tuple(torch.arange(len(z), device=z.device) % 9 for z in (q, k))
        ),
        [ROWS, MORE],
        BF16,
    ),
    "info_nce, recomputed, bfloat16": of(lambda q, k: fk.info_nce(q, k, 0.3, recompute=True), [ROWS, MORE], BF16),
    "info_nce, two dtypes": of(lambda q, k: fk.info_nce(q, k.half(), 0.3), [ROWS, MORE], BF16),
    "info_nce, wide rows": of(lambda q, k: fk.info_nce(q, k, 0.3), WIDE, BF16),
    "info_nce, query alone": of(lambda q: fk.info_nce(q, q.detach(), 0.3), [ROWS], BF16),
    "info_nce, key alone": of(lambda k: weighted(fk.info_nce(k[:37].detach(), k, 0.3, "none")), [MORE], FP64),
    "nt_xent, tf32, 300 columns": of(
        lambda p, q: fk.nt_xent(p, q, 0.3), [WIDE[0][:, :300], WIDE[1][:20, :300]], FP32, tf32=True
    ),
    "linear_cka": of(fk.linear_cka, [randn(3, 70, 9), randn(3, 70, 50, seed=1)], FP32),
    "linear_cka, centered": of(centered_cka, [randn(2, 40, 100), randn(2, 40, 70, seed=1)], FP32),
    "linear_cka, large": of(fk.linear_cka, LARGE, FP32),
    "linear_cka, large, bfloat16": of(centered_cka, LARGE, BF16),
    "linear_cka, large, a batch": of(centered_cka, [torch.stack([z, z.flip(0)]) for z in LARGE], FP32),
    "linear_cka, wide": of(fk.linear_cka, [randn(3, 40, 200), randn(3, 40, 170, seed=1) + randn(3, 40, 1)], FP32),
    "linear_cka, float64": of(centered_cka, LARGE, FP64),
    "linear_cka_to_kernel": Case(to_kernel(False), KERNEL, FP32, 1e-5),
    "linear_cka_to_kernel, centered": Case(to_kernel(True), KERNEL, FP32, 2e-5),
    "linear_cka_to_kernel, float64": Case(to_kernel(True), KERNEL, FP64, 1e-11),
    "linear_cka_pairwise": Case(pairwise, [*LARGE, SAMPLES], FP32, 1e-5),
    "unbalanced_ot": Case(transport, PROBLEMS, FP32, 1e-2),
    "unbalanced_ot, large": Case(transport, LARGE_PROBLEM, FP32, 1e-2),
    "unbalanced_ot, masks": Case(masked_transport, PROBLEMS, FP32, 1e-2),
    "client_weights": weights_of(GRAM),
    "client_weights, a batch": weights_of(torch.stack([c[:40] @ c[:40].T for c in CLIENTS[:3]])),
    "client_weights, equal clients": weights_of(
        torch.stack([randn(4, 4) @ randn(4, 4).T, torch.ones(4, 4)]), FP32, 1e-5
    ),
    "client_weights, one did not move": weights_of(torch.tensor([1.0, 0, 2]).diag(), FP32, 0),
    "client_weights, more clients than entries": Case(
        lambda g: [fk.client_weights(g) @ g @ fk.client_weights(g)],  # the weights are not unique
        [randn(9, 4, seed=3) @ randn(9, 4, seed=3).T + 1],
        FP64,
        1e-9,
    ),
    "client_weights, lower bounds": Case(
        lambda g: [fk.client_weights(g, lower_bounds=0.1 / g.diagonal()), fk.client_weights(g, lower_bounds=0.01)],
        [GRAM],
        FP64,
        1e-6,
    ),
    "delta_gram": Case(gram, CLIENTS[:4], FP32, 1e-12),
    "delta_gram, 12 clients": Case(gram, CLIENTS, FP32, 1e-12),
    "delta_gram, float64": Case(gram, CLIENTS, FP64, 1e-12),
    "two_views": Case(views(FP32), [BYTES], FP32, 1e-5),
    "two_views, bfloat16, channels last": Case(views(BF16), [BYTES], FP32, 1e-2),
    "two_views, in device memory": Case(views(FP32), [LARGE_BYTES], FP32, 1e-5),
    "apply_deltas": Case(step, CLIENTS, FP32, 1e-7),
    "apply_deltas, bfloat16": Case(step, CLIENTS, BF16, 1e-2),
    "apply_deltas, weights on the GPU": Case(step_by_weights_there, CLIENTS, FP32, 1e-6),
}
EVERY = pytest.mark.parametrize("name", CASES)


def on(device, name):
    return [tensor.to(CASES[name].dtype).to(device) for tensor in CASES[name].tensors]


def assert_near(found, truth, tolerance):
    """An entry may be off by half of its own last place, and by the tolerance of the largest entry."""
    for one, true in zip(found, truth, strict=True):
        true, of_dtype = true.double().cpu(), torch.finfo(one.dtype)
        rounding = (of_dtype.eps * true.abs()).clamp(min=of_dtype.smallest_normal * of_dtype.eps) / 2
        assert ((one.double().cpu() - true).abs() - rounding).max() <= tolerance * true.abs().max()


def assert_equal(found, truth):
    assert all(torch.equal(one, true) for one, true in zip(found, truth, strict=True))


@EVERY
def test_small_case(name):
    check_small_case(name)


def check_small_case(name, times=1):
    """Against the same in float64 on the CPU, of the inputs as they were rounded."""
    case = CASES[name]
    found = case.call(*on("cuda", name))
    assert all(tensor.is_cuda for tensor in found)
    truth = case.call(*(tensor.double() for tensor in on("cpu", name)))
    assert_near(found, truth, times * case.tolerance)
    assert_equal(case.call(*on("cuda", name)), found)  # to the last bit


OF_LOSSES = [name for name in CASES if name.startswith(("info_nce", "nt_xent", "clip", "sigmoid", "supervised"))]


@pytest.mark.parametrize("name", OF_LOSSES)
def test_small_case_in_several_tiles(name, monkeypatch):
    for kind in ("TILE_BYTES", "LEAN_TILE_BYTES"):
        monkeypatch.setattr(contrastive_cuda, kind, 4 * 22 * 30)
    monkeypatch.setattr(contrastive_cuda, "_TILE_ROWS", 22)
    # Its rows are query and key here: the gradient is the sum of two, each rounded to 16 bits.
    check_small_case(name, 4 if name.startswith("supervised") else 1)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "clip_loss", "sigmoid_loss", "supervised_contrastive_loss"])
def test_autocast_changes_no_loss_of_one_tile_whose_backward_pass_is_inside(name, dtype):
    rows = [(randn(37, 24, seed=seed) / 5).to(dtype).cuda().requires_grad_() for seed in (1, 2)]
    more = {"info_nce": (0.3,), "nt_xent": (0.3,), "clip_loss": (4.0,), "sigmoid_loss": (4.0, -2.0)}.get(name)

    def loss():
        if more is None:
            return fk.supervised_contrastive_loss(rows[0], torch.arange(37, device="cuda") % 5, 0.3) + rows[1].sum()
        return getattr(fk, name)(*rows, *more)

    truth = torch.autograd.grad(loss(), rows)
    with torch.autocast("cuda", BF16):
        found = torch.autograd.grad(loss(), rows)
    assert_equal(found, truth)


@pytest.mark.parametrize("name", ["info_nce", "sigmoid_loss"])
def test_a_scale_may_be_on_the_cpu(name):
    rows = [(randn(37, 24, seed=seed) / 5).cuda().requires_grad_() for seed in (1, 2)]
    scales = [torch.tensor(number, requires_grad=True) for number in (0.5, -2.0)][: 1 + (name == "sigmoid_loss")]
    there = [scale.detach().cuda().requires_grad_() for scale in scales]
    found, truth = (torch.autograd.grad(getattr(fk, name)(*rows, *given), [*rows, *given]) for given in (scales, there))
    assert_equal([one.cpu() for one in found], [one.cpu() for one in truth])
    assert not found[2].is_cuda


@pytest.mark.parametrize("name", ["info_nce, tf32", "nt_xent, tf32", "nt_xent, tf32, 300 columns"])
def test_tf32_is_used_where_torch_allows_it(name):
    """And nowhere else: the cases in float32 are nearer to the truth than tf32 can be."""
    case = CASES[name]
    truth = case.call(*(tensor.double() for tensor in on("cpu", name)))
    with pytest.raises(AssertionError):
        assert_near(case.call(*on("cuda", name)), truth, 2e-5)


def test_the_module_has_kernels_for_this_gpu():
    assert {*native.COMPILED} - native.CPU_ONLY == native.CUDA, native.build_info()
    x = torch.ones(2, 3, device="cuda")
    for name in native.CUDA:
        assert native.operator(name, x) is not None
        assert native.operator(name, x, x.cpu()) is None


def on_late_inputs(call: Callable[..., list[Tensor]], ready: list[Tensor]) -> list[Tensor]:
    """The inputs are written late on a stream of their own: who reads them on another finds NaN."""
    late = [torch.full_like(tensor, torch.nan) for tensor in ready]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: some 30 ms
        for tensor, value in zip(late, ready, strict=True):
            tensor.copy_(value)
        found = call(*late)
    stream.synchronize()
    return found


@EVERY
def test_works_on_the_current_stream(name):
    call, ready = CASES[name].call, on("cuda", name)
    assert_equal(on_late_inputs(call, ready), call(*ready))


@pytest.mark.parametrize("name", ["nt_xent, bfloat16", "linear_cka, large"])
def test_works_on_the_current_stream_when_compiled(name):
    case, ready = CASES[name], on("cuda", name)
    torch.compiler.reset()
    compiled = torch.compile(case.call, backend="aot_eager")
    compiled(*ready)
    assert_near(on_late_inputs(compiled, ready), case.call(*ready), 1e-5)


@EVERY
def test_a_graph_replays_it(name):
    """Captured once; then other values come to the same place."""
    case, first = CASES[name], on("cuda", name)
    other = [tensor.flip(list(range(tensor.ndim))) * 0.5 for tensor in first]  # a Gram matrix remains one
    truth, inputs = case.call(*other), [tensor.clone() for tensor in first]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.call(*inputs)  # what is set up by a first call must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.call(*inputs)
    for _ in range(2):
        for tensor, value in zip(inputs, other, strict=True):
            tensor.copy_(value)
        for tensor in found:
            tensor.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, truth)


@EVERY
def test_the_host_does_not_wait(name):
    case, inputs = CASES[name], on("cuda", name)
    case.call(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.call(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY
def test_works_beside_the_current_device(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    case = CASES[name]
    assert torch.cuda.current_device() == 0
    found = case.call(*on("cuda:1", name))
    assert all(tensor.device == torch.device("cuda:1") for tensor in found)
    assert torch.cuda.current_device() == 0
    assert_near(found, case.call(*on("cuda:0", name)), 1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("keys_learn", [False, True])
@pytest.mark.parametrize(
    ("options", "limit"), [({}, 650e6), ({"reduction": "none"}, 650e6), ({"recompute": True}, 120e6)]
)
def test_logits_are_never_held(dtype, keys_learn, options, limit):
    rows = 32_768
    query, key = (randn(rows, 64, seed=seed).to(dtype).cuda() / 8 for seed in (1, 2))
    query.requires_grad_()
    key.requires_grad_(keys_learn)
    for _ in range(2):  # the first warms up
        query.grad = key.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fk.info_nce(query, key, 0.2, **options).sum().backward()
        extra = torch.cuda.max_memory_allocated() - before
    assert extra < limit  # as csrc/cuda/README.md counts it; the logits have 2.1 GB in 16 bits
