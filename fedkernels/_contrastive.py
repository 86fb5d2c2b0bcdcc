"""Which compiled operator serves a contrastive loss."""

from typing import Any

from torch import Tensor

from fedkernels import _native
from fedkernels._autograd import has_tangent


def operator(name: str, first: Tensor, second: Tensor, weighted_later: bool) -> Any:
    """The compiled operator `name`, or None: then the reference serves.

    `weighted_later`: the gradients need weights that only the backward pass knows, for which there is no CUDA kernel.
    """
    found = None if has_tangent(first, second) else _native.operator(name, first, second)
    return None if weighted_later and first.device.type != "cpu" else found
