"""fedkernels/internal/contrastive_cuda.py on csrc/cuda/contrastive_*.cu: the losses against the CPU's in float64.

Torch's products are those of the CPU here, of rows that are widened first. The rest is what a GPU runs.
"""

import ctypes
import math
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fedkernels.distributed
from benchmarks.launches import LOSSES as LOSSES_OF_LAUNCHES
from benchmarks.launches import launches_of
from fedkernels import clip_loss, info_nce, nt_xent
from fedkernels.internal import contrastive_cuda, contrastive_one_tile, native
from fedkernels.internal.similarity_logsumexp import similarity_gradients, similarity_logsumexp
from tests.fedkernels.operators import OF_CONTRASTIVE, PATHS
from tests.fedkernels.test_cuda import BF16, FP16, FP32, FP64, randn, weighted, with_gradients

# Entries of 8 bits: all dtypes hold them.
FEW, MANY = (randn(37, 40, seed=1) / 6).to(BF16).double(), (randn(300, 40, seed=2) / 6).to(BF16).double()
VIEW, NUMBERS = MANY[:37], torch.arange(300)
MASK = NUMBERS[:37, None] % 7 == NUMBERS % 5


@pytest.fixture(params=["one tile", "tiles of all keys", "tiles"])
def tiles(request, monkeypatch):
    """Tiles of 5 rows and all 300 keys, or of 22 rows and 30 columns; float64 has half of them."""
    if request.param == "one tile":
        return
    all_keys = request.param == "tiles of all keys"
    for name in ("_FEWEST_ROWS", "_FEWEST_ROWS_OF_KEY_GRADIENT"):
        monkeypatch.setattr(contrastive_cuda, name, 1 if all_keys else 1000)
    monkeypatch.setattr(contrastive_cuda, "TILE_BYTES", 4 * (5 * 300 if all_keys else 22 * 30))
    monkeypatch.setattr(contrastive_cuda, "_TILE_ROWS", 22)


def errors(found, truth):
    """Relative to the largest entry of each result."""
    return [float((one.double() - true).abs().max() / true.abs().max()) for one, true in zip(found, truth, strict=True)]


def check(bindings, call, tensors, dtype, parts=1):
    """`parts`: as many gradients in 16 bits are added, for the rows are queries and keys."""
    inputs = [tensor.to(dtype) for tensor in tensors]
    # A million queries are more blocks than the second side of a grid has. Only products in 16 bits need that side.
    device = {"grid_limit": 1} if dtype in (FP32, FP64) else {}
    found = bindings.results(call, *inputs, **device)
    value, *gradients = errors(found, call(*(tensor.double() for tensor in inputs)))
    exact = {FP64: 1e-13, FP32: 2e-6}.get(dtype, 1e-6)
    assert value <= exact
    # Half of the last place of weights and of a gradient that leaves in 16 bits.
    assert max(gradients) <= parts * {BF16: 4e-3, FP16: 5e-4}.get(dtype, 10 * exact)


def by_similarities(query, key):
    """Everything that similarity_gradients takes."""
    options = {"positives": NUMBERS[:37] % 5, "labels": (NUMBERS[:37] % 11, NUMBERS % 7), "excluded": MASK}
    rows, columns, of_positives = similarity_logsumexp(query, key, columns=True, **options)
    weights = torch.linspace(-1, 2, 300, dtype=FP64)
    of_rows = {"rows": rows, "row_weights": weights[:37], "positive_weights": weights[60:97]}
    gradients = similarity_gradients(query, key, **of_rows, columns=columns, column_weights=weights, **options)
    return [torch.cat([rows, columns, of_positives]), *gradients]


def of(call, *tensors):
    return with_gradients(call), tensors


# By name the call and its inputs, in float64. These know their temperature on the host.
def of_path(name):
    """A path of the operators' table; rows that are not reduced count differently."""

    def call(*inputs):
        value = PATHS[name].call(*inputs)
        return weighted(value) if value.ndim else value

    return of(call, *PATHS[name].inputs(37, 40, 263, 1))


NUMBER = torch.tensor(0.3, dtype=FP64)
OF_REFERENCE = "sigmoid_loss, not reduced"
LOSSES = {
    **{name: of_path(name) for name in PATHS if name.partition(",")[0] in OF_CONTRASTIVE and name != OF_REFERENCE},
    "info_nce, query alone": of(lambda q: info_nce(q, MANY.to(q.dtype), 0.3), FEW),
    "info_nce, query alone, none": of(lambda q: weighted(info_nce(q, MANY.to(q.dtype), 0.3, "none")), FEW),
    "info_nce, key alone": of(lambda k: info_nce(FEW.to(k.dtype), k, 0.3), MANY),
    "info_nce, cold": of(lambda q, k: info_nce(q, k, 0.01), FEW, MANY),
    "info_nce, warm": of(lambda q, k: info_nce(q, k, 10.0), FEW, MANY),
    "clip_loss, none": of(lambda p, q: weighted(clip_loss(p, q, 3.0, "none")), FEW, VIEW),
    "all parts of similarities": (by_similarities, (FEW, MANY)),
}


TILES = "tiles of all keys", "tiles"


@pytest.mark.parametrize(
    ("name", "tiles", "dtype"),
    [
        *((name, "one tile", dtype) for name in LOSSES for dtype in (BF16, FP16, FP32, FP64)),
        *((name, kind, dtype) for name in LOSSES for kind in TILES for dtype in (BF16, FP32)),
    ],
    indirect=["tiles"],
    ids=str,
)
def test_losses(bindings, name, tiles, dtype):
    # The gradient of negatives is rounded as part of that of all keys, whose largest entry is a positive's.
    of_parts = name.startswith("supervised") or name in ("nt_xent, temperature", "info_nce, offset and negatives")
    check(bindings, *LOSSES[name], dtype, parts=1 + of_parts)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_pair_of_views_has_the_loss_0(bindings, dtype):
    """And everything that is left out the log-sum-exp -inf, without a gradient."""
    call = with_gradients(lambda p, q: nt_xent(p, q, 0.3))
    assert not any(one.any() for one in bindings.results(call, FEW[:1].to(dtype), MANY[:1].to(dtype)))
    everything = {"labels": (NUMBERS[:37] * 0, NUMBERS * 0)}
    call = with_gradients(lambda q, k: similarity_logsumexp(q, k, **everything)[0].exp())
    assert not any(one.any() for one in bindings.results(call, FEW.to(dtype), MANY.to(dtype)))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_nan_stays_in_its_row(bindings, dtype):
    query, key = FEW.to(dtype, copy=True), MANY.to(dtype)
    query[17, 3] = torch.nan
    call = with_gradients(lambda q, k: info_nce(q, k, 0.3, "none"))
    losses, of_query, of_key = bindings.results(call, query, key)
    assert losses.isnan().nonzero().flatten().tolist() == [17]
    assert of_query.isnan().any(1).nonzero().flatten().tolist() == [17]
    assert of_key.isnan().all()
    losses = bindings.results(lambda q, k: info_nce(q, k, 0.3, "none"), query, key)  # by the one kernel in 16 bits
    assert losses.isnan().nonzero().flatten().tolist() == [17]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_logits_beyond_float16(bindings, dtype):
    """Logits of 1e6, which float32 rounds to 1 / 16."""
    call = with_gradients(lambda q, k: info_nce(128 * q, 128 * k, 0.01, recompute=True) / 4**10)
    inputs = [FEW.to(dtype), MANY.to(dtype)]
    found, truth = bindings.results(call, *inputs), call(*(one.double() for one in inputs))
    assert all(one.isfinite().all() for one in found)
    assert errors(found[:1], truth[:1])[0] < 1e-6


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_temperatures_beyond_float32(bindings, dtype):
    """All logits are 0 then, and no gradient is NaN."""
    query, key = FEW.to(dtype), MANY.to(dtype)
    for temperature in (1e40, 1e308):
        few = with_gradients(lambda p, q, t=temperature: nt_xent(p, q, t) + clip_loss(p, q, 1 / t))
        many = with_gradients(lambda q, k, t=temperature: info_nce(q, k, t))
        found = bindings.results(few, query, VIEW.to(dtype)), bindings.results(many, query, key)
        assert [one[0].item() for one in found] == pytest.approx([math.log(73) + math.log(37), math.log(300)])
        assert all(gradient.isfinite().all() for one in found for gradient in one)
        losses = bindings.results(
            lambda q, k, t=temperature: info_nce(q, k, t, "none"), query, key
        )  # by the one kernel in 16 bits
        assert losses.tolist() == pytest.approx([math.log(300)] * 37)


@pytest.mark.parametrize("scale", [1e-7, 1e5])  # beyond what float16 holds
def test_losses_that_count_differently(bindings, scale):
    call = with_gradients(lambda q, k: scale * weighted(info_nce(q, k, 0.3, "none")))
    inputs = [FEW.half(), MANY.half()]
    found, truth = bindings.results(call, *inputs), call(*(one.double() for one in inputs))
    atol = torch.finfo(FP16).smallest_normal / 512  # half of the smallest number
    for one, true in zip(found[1:], truth[1:], strict=True):
        held = true.abs().clamp(max=60000) * true.sign()
        torch.testing.assert_close(
            one.double().clamp(-60000, 60000), held, rtol=5e-3, atol=max(atol, 5e-4 * float(true.abs().max()))
        )


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int))


class Pass(ctypes.Structure):
    """ContrastivePass of csrc/cuda/contrastive.h."""

    _fields_ = (
        *(("rows", Rows), ("columns", Rows)),
        *((name, ctypes.c_int64) for name in ("row_count", "column_count", "width")),
        *(("temperature", ctypes.c_double), ("losses", ctypes.c_void_p), ("gradient", ctypes.c_void_p)),
    )


def test_parts_fill_the_card(bindings):
    """MoCo's 256 queries are two blocks of rows: 64 parts of its keys make 128 blocks for 132 multiprocessors."""
    given = Pass(row_count=256, column_count=65_536, width=128, gradient=1)
    memory = bindings.handle.cuda_contrastive_memory
    memory.restype = ctypes.c_int64
    with bindings.on_cuda(multiprocessors=132):
        assert memory(ctypes.byref(given)) == 64 * 256 * (3 + 128) * 4


@pytest.mark.parametrize("name", LOSSES_OF_LAUNCHES)
def test_few_launches_where_the_host_is_slower(name):
    """The loss with all gradients, of 256 rows; of 16,384 rows some for a tile."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no products with an out_dtype on the meta device")
    assert launches_of(name, 256) <= 8
    assert launches_of(name, 16_384) <= 400


@pytest.mark.parametrize(("width", "dtype"), [(64, FP16), (128, BF16), (200, BF16)])
def test_in_one_kernel(bindings, width, dtype):
    """Of several blocks and parts, the last of each not full; rows that begin at no multiple of 16 bytes."""
    query, key = (
        torch.cat([torch.zeros(1, dtype=dtype), (randn(rows, width, seed=rows) / 8).to(dtype).flatten()])[1:]
        for rows in (150, 600)
    )
    assert query.data_ptr() % 16
    query, key = query.view(150, width), key.view(600, width)
    call = with_gradients(lambda q: weighted(info_nce(q, key.to(q.dtype), 0.2, "none")))
    check(bindings, call, [query.double()], dtype)


class Products(TorchDispatchMode):
    """What is multiplied outside of the operators: dtypes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot"):
            self.seen |= {one.dtype for one in [one for one in args if isinstance(one, Tensor)][-2:]}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def products(monkeypatch):
    """What is multiplied in the operators too."""
    products = Products()
    for product, first in (("multiplied", 0), ("_add_product", 1)):
        original = getattr(contrastive_cuda, product)

        def noting(*arguments, original=original, first=first, **options):
            products.seen |= {one.dtype for one in arguments[first : first + 2]}
            with _disable_current_modes():  # on the CPU, products of 16 bits are widened
                return original(*arguments, **options)

        monkeypatch.setattr(contrastive_cuda, product, noting)
    one_tile = contrastive_one_tile._OneTile.apply

    def noting_rows(query, key, *others):
        products.seen |= {one.dtype for one in (query, key) if one is not None}
        with _disable_current_modes():
            return one_tile(query, key, *others)

    monkeypatch.setattr(contrastive_one_tile._OneTile, "apply", noting_rows)
    return products


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_16_bits_are_multiplied_as_they_are(bindings, products, name, dtype):
    """In all losses, wherever their scales come from: a product in float32 takes many times as long."""
    call, tensors = LOSSES[name]
    with bindings.on_cuda(), products:
        call(*(tensor.to(dtype) for tensor in tensors))
    assert products.seen <= {dtype}


def test_so_they_are_in_the_losses_of_ranks(bindings, products, tmp_path):
    """Of one rank, against the losses without ranks."""
    losses = {
        "info_nce": (FEW, MANY, NUMBER),
        "clip_loss": (FEW, VIEW, NUMBER),
        "nt_xent": (FEW, VIEW, NUMBER),
        "sigmoid_loss": (FEW, VIEW, NUMBER, -NUMBER),
        "supervised_contrastive_loss": (FEW,),
    }
    labels = {"supervised_contrastive_loss": {"labels": NUMBERS[:37] % 5, "temperature": 0.3}}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for name, tensors in losses.items():
            ours, plain = (
                with_gradients(partial(getattr(module, name), **labels.get(name, {})))
                for module in (fedkernels.distributed, fedkernels)
            )
            inputs = [tensor.to(BF16) for tensor in tensors]
            with bindings.on_cuda() as called, products:
                found = ours(*inputs)
            assert called or name == "sigmoid_loss"
            value, *gradients = errors(found, plain(*(tensor.double() for tensor in inputs)))
            assert value <= 1e-6
            assert max(gradients) <= 8e-3
    finally:
        torch.distributed.destroy_process_group()
    assert products.seen == {BF16}


@pytest.mark.parametrize("setting", ["allow_fp16_accumulation", "TunableOp, one row"])
def test_rows_are_widened_where_torch_returns_no_wide_products(monkeypatch, setting):
    rows, wide = torch.empty(1, 8, dtype=FP16, device="meta"), torch.empty(1, 1, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    sums_in_16_bits = setting == "allow_fp16_accumulation"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=sums_in_16_bits))
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: not sums_in_16_bits)
    with Products() as products:
        contrastive_cuda.multiplied(rows, rows.T, FP32)
        contrastive_cuda._add_product(wide, rows, rows.T, 2.0)
    assert products.seen == {FP32}


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once, beside those of the inputs."""

    def __init__(self, inputs):
        super().__init__()
        self.live, self.most = {one.untyped_storage()._cdata: 0 for one in inputs}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.most = max(self.most, sum(self.live.values()))
        return result


def no_operator(*_):
    pass


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("name", contrastive_cuda.OPERATORS)
def test_a_tile_with_its_weights_and_100_MB_beside_the_results(monkeypatch, name, dtypes):
    """Of 32,768 queries and keys on the meta device, which has sizes and computes nothing."""
    names = native.CONTRASTIVE_PARTS
    monkeypatch.setattr(contrastive_cuda, "_ops", SimpleNamespace(**dict.fromkeys(names, no_operator)))
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no addmm with an out_dtype on the meta device")
    rows, width = 32_768 // (2 if name.startswith("nt_xent") else 1), 1024
    first, second = (torch.empty(rows, width, dtype=dtype, device="meta") for dtype in dtypes)
    empty, vector, number = (first.new_empty(size, dtype=FP64) for size in (0, 2 * rows, ()))
    of_rows, missing = vector[:rows], (empty,) * 4
    arguments = {
        "info_nce": (0.3, "mean", True, True),
        "info_nce_gradients": (0.3, of_rows, True, True),
        "nt_xent": (0.3, "mean", True),
        "nt_xent_gradients": (0.3, vector),
        "similarity_logsumexp": (*missing, True),
        "similarity_logsumexp_gradients": (*missing, of_rows, of_rows, of_rows, of_rows, empty, True, True),
        "sigmoid_loss": (True, True),
    }[name.removeprefix("scaled_")]
    if name.startswith("scaled_"):
        arguments += (number, number) if "sigmoid" in name else (number,)
    with LiveBytes([first, second, vector]) as live:
        results = contrastive_cuda.OPERATORS[name](first, second, *arguments)
    results = results if isinstance(results, tuple) else (results,)
    tile = contrastive_cuda.LEAN_TILE_BYTES if name == "info_nce_gradients" else contrastive_cuda.TILE_BYTES
    assert (
        live.most - sum(one.untyped_storage().nbytes() for one in results) < 1.5 * tile + 100e6
    )  # nt_xent joins its rows
