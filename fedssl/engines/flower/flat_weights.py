"""Weights as one vector, the form in which Flower's differential privacy and SecAgg+ take them.

The vector holds every entry that travels and is floating point, running statistics too. (As an array of its own a
zero-dimensional entry, such as a learnt temperature, would pass Flower's clipping and noise unchanged.) Integer
entries, such as BatchNorm's counter of batches, are not in it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UserError

Vector = NDArray[np.float64]


def flatten_weights(tensors: dict[str, Tensor]) -> Vector:
    """All floating-point tensors one after another, in the order of their names, float64 [n]."""
    names = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())
    vector: Vector = torch.cat([tensors[name].detach().double().flatten() for name in names]).numpy()
    return vector


def unflatten_weights(vector: Vector, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """`like` with its floating-point tensors taken from a vector of `flatten_weights`, in their own dtypes."""
    sizes = {name: like[name].numel() for name in sorted(like) if like[name].is_floating_point()}
    parts = dict(zip(sizes, torch.from_numpy(vector).split(list(sizes.values())), strict=True))
    return {
        name: parts[name].reshape(tensor.shape).to(tensor.dtype) if name in parts else tensor
        for name, tensor in like.items()
    }


def require_finite(vector: Vector) -> None:
    """Refuse a client's weights that hold NaN or an infinity (UserError).

    Clipping would let the finite entries pass as they are, and masks would hide the others from the server's guard.
    """
    if not np.isfinite(vector).all():
        raise UserError("its weights are not finite after training")
