"""csrc/cuda/contrastive.cu: the passes of info_nce and nt_xent against the references in float64."""

import ctypes

import pytest
import torch

from fedkernels.reference.info_nce import info_nce
from fedkernels.reference.nt_xent import nt_xent
from tests.cuda_on_cpu.emulation import DTYPES, Array, EmulationError, poison

BF16, FP16 = torch.bfloat16, torch.float16
SMALL = 99 << 10  # bytes of shared memory that a block may have on sm_86 and sm_89


class Pass(ctypes.Structure):
    """struct ContrastivePass of csrc/cuda/contrastive.h."""

    _fields_ = (
        ("rows", Array),
        ("columns", Array),
        *((name, ctypes.c_int64) for name in ("row_count", "column_count", "width")),
        ("temperature", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("shift", "positives")),
        *((name, ctypes.c_bool) for name in ("leave_out_self", "given")),
        *(
            (name, ctypes.c_void_p)
            for name in ("row_largest", "row_share", "column_largest", "column_share", "losses", "gradient")
        ),
    )


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def array(tensor):
    return Array(tensor.data_ptr(), DTYPES[tensor.dtype])


def rows(count, width, dtype, seed):
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(values).to(dtype)


def run_pass(library, call, first, second, temperature, sums, gradient, *, losses=None, processors=4, **options):
    shape = first.shape[0], second.shape[0], first.shape[1]
    library.handle.cuda_on_cpu_settings(0, 0, processors, ctypes.c_size_t(227 << 10))
    size = library.handle.cuda_contrastive_memory
    size.restype = ctypes.c_int64
    memory = poison(
        size(*(ctypes.c_int64(n) for n in shape), ctypes.c_bool(gradient is not None)) // 4, dtype=torch.float32
    )
    names = dict(zip(("row_largest", "row_share", "column_largest", "column_share"), map(pointer, sums), strict=True))
    given = Pass(
        array(first),
        array(second),
        *shape,
        temperature,
        losses=pointer(losses),
        gradient=pointer(gradient),
        **names,
        **options,
    )
    call("cuda_contrastive", ctypes.byref(given), memory, None)


def floats(*shape):
    return poison(*shape, dtype=torch.float32)


def run_info_nce(library, query, key, temperature, **device):
    processors = device.get("multiprocessors", 4)

    def run(call):
        losses, largest, share = floats(len(query)), floats(len(query)), floats(len(query))
        of_query, of_key = floats(*query.shape), floats(*key.shape)
        sums = (largest, share, None, None)
        run_pass(
            library,
            call,
            query,
            key,
            temperature,
            sums,
            of_query,
            losses=losses,
            positives=len(key),
            processors=processors,
        )
        sums = (None, None, largest, share)
        run_pass(
            library,
            call,
            key,
            query,
            temperature,
            sums,
            of_key,
            given=True,
            positives=len(query),
            processors=processors,
        )
        return losses, of_query, of_key

    return library.results(run, **device)


def run_nt_xent(library, view1, view2, temperature):
    z = torch.cat([view1, view2])

    def run(call):
        losses, largest, share, gradient = floats(len(z)), floats(len(z)), floats(len(z)), floats(*z.shape)
        options = {"shift": len(view1), "positives": len(z), "leave_out_self": True}
        run_pass(library, call, z, z, temperature, (largest, share, None, None), None, losses=losses, **options)
        sums = (largest, share, largest, share)
        run_pass(library, call, z, z, temperature, sums, gradient, given=True, **options)
        return losses, gradient

    return library.results(run)


def check(found, truth, gradients, expected, dtype, temperature):
    torch.testing.assert_close(found.double(), truth, rtol=2e-5, atol=2e-5)
    for gradient, wide in zip(gradients, expected, strict=True):
        # The weights are rounded to the inputs' dtype before the second product, and they sum to 1 or 2.
        atol = torch.finfo(dtype).eps * float(wide.abs().max())
        torch.testing.assert_close(gradient.double(), wide, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "temperature"),
    [(1, 1, 1, 1.0), (5, 9, 3, 0.5), (130, 131, 40, 0.2), (64, 200, 144, 0.1), (70, 70, 256, 0.2), (33, 66, 300, 0.3)],
)
def test_info_nce(compiler, dtype, queries, keys, width, temperature):
    query, key = rows(queries, width, dtype, 1), rows(keys, width, dtype, 2)
    found, *gradients = run_info_nce(compiler.load("contrastive.cu"), query, key, temperature)
    wide = [query.double().requires_grad_(), key.double().requires_grad_()]
    truth = info_nce(*wide, temperature, "none")
    check(found, truth.detach(), gradients, torch.autograd.grad(truth.sum(), wide), dtype, temperature)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("batch", "width", "temperature"), [(1, 5, 1.0), (37, 24, 0.2), (67, 129, 0.5), (20, 512, 0.1)]
)
def test_nt_xent(compiler, dtype, batch, width, temperature):
    view1, view2 = rows(batch, width, dtype, 1), rows(batch, width, dtype, 2)
    found, gradient = run_nt_xent(compiler.load("contrastive.cu"), view1, view2, temperature)
    wide = [view1.double().requires_grad_(), view2.double().requires_grad_()]
    truth = nt_xent(*wide, temperature, "none")
    expected = torch.cat(torch.autograd.grad(truth.sum(), wide))
    check(found, truth.detach(), [gradient], [expected], dtype, temperature)


def test_columns_in_one_part_or_several(compiler):
    """One multiprocessor: nothing is shared out; 16: each block has a few columns."""
    query, key = rows(40, 32, BF16, 1), rows(900, 32, BF16, 2)
    library = compiler.load("contrastive.cu")
    one, many = (run_info_nce(library, query, key, 0.1, multiprocessors=count) for count in (1, 16))
    for x, y in zip(one, many, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(one[0], many[0], rtol=1e-5, atol=1e-5)


def test_small_shared_memory(compiler):
    query, key = rows(20, 256, BF16, 1), rows(70, 256, BF16, 2)
    library = compiler.load("contrastive.cu")
    large, small = (run_info_nce(library, query, key, 0.1, shared_limit=limit) for limit in (227 << 10, SMALL))
    torch.testing.assert_close(large[0], small[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(EmulationError, match="too large"):
        run_info_nce(library, rows(4, 512, BF16, 1), rows(4, 512, BF16, 2), 0.1, shared_limit=SMALL)


def test_nan_stays_in_its_row(compiler):
    query, key = rows(50, 16, BF16, 1), rows(50, 16, BF16, 2)
    query[17, 3] = torch.nan
    losses, of_query, of_key = run_info_nce(compiler.load("contrastive.cu"), query, key, 0.2)
    assert losses.isnan().nonzero().flatten().tolist() == [17]
    assert of_query.isnan().any(1).nonzero().flatten().tolist() == [17]
    assert of_key.isnan().all()


def test_large_logits(compiler):
    query, key = 100 * rows(20, 64, BF16, 1), 100 * rows(30, 64, BF16, 2)
    losses, of_query, _ = run_info_nce(compiler.load("contrastive.cu"), query, key, 1e-2)
    torch.testing.assert_close(losses.double(), info_nce(query.double(), key.double(), 1e-2, "none"), rtol=1e-5, atol=1)
    assert of_query.isfinite().all()


def test_the_sum_of_the_losses(compiler):
    library, losses = compiler.load("contrastive.cu"), torch.rand(5000)

    def run(call):
        result = floats(1)
        call("cuda_contrastive_sum", losses, 5000, 5000.0, result, None)
        return result

    torch.testing.assert_close(library.results(run)[0], losses.mean())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A barrier between the weights' writing and their reading.
        ("    if (pass.gradient) {\n      __syncthreads();\n", "    if (pass.gradient) {\n"),
        # The fragment's rows.
        ("tile + (k + lane % 16) * pitch", "tile + (k + lane % 8) * pitch"),
        # The wait for the tile.
        ("copy_async_wait<1>();", "copy_async_wait<2>();"),
    ],
)
def test_a_planted_fault_is_found(compiler, old, new):
    library = compiler.mutant("contrastive.cu", old, new)
    query, key = rows(70, 32, BF16, 1), rows(140, 32, BF16, 2)
    wide = [query.double().requires_grad_(), key.double().requires_grad_()]
    truth = info_nce(*wide, 0.2, "none")
    expected = torch.autograd.grad(truth.sum(), wide)

    def compare():
        found, *gradients = run_info_nce(library, query, key, 0.2)
        check(found, truth.detach(), gradients, expected, BF16, 0.2)

    with pytest.raises(AssertionError):
        compare()
