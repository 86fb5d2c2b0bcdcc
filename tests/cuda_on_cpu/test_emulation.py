"""The emulation itself: what it computes, and that it finds the faults that are planted here."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.cuda_on_cpu.emulation import HERE, ROOT, SANITIZED, EmulationError, poison

SELF = HERE / "self_test.cu"


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sum_blocks(library, values):
    def run(call):
        sums = poison((len(values) + 255) // 256, dtype=torch.float32)
        call("self_sum_blocks", values, sums, len(values), None)
        return sums

    return library.results(run)


def product_16(library, dtype, transposed):
    a, b = randn(16, 16).to(dtype), randn(16, 8, seed=1).to(dtype)

    def run(call):
        c = poison(16, 8, dtype=torch.float32)
        right = b.T.contiguous() if transposed else b
        call("self_product_16", a, right, c, int(dtype == torch.float16), transposed, None)
        return c

    torch.testing.assert_close(library.results(run), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_sums_of_256_blocks(compiler):
    values = randn(256 * 256 - 77)
    sums = sum_blocks(compiler.load(SELF), values)
    torch.testing.assert_close(sums, torch.nn.functional.pad(values, (0, 77)).view(256, 256).sum(1))


def test_lanes(compiler):
    def run(call):
        to = poison(96, dtype=torch.int32)
        call("self_lanes", to, None)
        return to.view(3, 32)

    found = compiler.load(SELF).results(run).tolist()
    assert found[0] == [10 * (lane // 2) for lane in range(32)]
    assert found[1] == [lane ^ 1 for lane in range(16)] + [1] * 16
    assert found[2] == [7] * 32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits(compiler, dtype, transposed):
    product_16(compiler.load(SELF), dtype, transposed)


def test_blocks_wait_for_each_other(compiler):
    def run(call):
        values, counter = torch.zeros(9, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        call("self_around", values, counter, 9, None)
        return values

    assert compiler.load(SELF).results(run).tolist() == [110] * 9


def test_conversions(compiler):
    special = torch.tensor([0, 1e-8, 6e-5, 65519.9, 65520, 1e30, torch.inf, torch.nan, 1 + 2**-8, 1 + 2**-11, 3e-39])
    values = torch.cat([special, randn(100)])

    def run(call):
        to = poison(3 * len(values), dtype=torch.int32)
        call("self_convert", values, to, len(values), None)
        return to

    found = compiler.load(SELF).results(run).view(-1, 3)
    for column, dtype in ((0, torch.float16), (1, torch.bfloat16)):
        pairs = found[:, column].contiguous().view(dtype).view(-1, 2)
        torch.testing.assert_close(pairs, torch.stack([values, -values], 1).to(dtype), rtol=0, atol=0, equal_nan=True)
    back = found[:, 2].contiguous().view(torch.float32)
    torch.testing.assert_close(back, values.half().float() + values.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


# ---- planted faults ----


def check_sums(library, count):
    found = sum_blocks(library, torch.ones(count))
    torch.testing.assert_close(found, torch.tensor([256.0, count - 256.0]))


def check_product(library, count):
    product_16(library, torch.bfloat16, False)


BARRIER, LOOP = "  __syncthreads();", "  for (int offset"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new", "check", "count", "message"),
    [
        (BARRIER + "  // before", "  // before", check_sums, 512, None),
        (BARRIER, "  if (index < count) __syncthreads();", check_sums, 511, "of 256 threads 255 wait"),
        (LOOP, "  if (threadIdx.x % 32) for (int offset", check_sums, 512, r"in their warp \(__shfl_xor_sync\)"),
        ("  copy_async_wait<0>();\n", "", check_product, 0, None),
        ("lane / 4, column = 2 * (lane % 4)", "lane % 8, column = 2 * (lane / 8)", check_product, 0, None),
        ("{columns[0], columns[1]}", "{columns[1], columns[0]}", check_product, 0, None),
        ("lane % 16 * 16 + lane / 16 * 8", "lane / 2 * 16 + lane % 2 * 8", check_product, 0, None),
    ],
)
def test_a_fault_is_found(compiler, old, new, check, count, message):
    check(compiler.load(SELF), count)
    faulty = compiler.load(SELF, old, new)
    with pytest.raises(AssertionError, match=message):
        check(faulty, count)


# ---- the tests of all kernels under AddressSanitizer, in a process that starts with it ----


@pytest.mark.skipif(not SANITIZED, reason="for the process that test_all_kernels_stay_inside_their_memory starts")
def test_an_off_by_one_is_found(compiler):
    faulty = compiler.load(SELF, "index < count ?", "index <= count ?")
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        sum_blocks(faulty, torch.ones(511))
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):  # shared memory
        sum_blocks(compiler.load(SELF, "of_warps[warp];", "of_warps[warp + 1];"), torch.ones(512))


@pytest.mark.nightly
@pytest.mark.skipif(SANITIZED or shutil.which("g++") is None, reason="needs g++, in the first process")
def test_all_kernels_stay_inside_their_memory():
    # libstdc++ as well, for AddressSanitizer looks its functions up when it starts.
    ask = [["g++", f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    runtimes = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in ask]
    if not all(os.path.isabs(runtime) for runtime in runtimes):
        pytest.skip("g++ has no AddressSanitizer here")
    environment = os.environ | {
        "FEDKERNELS_SANITIZED": "1",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:halt_on_error=0",
        "OMP_NUM_THREADS": "1",
    }
    chosen = ["tests/cuda_on_cpu", "-k", "off_by_one or not is_found"]  # the other faults were found already
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout
