"""Messages as Flower's records: tensors travel as raw bytes in their own dtype, those of a dtype as one array.

Flower moves every array by requests of its own, each way through the SuperLink's database: some forty a second on two
cores, whatever their size. A model of 100 tensors would take a site's round 400 of them; as one array it takes a few.
What each tensor is called and where it lies is said in the record `layout`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
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
_FEW_OBJECTS = 1000  # of any answer; and one more for each MiB, where Flower sends pieces of 5 MiB
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
        dtype = _name(tensor.dtype)
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
        "dtypes": [_name(tensor.dtype) for tensor in message.tensors.values()],
        "dimensions": [tensor.dim() for tensor in message.tensors.values()],
        "sizes": [size for tensor in message.tensors.values() for size in tensor.shape],
    }
    return RecordDict(
        {
            "tensors": ArrayRecord(arrays),
            "layout": ConfigRecord(layout),
            "numbers": MetricRecord({name: _number(value) for name, value in message.numbers.items()}),
            "config": ConfigRecord(dict(message.config)),
            "metrics": MetricRecord({name: _number(value) for name, value in message.metrics.items()}),
        }
    )


def from_records(records: RecordDict) -> Message:
    """The message of `to_records`, in memory of its own.

    Raises:
        UserError: a record is missing, or the arrays are none that `to_records` makes.
    """
    if any(not isinstance(records.get(name), kind) for name, kind in _RECORDS.items()):
        raise UserError(f"the message has records {sorted(records)}, expected {', '.join(_RECORDS)}")
    kept: list[Any] = [records[name] for name in _RECORDS]
    arrays, layout, *rest = kept
    lists = [name for record in rest for name, value in record.items() if isinstance(value, list | bytes)]
    if lists:
        raise UserError(f"{lists[0]} is a list, expected one value")
    return Message(_unpack(dict(arrays.items()), dict(layout.items())), *(dict(record.items()) for record in rest))


def _unpack(arrays: dict[str, Array], layout: dict[str, Any]) -> dict[str, Tensor]:
    read = dict.fromkeys(arrays, 0)  # bytes
    tensors = {}
    for name, dtype, shape in _entries(layout):
        if dtype not in arrays:
            raise UserError(f"{name} came without an array of {dtype}")
        start, size = read[dtype], math.prod(shape) * _DTYPES[dtype].itemsize
        data = np.frombuffer(arrays[dtype].data, np.uint8)[start : start + size]
        if len(data) != size:
            raise UserError(f"{name} came with {len(data)} bytes for the shape {list(shape)} of {dtype}")
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])  # torch's alignment: a product may round by it
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
        tensors[name] = tensor
        read[dtype] += size
    for dtype, array in arrays.items():
        if array.stype != _SERIALISATION or array.dtype != dtype:
            raise UserError(f"the array {dtype} came as {array.stype} of {array.dtype}, expected {_SERIALISATION}")
        if len(array.data) != read[dtype]:
            raise UserError(f"the array {dtype} came with {len(array.data)} bytes for tensors of {read[dtype]}")
    return tensors


def _entries(layout: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes."""
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
        raise UserError("the message's layout is none: expected names, dtypes, dimensions and sizes of tensors")
    rest = iter(sizes)
    for name, dtype, count in zip(names, dtypes, dimensions, strict=True):
        shape = tuple(next(rest) for _ in range(count))
        if math.prod(max(size, 1) for size in shape) >= 2**60:  # torch counts bytes in 64 bits
            raise UserError(f"{name} came with the shape {list(shape)}, which no tensor has")
        yield name, dtype, shape


def _list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: float) -> int | float:
    return int(value) if isinstance(value, int) else float(value)  # a NumPy scalar is refused by Flower


class TooLarge(Exception):
    """An answer is larger than it may be; the message says it for the log."""


@contextmanager
def answers_below(largest: int, grid: Grid) -> Iterator[None]:
    """Give up on an answer that is pulled from the grid in the body once more than `largest` bytes of it have come.

    Flower hands over whole answers only, and has no limit of its own. Its grid between machines gets each object of an
    answer (a piece of an array, a record) by a call of its client's PullObject: that is where they are counted, before
    the next ones are asked for. The simulation's grid has no such client; its sites are this machine's own.

    Raises:
        TooLarge: from the body.
    """
    client: Any = getattr(grid, "_runtime_client", None)
    if client is None:
        yield
        return
    pull, lock = client.PullObject, threading.Lock()
    most = _FEW_OBJECTS + largest // 2**20
    came = objects = 0

    def counted(request: Any) -> Any:
        nonlocal came, objects
        response = pull(request)
        with lock:  # Flower pulls several at a time
            came += len(response.object_content)
            objects += bool(response.object_content)
            if came > largest:
                raise TooLarge(f"its answer has more than {largest} bytes, and no answer to this message is that large")
            if objects > most:  # by more than one where several are on their way
                raise TooLarge(f"its answer comes in more than {most} pieces")
        return response

    client.PullObject = counted
    try:
        yield
    finally:
        client.PullObject = pull
