"""Convert messages: to Flower's records and back, to one vector of weights, and to tensors that lie in a file.

A client's answer may hold an evaluation of its own model, too.

In records all tensors travel as one array, the content of a safetensors file. Flower moves every array by requests of
its own, each way through the SuperLink's database: some forty a second on two cores, whatever their size. A model of
100 tensors would take a site's round 400 requests; as one array it takes a few.
"""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from ...errors import SendableError, UserError, explained
from ...evaluation.metrics import LARGEST_FIGURE, is_measure
from ...messages import Message
from ...run_folder.storage import safetensors_of, safetensors_parts

_FORMAT = "safetensors"  # Flower's own is NumPy's, which has no bfloat16
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}
_RECORDS: dict[str, Any] = {
    "tensors": ArrayRecord,
    "layout": ConfigRecord,
    "numbers": MetricRecord,
    "config": ConfigRecord,
    "metrics": MetricRecord,
}
#: messages of fewer bytes stay in memory; a file for each would cost a round of small models more than it saves
_SMALL_ANSWER = 2**20

_MEASURE = "evaluation/"  # before the name of a measure in an answer
_SPECTRUM = "evaluation.spectrum"  # the name of the spectrum in an answer
_LONGEST_SPECTRUM = 2**16  # singular values: at most one for each feature of an encoder
_MOST_MEASURES = 100  # each is a line of metrics.csv
_LONGEST_NAME = 100  # characters in the name of a measure

Vector = NDArray[np.float64]
#: a client's measures of its own model by name, and the singular values [n] of its test representations if any
SiteEvaluation = tuple[dict[str, float], Tensor | None]


def to_records(message: Message) -> RecordDict:
    """Return a message as five records.

    `tensors` has one array, and `layout` the tensors' names in their order, which a safetensors file does not keep. The
    others are the message's.
    """
    data = b"".join(safetensors_parts(message.tensors, {}))
    arrays, layout = {_FORMAT: Array("uint8", (len(data),), _FORMAT, data)}, {"names": list(message.tensors)}
    contents = (arrays, layout, _plain_numbers(message.numbers), dict(message.config), _plain_numbers(message.metrics))
    return RecordDict({name: kind(values) for (name, kind), values in zip(_RECORDS.items(), contents, strict=True)})


def _plain_numbers(values: Mapping[str, float]) -> dict[str, int | float]:
    """Return the values without NumPy's types, which Flower refuses."""
    return {name: int(value) if isinstance(value, int) else float(value) for name, value in values.items()}


def to_shared_records(messages: Mapping[int, Message]) -> dict[int, RecordDict]:
    """Return `to_records` of each message; messages with the same tensors share the arrays."""
    arrays: dict[tuple[tuple[str, int], ...], RecordDict] = {}  # by the tensors' names and identities
    shared = {}
    for k, message in messages.items():
        key = tuple((name, id(tensor)) for name, tensor in message.tensors.items())
        records = to_records(replace(message, tensors={}) if key in arrays else message)
        first = arrays.setdefault(key, records)
        shared[k] = RecordDict({**records, "tensors": first["tensors"], "layout": first["layout"]})
    return shared


def from_records(records: RecordDict) -> Message:
    """Return the message of `to_records`, in memory of its own; raise UserError if a record is missing or invalid."""
    if any(not isinstance(records.get(name), kind) for name, kind in _RECORDS.items()):
        expected, got = ", ".join(_RECORDS), ", ".join(sorted(records))
        raise UserError(f"the message's records are invalid: expected {expected}, got {got}")
    values: list[Any] = [dict(records[name].items()) for name in _RECORDS]
    arrays, layout, *rest = values
    lists = [name for record in rest for name, value in record.items() if isinstance(value, list | bytes)]
    if lists:
        raise UserError(f"{lists[0]} is invalid: expected one value, got a list")
    with explained("the message's tensors cannot be read"):
        stored, names = safetensors_of(arrays[_FORMAT].data), list(layout["names"])
        tensors = {name: stored[name] for name in names}
    faults = [f"of {tensor.dtype}" for tensor in stored.values() if tensor.dtype not in _DTYPES]
    faults += ["that it does not name"] * (len(names) != len(stored))
    if faults:
        raise UserError(f"the message has tensors {faults[0]}")
    return Message(tensors, *rest)


def add_evaluation(reply: Message, measures: dict[str, float], spectrum: Tensor) -> None:
    """Put an evaluation into a client's answer."""
    reply.numbers.update({_MEASURE + name: value for name, value in measures.items()})
    reply.tensors[_SPECTRUM] = spectrum


def split_evaluation(reply: Message) -> tuple[Message, SiteEvaluation]:
    """Return a client's answer without its evaluation, and the evaluation."""
    measures = {n.removeprefix(_MEASURE): v for n, v in reply.numbers.items() if n.startswith(_MEASURE)}
    numbers = {name: value for name, value in reply.numbers.items() if not name.startswith(_MEASURE)}
    tensors = dict(reply.tensors)
    spectrum = tensors.pop(_SPECTRUM, None)
    return replace(reply, tensors=tensors, numbers=numbers), (measures, spectrum)


def evaluation_fault(measures: dict[str, float], spectrum: Tensor | None) -> str | None:
    """Return why an evaluation cannot be used; None where it can."""
    if spectrum is None or spectrum.dim() != 1 or not spectrum.is_floating_point():
        return "its evaluation has no valid spectrum: expected one dimension of floating-point numbers"
    if len(spectrum) > _LONGEST_SPECTRUM:
        return f"its evaluation's spectrum has {len(spectrum)} values, more than {_LONGEST_SPECTRUM}"
    if not ((spectrum >= 0) & spectrum.isfinite()).all():
        return "its evaluation's spectrum is invalid: expected finite values that are not negative"
    if len(measures) > _MOST_MEASURES:
        return f"its evaluation has {len(measures)} measures, more than {_MOST_MEASURES}"
    for name, value in measures.items():
        if not is_measure(name) or len(name) > _LONGEST_NAME:
            return f"its evaluation holds {name[:100]!r}, which is not a measure of a model"
        if not abs(value) <= LARGEST_FIGURE:  # NaN compares false
            return f"its evaluation has an invalid {name}: expected a finite number, got {value}"
    return None


def flatten_weights(tensors: dict[str, Tensor]) -> Vector:
    """Return all floating-point tensors one after another, in the order of their names, float64 [n]."""
    names = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())
    vector: Vector = torch.cat([tensors[name].detach().double().flatten() for name in names]).numpy()
    return vector


def unflatten_weights(vector: Vector, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `like` with its floating-point tensors taken from a vector of `flatten_weights`, in their own dtypes."""
    sizes = {name: like[name].numel() for name in sorted(like) if like[name].is_floating_point()}
    parts = dict(zip(sizes, torch.from_numpy(vector).split(list(sizes.values())), strict=True))
    return {
        name: parts[name].reshape(tensor.shape).to(tensor.dtype) if name in parts else tensor
        for name, tensor in like.items()
    }


def unflatten_mean(vector: Vector, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `unflatten_weights` without negative running variances, which noise or rounding may have made."""
    tensors = unflatten_weights(vector, like)
    return {name: t.clamp(min=0) if name.endswith(".running_var") else t for name, t in tensors.items()}


def require_finite(vector: Vector) -> None:
    """Raise UserError where a client's weights hold NaN or an infinity.

    Clipping would let the finite entries pass as they are, and masks would hide the others from the server's guard.
    """
    if not np.isfinite(vector).all():
        raise SendableError("its weights are not finite after training")


def on_disk(message: Message, folder: Path) -> Message:
    """Return the message, whose tensors are on the CPU, with its tensors mapped from a file in the folder.

    The file has no name and ends with the tensors. A small message stays in memory. So does one that cannot be written:
    on a full disk the round's commit fails with the reason.
    """
    if message.num_bytes < _SMALL_ANSWER:
        return message
    # torch raises either for a full disk; it aligns tensors to 64 bytes, by which a product may round
    with suppress(OSError, RuntimeError), tempfile.TemporaryFile(dir=folder) as file:
        torch.save({name: tensor.detach().contiguous() for name, tensor in message.tensors.items()}, file)
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"  # the mapping outlives the open file
        return replace(message, tensors=torch.load(path, mmap=True))
    return message
