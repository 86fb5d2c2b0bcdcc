"""The precision that sums are held in."""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any input is float64, else float32: half inputs are widened, never the reverse."""
    return torch.float64 if torch.float64 in [t.dtype for t in tensors] else torch.float32


def no_autocast(tensor: Tensor) -> torch.autocast:
    """A region in which autocast does not narrow the products of `tensor` to half precision."""
    # Autocast does not know the meta device, on which nothing is computed anyway.
    return torch.autocast("cpu" if tensor.is_meta else tensor.device.type, enabled=False)
