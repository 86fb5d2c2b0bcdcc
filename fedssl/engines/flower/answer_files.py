"""A round's answers on the server's disk, so that the server's memory does not grow with the number of sites.

The guard compares each answer with the round's median, and `local_model_distance` each client with each other one: so a
round's answers are needed together, and cannot be added up as they arrive. Mapped from a file they are read like any
tensors, and the system takes back their memory whenever it needs it.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...messages import Message

#: bytes of an answer that stays in memory; a file for each would cost a round of small models more than it saves
_SMALL_ANSWER = 2**20
#: bytes; torch's own alignment, by which a product may round
_ALIGNMENT = 64


def on_disk(message: Message, folder: Path) -> Message:
    """The message with its tensors mapped from a file without a name, which ends with them.

    A small message stays in memory. So does one that cannot be written: on a full disk the round's commit says so.

    Args:
        message: a message whose tensors are on the CPU.
        folder: on the disk that is to hold the file.
    """
    if message.num_bytes < _SMALL_ANSWER:
        return message
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        starts = {}
        for name, tensor in message.tensors.items():
            starts[name] = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            file.write(_bytes_of(tensor).numpy().data)
        size = file.tell()
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"  # the mapping outlives the open file
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        tensors = {name: _tensor_at(mapped, starts[name], tensor) for name, tensor in message.tensors.items()}
        return replace(message, tensors=tensors)
    return message


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensor_at(mapped: Tensor, start: int, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return mapped[start : start + size].view(like.dtype).view(like.shape)
