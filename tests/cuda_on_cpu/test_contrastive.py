"""fedkernels/internal/contrastive_cuda.py on csrc/cuda/contrastive_*.cu: the losses against the CPU's in float64.

Torch's products are those of the CPU here, of rows that are widened first. The rest is what a GPU runs.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkernels import clip_loss, info_nce, nt_xent, sigmoid_loss, supervised_contrastive_loss
from fedkernels.internal import contrastive_cuda
from fedkernels.internal.similarity_logsumexp import similarity_gradients, similarity_logsumexp
from tests.cuda_on_cpu.emulation import ORDERS, ROOT
from tests.cuda_on_cpu.test_bindings import Bindings
from tests.fedkernels.test_cuda import BF16, FP16, FP32, FP64, assert_equal, randn, weighted, with_gradients

BINDING = ROOT / "csrc/ops/contrastive_cuda.cpp"
# Entries of 8 bits: all dtypes hold them.
FEW, MANY = (randn(37, 40, seed=1) / 6).to(BF16).double(), (randn(370, 40, seed=2) / 6).to(BF16).double()
NUMBERS = torch.arange(370)
MASK = NUMBERS[:37, None] % 7 == NUMBERS % 5

pytestmark = pytest.mark.filterwarnings("ignore:.*verriding a previously registered kernel")


@pytest.fixture(scope="module")
def bindings(compiler):
    return Bindings(compiler, [BINDING.read_text(encoding="utf-8")], "cuda_on_cpu_contrastive", "contrastive*.cu")


@pytest.fixture(params=["one tile", "tiles of all keys", "tiles"])
def tiles(request, monkeypatch):
    """Tiles of 22 rows and 17 columns (float64: 8), and of 2 (float64: 1) rows and all 370 keys."""
    if request.param != "one tile":
        for name in ("_FEWEST_ROWS", "_FEWEST_ROWS_OF_KEY_GRADIENT"):
            monkeypatch.setattr(contrastive_cuda, name, 1 if request.param == "tiles of all keys" else 1000)
        size = 4 * (2 * 370 if request.param == "tiles of all keys" else 22 * 17)
        monkeypatch.setattr(contrastive_cuda, "_TILE_BYTES", size)
        monkeypatch.setattr(contrastive_cuda, "_TILE_ROWS", 22)


def run(bindings, call, inputs):
    """The results, which must not depend on the order of threads and blocks."""
    with bindings.on_cuda() as called:
        found = call(*inputs)
    assert called
    with bindings.on_cuda(ORDERS[1]):
        again = call(*inputs)
    assert_equal([one.nan_to_num(-7e7) for one in again], [one.nan_to_num(-7e7) for one in found])
    return found


def errors(found, truth):
    """Relative to the largest entry of each result."""
    return [float((one.double() - true).abs().max() / true.abs().max()) for one, true in zip(found, truth, strict=True)]


def check(bindings, call, tensors, dtype, of_values=None, of_gradients=None):
    inputs = [tensor.to(dtype) for tensor in tensors]
    value, *gradients = errors(run(bindings, call, inputs), call(*(tensor.double() for tensor in inputs)))
    exact = {FP64: 1e-13, FP32: 2e-6}.get(dtype, 1e-6)
    assert value <= (of_values or exact)
    # Half of the last place of weights and of a gradient that leaves in 16 bits.
    assert max(gradients) <= (of_gradients or {BF16: 4e-3, FP16: 5e-4}.get(dtype, 10 * exact))


def by_similarities(query, key):
    """Everything that similarity_gradients takes."""
    options = {"positives": NUMBERS[:37] % 5, "labels": (NUMBERS[:37] % 11, NUMBERS % 7), "excluded": MASK}
    rows, columns, of_positives = similarity_logsumexp(query, key, columns=True, **options)
    weights = torch.linspace(-1, 2, 370, dtype=FP64)
    of_rows = {"rows": rows, "row_weights": weights[:37], "positive_weights": weights[60:97]}
    gradients = similarity_gradients(query, key, **of_rows, columns=columns, column_weights=weights, **options)
    return [torch.cat([rows, columns, of_positives]), *gradients]


# By name the call and its inputs, in float64.
LOSSES = {
    "info_nce": (lambda q, k: info_nce(q, k, 0.3), (FEW, MANY)),
    "info_nce, sum": (lambda q, k: info_nce(q, k, 0.3, "sum", positives=5), (FEW, MANY)),
    "info_nce, none": (lambda q, k: weighted(info_nce(q, k, 0.3, "none")), (FEW, MANY)),
    "info_nce, recomputed": (lambda q, k: info_nce(q, k, 0.3, recompute=True), (FEW, MANY)),
    "info_nce, query alone": (lambda q: info_nce(q, MANY.to(q.dtype), 0.3), (FEW,)),
    "info_nce, query alone, none": (lambda q: weighted(info_nce(q, MANY.to(q.dtype), 0.3, "none")), (FEW,)),
    "info_nce, key alone": (lambda k: info_nce(FEW.to(k.dtype), k, 0.3), (MANY,)),
    "info_nce, cold": (lambda q, k: info_nce(q, k, 0.01), (FEW, MANY)),
    "info_nce, warm": (lambda q, k: info_nce(q, k, 10.0), (FEW, MANY)),
    "nt_xent": (lambda p, q: nt_xent(p, q, 0.3), (FEW, MANY[:37])),
    "nt_xent, none": (lambda p, q: weighted(nt_xent(p, q, 0.3, "none")), (FEW, MANY[:37])),
}
# These form their logits in float32 at least.
OTHERS = {
    "info_nce, temperature": (
        lambda q, k, t: info_nce(q, k, t, recompute=True),
        (FEW, MANY, torch.tensor(0.3, dtype=FP64)),
    ),
    "info_nce, positives": (lambda q, k: info_nce(q, k, 0.3, positives=NUMBERS[300:337]), (FEW, MANY)),
    "info_nce, labels": (lambda q, k: info_nce(q, k, 0.3, labels=(NUMBERS[:37] % 9, NUMBERS % 9)), (FEW, MANY)),
    "info_nce, excluded": (lambda q, k: weighted(info_nce(q, k, 0.3, "none", excluded=MASK)), (FEW, MANY)),
    "clip_loss": (lambda p, q: clip_loss(p, q, 3.0), (FEW, MANY[:37])),
    "clip_loss, none": (lambda p, q: weighted(clip_loss(p, q, 3.0, "none")), (FEW, MANY[:37])),
    "supervised, even": (lambda z: supervised_contrastive_loss(z, NUMBERS[:36] % 5, 0.3), (FEW[:36],)),
    "supervised, odd": (lambda z: supervised_contrastive_loss(z, NUMBERS[:37] % 5, 0.3), (FEW,)),
    "sigmoid_loss": (lambda p, q: sigmoid_loss(p, q, 3.0, -2.0), (FEW, MANY[:37])),
}


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_rows_as_they_are(bindings, name, dtype):
    call, tensors = LOSSES[name]
    check(bindings, with_gradients(call), tensors, dtype)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("name", OTHERS)
def test_losses_in_float32_or_wider(bindings, name, dtype):
    call, tensors = OTHERS[name]
    check(bindings, with_gradients(call), tensors, dtype)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_all_parts_of_similarities(bindings, dtype):
    check(bindings, by_similarities, (FEW, MANY), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_pair_of_views_has_the_loss_0(bindings, dtype):
    """And everything that is left out the log-sum-exp -inf, without a gradient."""
    call = with_gradients(lambda p, q: nt_xent(p, q, 0.3))
    assert not any(one.any() for one in run(bindings, call, [FEW[:1].to(dtype), MANY[:1].to(dtype)]))
    everything = {"labels": (NUMBERS[:37] * 0, NUMBERS * 0)}
    call = with_gradients(lambda q, k: similarity_logsumexp(q, k, **everything)[0].exp())
    sums, *gradients = run(bindings, call, [FEW.to(dtype), MANY.to(dtype)])
    assert not any(one.any() for one in (sums, *gradients))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_nan_stays_in_its_row(bindings, dtype):
    query, key = FEW.to(dtype, copy=True), MANY.to(dtype)
    query[17, 3] = torch.nan
    call = with_gradients(lambda q, k: info_nce(q, k, 0.3, "none"))
    losses, of_query, of_key = run(bindings, call, [query, key])
    assert losses.isnan().nonzero().flatten().tolist() == [17]
    assert of_query.isnan().any(1).nonzero().flatten().tolist() == [17]
    assert of_key.isnan().all()
    (losses,) = run(bindings, lambda q, k: [info_nce(q, k, 0.3, "none")], [query, key])  # by the one kernel in 16 bits
    assert losses.isnan().nonzero().flatten().tolist() == [17]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_logits_beyond_float16(bindings, dtype):
    """Logits of 1e6, which float32 rounds to 1 / 16."""
    call = with_gradients(lambda q, k: info_nce(128 * q, 128 * k, 0.01, recompute=True) / 4**10)
    inputs = [FEW.to(dtype), MANY.to(dtype)]
    found, truth = run(bindings, call, inputs), call(*(one.double() for one in inputs))
    assert all(one.isfinite().all() for one in found)
    assert errors(found[:1], truth[:1])[0] < 1e-6


@pytest.mark.parametrize("scale", [1e-7, 1e5])  # beyond what float16 holds
def test_losses_that_count_differently(bindings, scale):
    call = with_gradients(lambda q, k: scale * weighted(info_nce(q, k, 0.3, "none")))
    inputs = [FEW.half(), MANY.half()]
    found, truth = run(bindings, call, inputs), call(*(one.double() for one in inputs))
    atol = torch.finfo(FP16).smallest_normal / 512  # half of the smallest number
    for one, true in zip(found[1:], truth[1:], strict=True):
        held = true.abs().clamp(max=60000) * true.sign()
        torch.testing.assert_close(
            one.double().clamp(-60000, 60000), held, rtol=5e-3, atol=max(atol, 5e-4 * float(true.abs().max()))
        )


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("width", [64, 128, 200])
def test_in_one_kernel(bindings, dtype, width):
    """Of several blocks and parts, the last of each not full; rows that begin at no multiple of 16 bytes."""
    query, key = (
        torch.cat([torch.zeros(1, dtype=dtype), (randn(rows, width, seed=rows) / 8).to(dtype).flatten()])[1:]
        for rows in (150, 600)
    )
    assert query.data_ptr() % 16
    query, key = query.view(150, width), key.view(600, width)
    call = with_gradients(lambda q: weighted(info_nce(q, key.to(q.dtype), 0.2, "none")))
    check(bindings, call, [query.double()], dtype)


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once, beside those of the inputs."""

    def __init__(self, inputs):
        super().__init__()
        self.storages = {one.untyped_storage()._cdata: 0 for one in inputs}
        self.live = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key):
        self.live -= self.storages.pop(key)


def no_operator(*_):
    pass


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("name", contrastive_cuda.OPERATORS)
def test_less_than_64_MB_beside_the_results(monkeypatch, name, dtypes):
    """Of 65,536 queries and keys on the meta device, which has sizes and computes nothing."""
    names = ("contrastive_sums", "contrastive_weights", "contrastive_sigmoid")
    monkeypatch.setattr(contrastive_cuda, "_ops", SimpleNamespace(**dict.fromkeys(names, no_operator)))
    rows, width = 65_536 // (2 if name.startswith("nt_xent") else 1), 1024
    first, second = (torch.empty(rows, width, dtype=dtype, device="meta") for dtype in dtypes)
    empty, vector = first.new_empty(0), first.new_empty(2 * rows, dtype=FP64)
    of_rows, missing = vector[:rows], (empty,) * 4
    arguments = {
        "info_nce": (0.3, "mean", True, True),
        "info_nce_gradients": (0.3, of_rows, True, True),
        "nt_xent": (0.3, "mean", True),
        "nt_xent_gradients": (0.3, vector),
        "similarity_logsumexp": (*missing, True),
        "similarity_logsumexp_gradients": (*missing, of_rows, of_rows, of_rows, of_rows, empty, True, True),
        "sigmoid_loss": (True, True),
    }[name]
    with LiveBytes([first, second, vector]) as live:
        results = contrastive_cuda.OPERATORS[name](first, second, *arguments)
    results = results if isinstance(results, tuple) else (results,)
    assert live.most - sum(one.untyped_storage().nbytes() for one in results) < 64e6
