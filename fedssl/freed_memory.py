"""What a training step has freed stays with the process, for the next step."""

import functools

import torch

#: bytes; the largest block that raises glibc's thresholds is 32 MiB with what malloc adds to it
_LARGEST = 2**25 - 2**13


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory, where its malloc is glibc's.

    A step's activations are freed at its end. By default glibc then returns their memory to the system, which clears
    it page by page when the next step asks for it again. Its thresholds adapt to the largest block of up to 32 MiB that
    was ever freed (mallopt(3), M_MMAP_THRESHOLD): whoever trains a large network has raised them already, and freeing
    one block raises them for a small one. Nothing is written into the block, so it takes no memory. With thresholds of
    your own (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), and with another malloc, nothing changes.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)
