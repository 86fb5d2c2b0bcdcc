"""What the logits are multiplied by, as a tensor."""

import torch
from torch import Tensor

from fedkernels import _checks


def scale_tensor(name: str, value: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as a scalar tensor on the device of `like`: a number in `dtype`, a tensor in its own.

    Raises:
        TypeError: value is neither a number nor a floating tensor.
        ValueError: a number that is not positive and finite, a tensor of several elements or on another device.
    """
    if not isinstance(value, Tensor):
        return like.new_full((), _checks.positive(name, value), dtype=dtype)
    _checks.floating(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor with one element, got shape {list(value.shape)}")
    if value.device != like.device:
        raise ValueError(f"{name} must be on the device of the embeddings ({like.device}), got {value.device}")
    return value.reshape(())
