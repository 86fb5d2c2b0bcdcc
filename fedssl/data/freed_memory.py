"""What glibc does with memory that a training step has freed."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

#: of mallopt, in glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: glibc takes no larger one for blocks that get pages of their own
_LARGEST_BLOCK = 2**25
_NEVER_TRIM = 2**31 - 1
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """From now on this process keeps the memory that it frees, and takes it again, until it ends.

    A step frees all that its forward pass has stored. By default glibc hands much of that back to the system, and the
    next step gets it back page by page, each filled with zeros: thousands of page faults a step. The process's peak
    stays about the same. Blocks of more than 32 MiB are handed back as before.

    The setting holds for the whole process. It is made once.

    Returns:
        Whether it was made. It is not where the C library is not glibc, or where the environment says what glibc is to
        do (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`).
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS):
        return False
    library = ctypes.CDLL(None)
    # in this order: the first call ends glibc's own choice of both, which starts at small blocks
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and library.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
