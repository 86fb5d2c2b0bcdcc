"""Which compiled operator serves a contrastive loss."""

from typing import Any

import torch
from torch import Tensor

from fedkernels import _native
from fedkernels._autograd import has_tangent

_WIDEST = 512  # columns that the CUDA kernels hold


def operator(name: str, first: Tensor, second: Tensor, weighted_later: bool) -> Any:
    """The compiled operator `name`, or None: then the reference serves.

    On CUDA the kernels multiply on tensor cores and take both matrices in one half precision. `weighted_later`: the
    gradients need weights that only the backward pass knows, for which there is no CUDA kernel.
    """
    found = None if has_tangent(first, second) else _native.operator(name, first, second)
    if found is None or first.device.type == "cpu":
        return found
    half = first.dtype == second.dtype and first.dtype in (torch.float16, torch.bfloat16)
    return found if half and not weighted_later and _fits(first) else None


def _fits(rows: Tensor) -> bool:
    """Do the least tiles of csrc/cuda/contrastive.cu fit into the device's shared memory?"""
    width = rows.shape[1]
    halves = (64 + 2 * 32) * ((width + 15) // 16 * 16 + 8) + 64 * (32 + 8)
    limit = torch.cuda.get_device_properties(rows.device).shared_memory_per_block_optin
    return width <= _WIDEST and 2 * halves + 3 * 64 * 4 <= limit
