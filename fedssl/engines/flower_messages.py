"""Messages as Flower's records: every tensor travels as raw bytes in its own dtype, under its own name."""

from __future__ import annotations

import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..errors import UserError
from ..messages import Message

# Flower's own serialisation is NumPy's, which has no bfloat16 and adds a header of 128 bytes to every array.
_SERIALISATION = "torch.raw"

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def to_records(message: Message) -> RecordDict:
    """A message as three records: `tensors`, `numbers` and `config`."""
    arrays = {name: _to_array(tensor) for name, tensor in message.tensors.items()}
    return RecordDict(
        {
            "tensors": ArrayRecord(arrays),
            "numbers": MetricRecord({name: _number(value) for name, value in message.numbers.items()}),
            "config": ConfigRecord(dict(message.config)),
        }
    )


def from_records(records: RecordDict) -> Message:
    """The message of `to_records`, in memory of its own.

    Raises:
        UserError: a record is missing, or an array is none that `to_records` makes.
    """
    arrays, numbers, config = (records.get(name) for name in ("tensors", "numbers", "config"))
    if not (isinstance(arrays, ArrayRecord) and isinstance(numbers, MetricRecord) and isinstance(config, ConfigRecord)):
        raise UserError(f"the message has records {sorted(records)}, expected tensors, numbers and config")
    lists = [name for record in (numbers, config) for name, value in record.items() if isinstance(value, list | bytes)]
    if lists:
        raise UserError(f"{lists[0]} is a list, expected one value")
    tensors = {name: _to_tensor(name, array) for name, array in arrays.items()}
    found: tuple[dict[str, Any], dict[str, Any]] = dict(numbers.items()), dict(config.items())
    return Message(tensors, *found)


def _number(value: float) -> int | float:
    return int(value) if isinstance(value, int) else float(value)  # a NumPy scalar is refused by Flower


def _to_array(tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"a tensor of dtype {tensor.dtype} cannot travel")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Array(dtype, tuple(tensor.shape), _SERIALISATION, flat.view(torch.uint8).numpy().tobytes())


def _to_tensor(name: str, array: Array) -> Tensor:
    dtype = _DTYPES.get(array.dtype)
    if array.stype != _SERIALISATION or dtype is None:
        raise UserError(f"{name} came as {array.stype} of {array.dtype}, expected {_SERIALISATION}")
    count = math.prod(array.shape)
    if min(array.shape, default=0) < 0 or count * dtype.itemsize != len(array.data):
        raise UserError(f"{name} came with {len(array.data)} bytes for the shape {list(array.shape)} of {array.dtype}")
    if not count:
        return torch.empty(array.shape, dtype=dtype)
    # the clone lies in torch's own memory: on another alignment a matrix product may round differently
    return torch.frombuffer(bytearray(array.data), dtype=dtype).clone().reshape(array.shape)
