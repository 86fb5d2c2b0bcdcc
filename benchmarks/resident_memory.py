"""The memory of one call on the CPU: how far the process's resident set grows.

The peak of the resident set is reset (/proc/self/clear_refs), the implementation called once, and the peak (VmHWM)
compared with what was resident before the call. The outputs' own bytes are given separately. The address space is
limited, so that a peer that needs more than the machine has ends with an error and not with the machine. Linux only.
"""

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Implementation, Outputs
from benchmarks.timing import call, problem

MOST_MEMORY = 12 * 2**30  # bytes that an implementation may ask for, and not more than 3/4 of what is free


def measure_memory(case: Case, implementation: Implementation) -> dict[str, Any]:
    """-> "one_call", seconds, and "growth", "outputs" and "extra", bytes; or "status", what went wrong.

    It is meant for a process of its own.
    """
    device = torch.device("cpu")
    if case.tiny is not None:
        call(case, implementation, case.tiny(device))
    torch.mm(torch.ones(512, 512), torch.ones(512, 512)).sum()  # starts the threads, whose stacks count too
    inputs = case.inputs(device)
    _limit_memory()
    start = time.perf_counter()
    try:
        outputs, growth = peak_growth(lambda: call(case, implementation, inputs))
    except (MemoryError, RuntimeError) as error:
        return {"status": problem(error)}
    answer: dict[str, Any] = {"one_call": time.perf_counter() - start}
    if growth is not None:
        own = _storages(inputs)
        fresh = {address: size for address, size in _storages(outputs).items() if address not in own}
        answer |= {"growth": growth, "outputs": sum(fresh.values()), "extra": max(0, growth - sum(fresh.values()))}
    return answer


def peak_growth(run: Callable[[], Outputs]) -> tuple[Outputs, int | None]:
    """-> what `run` returns, and by how many bytes the resident set grew at most; None where it cannot be measured."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed pages that are still resident would hide growth
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
    except (OSError, AttributeError):
        return run(), None
    outputs = run()
    return outputs, max(0, status("VmHWM") - before)


def status(field: str) -> int:
    """Bytes of one line of /proc/self/status, which counts in kB; OSError where there is no such file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _limit_memory() -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        limit = status("VmSize") + min(MOST_MEMORY, 3 * free // 4)
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _storages(value: object) -> dict[int, int]:
    """Address and bytes of every storage that the tensors in (nested) dicts, lists and tuples use."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return {address: size for item in value for address, size in _storages(item).items()}
    return {}
