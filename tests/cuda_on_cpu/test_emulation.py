"""The self-test's cases in both orders of the threads, which find the faults that are planted here."""

import os
import shutil
import subprocess
import sys

import pytest

from fedkernels.internal import self_test_cases
from tests.cuda_on_cpu.emulation import ROOT, SANITIZED
from tests.cuda_on_cpu.planted_faults import OF_BOUNDS, OF_ORDERS, number_of

MESSAGES = {
    "a barrier of some threads": r"of \d+ threads \d+ wait at __syncthreads",
    "a shuffle of some lanes": r"in their warp \(__shfl_xor_sync\)",
}


def check_cases_in_both_orders(card, operator):
    """On a device that holds the images of two_views in its memory, and a few blocks at a time."""
    device = {"multiprocessors": 1, "shared_limit": (16 if operator == "two_views" else 227) << 10}
    for case in self_test_cases.cases_of(operator):
        wide = [one.double() if one.is_floating_point() else one for one in case.inputs]
        results = card.results(case.kernel, *case.inputs, **device)
        assert not self_test_cases.difference(case, results, case.reference(*wide))


# Few of whose values are compared in files of their own.
OF_THE_SELF_TEST = "client_weights", "linear_cka", "linear_cka_pairwise", "linear_cka_to_kernel", "two_views"


@pytest.mark.parametrize("operator", OF_THE_SELF_TEST)
def test_the_cases_of_the_self_test(bindings, operator):
    """Values and gradients in every dtype."""
    check_cases_in_both_orders(bindings, operator)


@pytest.mark.nightly
@pytest.mark.parametrize("operator", sorted({fault.operator for fault in OF_ORDERS} - {"unbalanced_ot"}))
def test_each_fault_is_found(card, operator):
    card.plant(0)
    check_cases_in_both_orders(card, operator)
    for fault in OF_ORDERS:
        if fault.operator == operator:
            print(fault.name)  # the last one is not found
            card.plant(number_of(fault))
            # A RuntimeError where a barrier waits for ever.
            with pytest.raises((AssertionError, RuntimeError), match=MESSAGES.get(fault.family)):
                check_cases_in_both_orders(card, operator)


# ---- the tests of all kernels under AddressSanitizer, in a process that starts with it ----


@pytest.mark.skipif(not SANITIZED, reason="for the process that test_all_kernels_stay_inside_their_memory starts")
@pytest.mark.parametrize("fault", OF_BOUNDS, ids=lambda fault: fault.name)
def test_an_off_by_one_is_found(card, fault):
    card.plant(number_of(fault))
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        check_cases_in_both_orders(card, fault.operator)


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
