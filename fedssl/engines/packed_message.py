"""A message as plain bytes, for a pipe between two processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..messages import Message


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's entries in the order in which they lie in memory, and what makes them a tensor again."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PackedMessage:
    """A message whose tensors are bytes.

    The order of the tensors' names and the strides are kept, as sums and matrix products over other ones may round
    differently. A pipe's own way for tensors, shared memory, takes a file descriptor for each of them.
    """

    tensors: dict[str, PackedTensor]
    numbers: dict[str, float]
    config: dict[str, str | int | float | bool]
    metrics: dict[str, float]


def pack(message: Message) -> PackedMessage:
    """A message as bytes; `unpack` makes an equal one of it on the CPU."""
    tensors = {name: _pack(tensor) for name, tensor in message.tensors.items()}
    return PackedMessage(tensors, message.numbers, message.config, message.metrics)


def unpack(packed: PackedMessage) -> Message:
    """The message that was packed, in memory of its own."""
    tensors = {name: _unpack(tensor) for name, tensor in packed.tensors.items()}
    return Message(tensors, packed.numbers, packed.config, packed.metrics)


def _pack(tensor: torch.Tensor) -> PackedTensor:
    tensor = tensor.detach().cpu()
    if torch.empty_like(tensor).stride() != tensor.stride():  # its entries overlap or have gaps between them
        tensor = tensor.contiguous()
    entries = tensor.as_strided((tensor.numel(),), (1,))
    return PackedTensor(
        entries.view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    )


def _unpack(packed: PackedTensor) -> torch.Tensor:
    data = np.frombuffer(packed.data, np.uint8)
    # In torch's own memory, which is aligned: a matrix product can round differently on memory that is not.
    entries = torch.empty(len(data) // packed.dtype.itemsize, dtype=packed.dtype)
    entries.view(torch.uint8).numpy()[:] = data
    return entries.as_strided(packed.shape, packed.strides)
