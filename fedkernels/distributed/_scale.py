"""What the logits are multiplied or divided by, as a tensor."""

import torch
from torch import Tensor

from fedkernels.internal import checks


def scale_tensor(name: str, value: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as a scalar tensor on the device of `like`: a number in `dtype`, a tensor in its own.

    Raises:
        TypeError: value is neither a number nor a floating tensor.
        ValueError: value is not positive and finite (a tensor's is looked at on the CPU alone), or is a tensor of
            several elements or on another device.
    """
    value = checks.positive_number_or_tensor(name, value, like.device)
    if isinstance(value, Tensor):
        return value.reshape(())
    return like.new_full((), value, dtype=dtype)
