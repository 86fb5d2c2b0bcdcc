"""The emulation finds the faults that are planted here; what it computes, the tests of the kernels compare."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.cuda_on_cpu.emulation import HERE, ROOT, SANITIZED, EmulationError, poison

SELF = HERE / "self_test.cu"


def check_sums(library, count):
    values = torch.ones(count)

    def run(call):
        sums = poison(2, dtype=torch.float32)
        call("self_sum_blocks", values, sums, count, None)
        return sums

    torch.testing.assert_close(library.results(run), torch.tensor([256.0, count - 256.0]))


def check_product(library, _):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, columns, generator=generator).bfloat16() for columns in (16, 8))

    def run(call):
        c = poison(16, 8, dtype=torch.float32)
        call("self_product_16", a, b, c, None)
        return c

    torch.testing.assert_close(library.results(run), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


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
        check_sums(faulty, 511)
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):  # shared memory
        check_sums(compiler.load(SELF, "of_warps[warp];", "of_warps[warp + 1];"), 512)


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
