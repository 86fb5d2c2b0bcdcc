"""csrc/cuda/contrastive*.cu: info_nce and nt_xent against the references in float64."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from fedkernels.reference.info_nce import info_nce
from fedkernels.reference.nt_xent import nt_xent
from tests.cuda_on_cpu.emulation import DTYPES, ORDERS, ROOT, Array, EmulationError, poison

CUDA = ROOT / "csrc/cuda"
BF16, FP16, FP32, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = {BF16: 2**-7, FP16: 2**-10, FP32: 2**-10}  # of what tensor cores multiply: float32 as tf32
DEVICE = {"multiprocessors": 4, "shared_limit": 227 << 10}
SMALL = 99 << 10  # bytes of shared memory that a block may have on sm_86 and sm_89


class Pass(ctypes.Structure):
    """struct ContrastivePass of csrc/cuda/contrastive.h."""

    _fields_ = (
        ("rows", Array),
        ("columns", Array),
        *((name, ctypes.c_int64) for name in ("row_count", "column_count", "width")),
        ("temperature", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("shift", "positives")),
        *((name, ctypes.c_bool) for name in ("leave_out_self", "given")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("row_largest", "row_share", "column_largest", "column_share"),
                *("row_weight", "column_weight", "weight_unit", "losses"),
            )
        ),
        ("gradient", Array),
    )


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def array(tensor):
    return Array(tensor.data_ptr(), DTYPES[tensor.dtype])


def rows(count, width, dtype, seed):
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(values).to(dtype)


def source_of(dtype):
    """The file with the kernels on the tensor cores."""
    return {BF16: "contrastive_bfloat16.cu", FP16: "contrastive_float16.cu", FP32: "contrastive_tf32.cu"}[dtype]


def on_tensor_cores(library):
    """Is it not contrastive_wide.cu?"""
    return not hasattr(library.handle, "cuda_contrastive_wide")


def multiplied(library, matrix):
    """The matrix as it is multiplied: float32 rounded to tf32, 10 bits of mantissa, on the tensor cores."""
    if matrix.dtype == FP32 and on_tensor_cores(library):
        matrix = ((matrix.view(torch.int32) + 0x1000) & ~0x1FFF).view(FP32)
    return matrix.double()


def run_pass(library, call, first, second, temperature, sums, gradient, *, losses=None, device=None, **options):
    shape = first.shape[0], second.shape[0], first.shape[1]
    library.settings(0, False, *(device or DEVICE).values())
    names = dict(zip(("row_largest", "row_share", "column_largest", "column_share"), map(pointer, sums), strict=True))
    given = Pass(
        array(first),
        array(second),
        *shape,
        temperature,
        losses=pointer(losses),
        gradient=Array() if gradient is None else array(gradient),
        **names,
        **options,
    )
    if on_tensor_cores(library):
        function = {BF16: "cuda_contrastive_bfloat16", FP16: "cuda_contrastive_float16"}.get(first.dtype)
        function = function or "cuda_contrastive_tf32"
        size = library.ask(f"{function}_memory", ctypes.byref(given))
    else:
        function = "cuda_contrastive_wide"
        size = library.ask(f"{function}_memory", ctypes.byref(given))
    memory = poison(max(size, 0) // 4 + 4, dtype=torch.float32)
    start = -memory.data_ptr() % 16 // 4  # it is aligned to 16 bytes, as torch's memory of a GPU is
    call(function, ctypes.byref(given), memory[start : start + max(size, 0) // 4], None)


def sums_like(rows, *shape):
    return poison(*shape, dtype=WIDE if rows.dtype == WIDE else torch.float32)


def run_info_nce(library, query, key, temperature, counts=None, **device):
    settings = DEVICE | device
    counted = pointer(counts), None if counts is None else pointer(counts[-1:])

    def run(call):
        losses, largest, share = (sums_like(query, len(query)) for _ in range(3))
        of_query, of_key = sums_like(query, *query.shape), sums_like(key, *key.shape)
        sums, options = (largest, share, None, None), {"positives": len(key), "device": settings}
        options |= dict(zip(("row_weight", "weight_unit"), counted, strict=True))
        run_pass(library, call, query, key, temperature, sums, of_query, losses=losses, **options)
        sums, options = (None, None, largest, share), {"positives": len(query), "device": settings}
        options |= dict(zip(("column_weight", "weight_unit"), counted, strict=True))
        run_pass(library, call, key, query, temperature, sums, of_key, given=True, **options)
        return losses, of_query, of_key

    return library.results(run, **device)


def run_nt_xent(library, view1, view2, temperature, counts=None):
    z = torch.cat([view1, view2])
    counted = pointer(counts), None if counts is None else pointer(counts[-1:])

    def run(call):
        losses, largest, share, gradient = (sums_like(z, *n) for n in ([len(z)], [len(z)], [len(z)], z.shape))
        options = {"shift": len(view1), "positives": len(z), "leave_out_self": True}
        options |= dict(zip(("row_weight", "weight_unit"), counted, strict=True))
        run_pass(library, call, z, z, temperature, (largest, share, None, None), None, losses=losses, **options)
        sums, options = (largest, share, largest, share), options | {"column_weight": counted[0]}
        run_pass(library, call, z, z, temperature, sums, gradient, given=True, **options)
        return losses, gradient

    return library.results(run)


def counts_of(weights, like):
    """The weights of the losses as a pass takes them, and behind them their unit."""
    unit = weights.abs().max()
    return torch.cat([weights / unit, unit[None]]).to(WIDE if like.dtype == WIDE else torch.float32)


def check(library, found, truth, gradients, expected, dtype):
    slack, atol = 40 * torch.finfo(dtype).eps, 40 * torch.finfo(dtype).eps
    if on_tensor_cores(library):
        # The weights are rounded as the inputs are before the second product, and they sum to 1 or 2.
        slack, atol = 2e-5, EPS[dtype]
    torch.testing.assert_close(found.double(), truth, rtol=slack, atol=slack)
    for gradient, wide in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), wide, rtol=0, atol=atol * float(wide.abs().max()))


def check_info_nce(library, query, key, temperature, weights=None, **device):
    counts = None if weights is None else counts_of(weights, query)
    found, *gradients = run_info_nce(library, query, key, temperature, counts, **device)
    wide = [multiplied(library, query).requires_grad_(), multiplied(library, key).requires_grad_()]
    truth = info_nce(*wide, temperature, "none")
    expected = torch.autograd.grad(truth, wide, torch.ones_like(truth) if weights is None else weights)
    check(library, found, truth.detach(), gradients, expected, query.dtype)


def check_nt_xent(library, view1, view2, temperature, weights=None):
    counts = None if weights is None else counts_of(weights, view1)
    found, gradient = run_nt_xent(library, view1, view2, temperature, counts)
    wide = [multiplied(library, view1).requires_grad_(), multiplied(library, view2).requires_grad_()]
    truth = nt_xent(*wide, temperature, "none")
    expected = torch.autograd.grad(truth, wide, torch.ones_like(truth) if weights is None else weights)
    check(library, found, truth.detach(), [gradient], [torch.cat(expected)], view1.dtype)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    ("queries", "keys", "width", "temperature"),
    [(1, 1, 1, 1.0), (5, 9, 3, 0.5), (130, 131, 40, 0.2), (64, 200, 144, 0.1), (70, 70, 256, 0.2), (33, 66, 300, 0.3)],
)
def test_info_nce(compiler, dtype, queries, keys, width, temperature):
    query, key = rows(queries, width, dtype, 1), rows(keys, width, dtype, 2)
    check_info_nce(compiler.load(source_of(dtype)), query, key, temperature)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    ("batch", "width", "temperature"), [(1, 5, 1.0), (37, 24, 0.2), (67, 129, 0.5), (20, 512, 0.1)]
)
def test_nt_xent(compiler, dtype, batch, width, temperature):
    view1, view2 = rows(batch, width, dtype, 1), rows(batch, width, dtype, 2)
    check_nt_xent(compiler.load(source_of(dtype)), view1, view2, temperature)


# The widths are those of one block and more; rows that begin where 16 bytes can be copied, and others.
@pytest.mark.parametrize("dtype", [FP32, WIDE])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "temperature"),
    [(1, 1, 1, 1.0), (5, 9, 3, 0.5), (130, 131, 40, 0.2), (64, 200, 129, 0.1), (20, 70, 260, 0.2), (3, 5, 515, 0.3)],
)
def test_info_nce_wide(compiler, dtype, queries, keys, width, temperature):
    query, key = rows(queries, width, dtype, 1), rows(keys, width, dtype, 2)
    check_info_nce(compiler.load("contrastive_wide.cu"), query, key, temperature)


@pytest.mark.parametrize("dtype", [FP32, WIDE])
@pytest.mark.parametrize(("batch", "width", "temperature"), [(1, 5, 1.0), (37, 24, 0.2), (67, 131, 0.5)])
def test_nt_xent_wide(compiler, dtype, batch, width, temperature):
    view1, view2 = rows(batch, width, dtype, 1), rows(batch, width, dtype, 2)
    check_nt_xent(compiler.load("contrastive_wide.cu"), view1, view2, temperature)


# float32 and float64 as they are; the others on the tensor cores, float32 in tf32.
EACH = pytest.mark.parametrize(
    ("source", "dtype"),
    [*((source_of(dtype), dtype) for dtype in EPS), *(("contrastive_wide.cu", dtype) for dtype in (FP32, WIDE))],
)


@EACH
@pytest.mark.parametrize("scale", [1.0, 1e5])  # beyond what float16 holds
def test_losses_that_count_differently(compiler, source, dtype, scale):
    library, weights = compiler.load(source), scale * torch.linspace(-0.4, 1, 74, dtype=WIDE)
    query, key = rows(74, 24, dtype, 1), rows(131, 24, dtype, 2)
    check_info_nce(library, query, key, 0.2, weights)
    check_nt_xent(library, query[:37].clone(), key[:37].clone(), 0.3, weights)


@pytest.mark.parametrize("dtype", [FP32, WIDE])
def test_what_losses_count(compiler, dtype):
    """In units of the largest that is finite."""

    def found(*weights):
        def run(call):
            given, counts = torch.tensor(weights, dtype=WIDE), poison(len(weights) + 1, dtype=dtype)
            call("cuda_contrastive_weights", given, len(weights), ctypes.byref(array(counts)), None)
            return counts

        return compiler.load("contrastive_losses.cu").results(run)

    weights = torch.linspace(-3e7, 2e7, 2500, dtype=WIDE)
    torch.testing.assert_close(found(*weights.tolist()), counts_of(weights, poison(1, dtype=dtype)))
    assert found(0.0, -0.0).tolist() == [0, 0, 1]
    infinite = found(torch.inf, 2.0, torch.nan, -4.0)
    torch.testing.assert_close(
        infinite, torch.tensor([torch.inf, 0.5, torch.nan, -1, 4], dtype=dtype), rtol=0, atol=0, equal_nan=True
    )


@EACH
def test_columns_in_one_part_or_several(compiler, source, dtype):
    """One multiprocessor: nothing is shared out; 16: each block has a few columns."""
    query, key = rows(40, 32, dtype, 1), rows(900, 32, dtype, 2)
    library = compiler.load(source)
    one, many = (run_info_nce(library, query, key, 0.1, multiprocessors=count) for count in (1, 16))
    rounding = EPS[dtype] if on_tensor_cores(library) else 1e-5
    for x, y in zip(one, many, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * rounding, atol=rounding / 8)
    torch.testing.assert_close(one[0], many[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "parts"), [(4096, 4), (6144, 2), (8192, 2), (24_576, 2), (65_536, 1)])
def test_parts_fill_an_h100_without_a_wave_too_many(compiler, count, parts):
    """Blocks of 128 rows on 132 multiprocessors: 5 parts of 4096 columns would be 160 blocks, and take two waves."""
    library = compiler.load("contrastive_bfloat16.cu")
    library.settings(*ORDERS[0], 132, 227 << 10)
    given = Pass(row_count=count, column_count=count, width=256, rows=Array(0, DTYPES[BF16]), columns=Array(16, 0))
    assert library.ask("cuda_contrastive_bfloat16_memory", ctypes.byref(given)) == parts * count * 3 * 4


def test_memory_of_both_gradients_in_bfloat16(compiler):
    """Beside themselves they take less than 100 MB of an H100 at B = N = 65,536, d = 512."""
    library = compiler.load("contrastive_bfloat16.cu")
    library.settings(*ORDERS[0], 132, 227 << 10)
    header = (CUDA / "contrastive.h").read_text(encoding="utf-8")
    at_a_time = 1 << int(re.search(r"CONTRASTIVE_SUMS_AT_A_TIME = 1 << (\d+);", header)[1])
    count, width = 65_536, 512
    places = {name: Array(address, DTYPES[BF16]) for name, address in (("rows", 16), ("columns", 32), ("gradient", 48))}
    given = Pass(row_count=at_a_time // width, column_count=count, width=width, **places)
    of_sums = 4 * count * 4 + 8 * count  # losses, largest, share and counts; the weights that autograd gives
    assert library.ask("cuda_contrastive_bfloat16_memory", ctypes.byref(given)) + of_sums < 100e6


def fits(library, dtype, width, shared_limit):
    library.settings(*ORDERS[0], 132, shared_limit)
    name = {BF16: "bfloat16", FP16: "float16", FP32: "tf32"}[dtype]
    function = getattr(library.handle, f"cuda_contrastive_{name}_fits")
    function.restype = ctypes.c_bool
    return function(ctypes.c_int64(width))


@pytest.mark.parametrize("dtype", EPS)
def test_widths_that_fit(compiler, dtype):
    """Shared memory of sm_90, of sm_80, and of sm_86 and sm_89."""
    library = compiler.load(source_of(dtype))
    most = (512, 512, 256) if dtype == FP32 else (1024, 768, 512)
    for limit, width in zip((227 << 10, 163 << 10, SMALL), most, strict=True):
        assert fits(library, dtype, width, limit)
        assert not fits(library, dtype, width + 1, limit)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("width", "limit"), [(128, SMALL), (256, SMALL), (256, 163 << 10), (512, SMALL)])
def test_small_shared_memory(compiler, dtype, width, limit):
    query, key = rows(20, width, dtype, 1), rows(70, width, dtype, 2)
    library = compiler.load(source_of(dtype))
    if not fits(library, dtype, width, limit):
        with pytest.raises(EmulationError, match="too large"):
            run_info_nce(library, query, key, 0.1, shared_limit=limit)
        return
    large, small = (run_info_nce(library, query, key, 0.1, shared_limit=size) for size in (227 << 10, limit))
    torch.testing.assert_close(large[0], small[0], rtol=1e-5, atol=1e-5)
    check_info_nce(library, query, key, 0.1, shared_limit=limit)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("width", [700, 1024])
def test_wide_rows_in_half_precision(compiler, dtype, width):
    query, key = rows(35, width, dtype, 1), rows(70, width, dtype, 2)
    library = compiler.load(source_of(dtype))
    check_info_nce(library, query, key, 0.1)
    check_nt_xent(library, query, key[:35].clone(), 0.2)


@pytest.mark.parametrize("dtype", EPS)
def test_rows_that_begin_anywhere(compiler, dtype):
    """Rows of a width that the kernel reads as it is, from an address that is no multiple of 16 bytes."""
    width = 64
    query, key = (
        torch.cat([torch.zeros(1, dtype=dtype), rows(count, width, dtype, count).flatten()])[1:].view(count, width)
        for count in (20, 30)
    )
    assert query.data_ptr() % 16
    assert query.is_contiguous()
    check_info_nce(compiler.load(source_of(dtype)), query, key, 0.1)


@EACH
def test_nan_stays_in_its_row(compiler, source, dtype):
    query, key = rows(50, 16, dtype, 1), rows(50, 16, dtype, 2)
    query[17, 3] = torch.nan
    losses, of_query, of_key = run_info_nce(compiler.load(source), query, key, 0.2)
    assert losses.isnan().nonzero().flatten().tolist() == [17]
    assert of_query.isnan().any(1).nonzero().flatten().tolist() == [17]
    assert of_key.isnan().all()


@EACH
def test_large_logits(compiler, source, dtype):
    query, key = 100 * rows(20, 64, dtype, 1), 100 * rows(30, 64, dtype, 2)
    library = compiler.load(source)
    losses, of_query, _ = run_info_nce(library, query, key, 1e-2)
    truth = info_nce(multiplied(library, query), multiplied(library, key), 1e-2, "none")
    torch.testing.assert_close(losses.double(), truth, rtol=1e-5, atol=1)
    assert of_query.isfinite().all()


@pytest.mark.parametrize("dtype", [FP32, WIDE])
def test_the_sum_of_the_losses(compiler, dtype):
    library, losses = compiler.load("contrastive_losses.cu"), torch.rand(5000, dtype=dtype)

    def run(call):
        result = poison(1, dtype=dtype)
        call("cuda_contrastive_sum", ctypes.byref(array(losses)), 5000, 5000.0, ctypes.byref(array(result)), None)
        return result

    torch.testing.assert_close(library.results(run)[0], losses.mean())


def with_fault(compiler, source, old, new):
    """The kernels of `source` with `old`, which one of the headers that they are made of holds once, as `new`."""
    text = (CUDA / source).read_text(encoding="utf-8")
    for name in ("contrastive_launch.h", "contrastive_tensor_cores.h", "contrastive_precisions.h"):
        header = (CUDA / name).read_text(encoding="utf-8").replace("#pragma once", "")
        text = text.replace(f'#include "cuda/{name}"\n', header)
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    return compiler.compile(text.replace(old, new), Path(source).stem)


@pytest.mark.nightly  # each compiles all kernels of a precision
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The barrier between the weights' writing and their reading.
        ("      __syncthreads();  // all warps across have written their weights\n", ""),
        # The barrier at the start of a tile.
        (
            "    __syncthreads();  // the tile is there, and the one before has been read, with its weights and sums\n",
            "",
        ),
        # The fragment's rows.
        ("values + lane % 16 * PITCH", "values + lane % 8 * PITCH"),
        # The wait for the tile.
        ("    copy_async_wait<0>();\n    __syncthreads();  // the tile", "    __syncthreads();  // the tile"),
        # The buffer that the next tile is fetched to.
        ("columns + index % 2 * (T::COLUMNS * T::PITCH),", "columns,"),
        # The turn of the sums of the columns.
        ("column_sums + index % 2 * (2 * T::COLUMNS) + own_column", "column_sums + own_column"),
        # The columns behind the last one.
        ("first_column + T::COLUMNS > pass.column_count", "first_column > pass.column_count"),
        # The tile with a row's positive.
        ("first < first_column + T::COLUMNS && first_column < first + count", "first == first_column && count"),
        # The fragments of the step before.
        ("a[step % 2][d][m], fragment", "a[0][d][m], fragment"),
    ],
)
def test_a_planted_fault_is_found(compiler, old, new):
    library = with_fault(compiler, source_of(BF16), old, new)
    query, key = rows(150, 32, BF16, 1), rows(170, 32, BF16, 2)
    with pytest.raises(AssertionError):
        check_info_nce(library, query, key, 0.2)


@pytest.mark.nightly  # each compiles all kernels of a precision
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The second chain of products.
        ("chain = 1; chain < CHAINS", "chain = 2; chain < CHAINS"),
        # The second fragment on end.
        ("const int half = ONE ? d", "const int half = ONE ? 0"),
        # The depth of a step.
        ("const int k = step * OF_DEPTH * T::DEPTH;", "const int k = step * T::DEPTH;"),
        # The warps across.
        ("i < T::ACROSS; ++i) all +=", "i < 2; ++i) all +="),
    ],
)
def test_a_planted_fault_in_wide_rows_is_found(compiler, old, new):
    library = with_fault(compiler, source_of(BF16), old, new)
    query, key = rows(33, 700, BF16, 1), rows(70, 700, BF16, 2)
    with pytest.raises(AssertionError):
        check_info_nce(library, query, key, 0.2)


@pytest.mark.nightly  # each compiles all kernels of a precision
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The positive that is counted on from the first column.
        ("first_positive - pass.column_count, T::ROWS)", "first_positive, T::ROWS)"),
        # The tile with the diagonal.
        ("pass.leave_out_self && tile_meets<T>(first_column, first_row, T::ROWS)", "pass.leave_out_self && !first_row"),
        # The sums of the rows, beside those of the columns.
        ("if (BY_ROW) values[e] +=", "if (BY_ROW) values[e] ="),
    ],
)
def test_a_planted_fault_in_nt_xent_is_found(compiler, old, new):
    library = with_fault(compiler, source_of(BF16), old, new)
    view1, view2 = rows(150, 32, BF16, 1), rows(150, 32, BF16, 2)
    with pytest.raises(AssertionError):
        check_nt_xent(library, view1, view2, 0.2)


@pytest.mark.nightly  # each compiles all kernels of a precision
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The rows of the values, in the order of the weights.
        ("values + lane % 4 * 2 * PITCH", "values + lane % 4 * PITCH"),
        # The depth of a fragment.
        ("lane / 8 % 2 * T::LANES;", "lane / 8 % 2 * 8;"),
        # The rounding: tensor cores cut off what is too long.
        (
            "column < width ? Precision::rounded(rows[row * width + column])",
            "column < width ? rows[row * width + column]",
        ),
        # The padding.
        (": static_cast<Entry>(0);", ": rows[row * width];"),
    ],
)
def test_a_planted_fault_in_tf32_is_found(compiler, old, new):
    library = with_fault(compiler, source_of(FP32), old, new)
    query, key = rows(70, 32, FP32, 1), rows(140, 32, FP32, 2)
    with pytest.raises(AssertionError):
        check_info_nce(library, query, key, 0.2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The barrier at which a buffer is full and the other one free.
        ("    copy_async_wait<0>();\n    __syncthreads();\n", "    copy_async_wait<0>();\n"),
        # A lane's place in the second product.
        ("values + (j + l) * S::WIDTH", "values + (j + 1) * S::WIDTH"),
        # The factor of what was summed before.
        ("        total[i] *= factor;\n", ""),
    ],
)
def test_a_planted_fault_in_the_wide_kernel_is_found(compiler, old, new):
    library = compiler.mutant("contrastive_wide.cu", old, new)
    query, key = rows(70, 40, FP32, 1), rows(140, 40, FP32, 2)
    with pytest.raises(AssertionError):
        check_info_nce(library, query, key, 0.2)
