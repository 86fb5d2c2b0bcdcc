"""Messages as Flower's records: tensors travel as raw bytes in their own dtype, those of a dtype as one array.

Flower moves every array by requests of its own, each way through the SuperLink's database: some forty a second on two
cores, whatever their size. A model of 100 tensors would take a site's round 400 of them; as one array it takes a few.
The record `layout` lists the tensors' names and where each lies in its array.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UserError
from ...messages import Message

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


_RECORDS = {
    "tensors": ArrayRecord,
    "layout": ConfigRecord,
    "numbers": MetricRecord,
    "config": ConfigRecord,
    "metrics": MetricRecord,
}


def to_records(message: Message) -> RecordDict:
    """A message as five records.

    `tensors` has an array for each dtype, named by it: the tensors' entries one after another. `layout` lists the
    tensors' names, dtypes, numbers of dimensions and, all in one list, sizes. The others are the message's.
    """
    parts: dict[str, list[memoryview]] = {}
    for name, tensor in message.tensors.items():
        dtype = _dtype_name(tensor.dtype)
        if dtype not in _DTYPES:
            raise TypeError(f"{name} is of dtype {tensor.dtype}, which cannot travel")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        parts.setdefault(dtype, []).append(flat.view(torch.uint8).numpy().data)
    arrays = {}
    for dtype, pieces in parts.items():
        data = b"".join(pieces)
        arrays[dtype] = Array(dtype, (len(data) // _DTYPES[dtype].itemsize,), _SERIALISATION, data)
    layout: dict[str, Any] = {
        "names": list(message.tensors),
        "dtypes": [_dtype_name(tensor.dtype) for tensor in message.tensors.values()],
        "dimensions": [tensor.dim() for tensor in message.tensors.values()],
        "sizes": [size for tensor in message.tensors.values() for size in tensor.shape],
    }
    return RecordDict(
        {
            "tensors": ArrayRecord(arrays),
            "layout": ConfigRecord(layout),
            "numbers": MetricRecord({name: _python_number(value) for name, value in message.numbers.items()}),
            "config": ConfigRecord(dict(message.config)),
            "metrics": MetricRecord({name: _python_number(value) for name, value in message.metrics.items()}),
        }
    )


def to_shared_records(messages: Mapping[int, Message]) -> dict[int, RecordDict]:
    """`to_records` of each message; messages with the same tensors share the arrays, however many they are."""
    arrays: dict[tuple[tuple[str, int], ...], RecordDict] = {}  # by the tensors' names and identities
    shared = {}
    for k, message in messages.items():
        key = tuple((name, id(tensor)) for name, tensor in message.tensors.items())
        if key not in arrays:
            arrays[key] = to_records(message)
        rest = to_records(replace(message, tensors={}))
        shared[k] = RecordDict(dict(rest) | {name: arrays[key][name] for name in ("tensors", "layout")})
    return shared


def from_records(records: RecordDict) -> Message:
    """The message of `to_records`, in memory of its own.

    Raises:
        UserError: a record is missing or invalid.
    """
    if any(not isinstance(records.get(name), kind) for name, kind in _RECORDS.items()):
        raise UserError(
            f"the message's records are invalid: expected {', '.join(_RECORDS)}, got {', '.join(sorted(records))}"
        )
    ordered: list[Any] = [records[name] for name in _RECORDS]
    arrays, layout, *rest = ordered
    lists = [name for record in rest for name, value in record.items() if isinstance(value, list | bytes)]
    if lists:
        raise UserError(f"{lists[0]} is invalid: expected one value, got a list")
    return Message(_unpack(dict(arrays.items()), dict(layout.items())), *(dict(record.items()) for record in rest))


def _unpack(arrays: dict[str, Array], layout: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that a layout describes, cut from the arrays."""
    read = dict.fromkeys(arrays, 0)  # bytes
    tensors = {}
    for name, dtype, shape in _entries(layout):
        if dtype not in arrays:
            raise UserError(f"the array {dtype} of the tensor {name} is missing")
        start, size = read[dtype], math.prod(shape) * _DTYPES[dtype].itemsize
        data = np.frombuffer(arrays[dtype].data, np.uint8)[start : start + size]
        if len(data) != size:
            raise UserError(f"the tensor {name} of {dtype} {list(shape)} needs {size} bytes, got {len(data)}")
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])  # torch's alignment: a product may round by it
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
        tensors[name] = tensor
        read[dtype] += size
    for dtype, array in arrays.items():
        if array.stype != _SERIALISATION or array.dtype != dtype:
            raise UserError(
                f"the array {dtype} is invalid: expected {_SERIALISATION} {dtype}, got {array.stype} {array.dtype}"
            )
        if len(array.data) != read[dtype]:
            raise UserError(f"the array {dtype} has {len(array.data)} bytes, but its tensors have {read[dtype]}")
    return tensors


def _entries(layout: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each tensor's name, dtype and shape; UserError where the layout is invalid."""
    lists: list[Any] = [layout.get(key) for key in ("names", "dtypes", "dimensions", "sizes")]
    names, dtypes, dimensions, sizes = lists
    valid = (
        _list_of(str, names)
        and _list_of(str, dtypes)
        and _list_of(int, dimensions)
        and _list_of(int, sizes)
        and len(names) == len(set(names)) == len(dtypes) == len(dimensions)
        and set(dtypes) <= _DTYPES.keys()
        and min(dimensions, default=0) >= 0
        and min(sizes, default=0) >= 0
        and sum(dimensions) == len(sizes)
    )
    if not valid:
        raise UserError("the message's layout is invalid: expected the names, dtypes, dimensions and sizes of tensors")
    rest = iter(sizes)
    for name, dtype, count in zip(names, dtypes, dimensions, strict=True):
        shape = tuple(next(rest) for _ in range(count))
        if math.prod(max(size, 1) for size in shape) >= 2**60:  # torch counts bytes in 64 bits
            raise UserError(f"the tensor {name} is too large: its shape is {list(shape)}")
        yield name, dtype, shape


def _list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _python_number(value: float) -> int | float:
    """The value without NumPy's types, which Flower refuses."""
    return int(value) if isinstance(value, int) else float(value)


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
