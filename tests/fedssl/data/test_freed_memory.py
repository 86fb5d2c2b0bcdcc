"""A process that keeps freed memory does not get it from the system again and again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

#: Frees 64 blocks of 1 MiB, as a step does, then makes and fills them again; prints the page faults of the last time.
STEPS = """
import ctypes, resource, sys
from fedssl.data.freed_memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(2**20) for _ in range(64)]
    for block in blocks:
        ctypes.memset(block, 1, 2**20)
    for block in blocks:
        library.free(block)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def kept_and_faults(action: str, **settings: str) -> tuple[str, int]:
    unset = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    command = [sys.executable, "-c", STEPS, action]
    kept, faults = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    return kept, int(faults)


def test_freed_memory_is_taken_again_without_page_faults():
    """64 MiB are 16,384 pages of 4 KiB, or 4,096 of 16 KiB."""
    assert kept_and_faults("leave")[1] > 1000
    kept, faults = kept_and_faults("keep")
    assert kept == "True"
    assert faults < 100


def test_what_the_environment_says_holds():
    kept, faults = kept_and_faults("keep", MALLOC_TRIM_THRESHOLD_="65536")
    assert kept == "False"
    assert faults > 1000
