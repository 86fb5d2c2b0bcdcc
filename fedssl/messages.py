"""Messages travel and states are kept in one form: named tensors, named numbers, a small config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

#: the dtype in which float32 tensors travel
Transport = Literal["float32", "bfloat16", "int8"]
#: of a message's numbers: the scale of a tensor that travels as int8, by the tensor's name
_SCALE = "scale/"


@dataclass
class Message:
    """One message between server and client, or one stored state; never assumed to be "the weights".

    Weights, representations, kernels and dictionaries all travel as named tensors in their own dtype. A server's state
    and a client's state have the same form, so that one writer stores all three.

    Attributes:
        tensors: by name. Entries of a model carry their state-dict name (`online.encoder.conv1.weight`).
        numbers: by name, such as the number of training samples.
        config: short texts, numbers and switches that tell the receiver how to read the tensors.
        metrics: what is logged of the round and read by no part. A client's reply has them by name (`loss`), the
            server's state by name and owner (`eua_weight/3` of client 3, `clusters_used/global`).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    config: dict[str, str | int | float | bool] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the payload in bytes: tensors' data and eight bytes a number or metric, without names and framing."""
        tensors = sum(t.numel() * t.element_size() for t in self.tensors.values())
        return tensors + 8 * (len(self.numbers) + len(self.metrics))

    def copy(self) -> Message:
        """Return a message that shares no memory with this one, on the CPU and without gradients."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Message(tensors, dict(self.numbers), dict(self.config), dict(self.metrics))


def to_transport(messages: Mapping[int, Message], transport: Transport) -> dict[int, Message]:
    """Return messages in the form in which they travel, by client; `from_transport` reads them.

    With `bfloat16` every float32 tensor is rounded to it, half to even. With `int8` every float32 tensor of two and
    more dimensions is divided by its scale, the largest magnitude / 127, and rounded to whole numbers, half to even;
    the scales are among the message's numbers. Vectors stay float32: of running variances, those far below the largest
    would become 0. A tensor that is not finite arrives as NaN. Tensors of other dtypes and numbers travel as they are.
    What several messages share is rounded once and stays shared.
    """
    if transport == "float32":
        return dict(messages)
    rounded: dict[int, tuple[Tensor, float | None]] = {}  # by the identity of the tensor, which its message keeps alive

    def travelling(tensor: Tensor) -> tuple[Tensor, float | None]:
        if tensor.dtype != torch.float32 or (transport == "int8" and (tensor.dim() < 2 or not tensor.numel())):
            return tensor, None
        if id(tensor) not in rounded:
            source = tensor.detach()
            rounded[id(tensor)] = _to_int8(source) if transport == "int8" else (source.to(torch.bfloat16), None)
        return rounded[id(tensor)]

    sent = {}
    for k, message in messages.items():
        parts = {name: travelling(tensor) for name, tensor in message.tensors.items()}
        scales = {_SCALE + name: scale for name, (_, scale) in parts.items() if scale is not None}
        tensors = {name: tensor for name, (tensor, _) in parts.items()}
        sent[k] = replace(message, tensors=tensors, numbers=message.numbers | scales)
    return sent


def _to_int8(tensor: Tensor) -> tuple[Tensor, float]:
    """Return whole numbers from -127 to 127, and the factor that restores the tensor."""
    largest = float(tensor.abs().amax())
    if not math.isfinite(largest):
        return torch.zeros_like(tensor, dtype=torch.int8), math.nan
    return (tensor * (127 / largest if largest else 0.0)).round().to(torch.int8), largest / 127


def from_transport(message: Message, transport: Transport) -> Message:
    """Return a message of `to_transport` with float32 tensors again; every computation works on these."""
    if transport == "float32":
        return message
    tensors = dict(message.tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            tensors[name] = tensor.to(torch.float32)
        if tensor.dtype == torch.int8 and _SCALE + name in message.numbers:
            tensors[name] = tensor.to(torch.float32) * float(message.numbers[_SCALE + name])
    numbers = {name: value for name, value in message.numbers.items() if not name.startswith(_SCALE)}
    return replace(message, tensors=tensors, numbers=numbers)


def merge(messages: Iterable[Message]) -> Message:
    """Join messages of several parts into one; a name that two parts use is a programming error (ValueError)."""
    joined = Message()
    for message in messages:
        for name, mine in vars(joined).items():
            new = getattr(message, name)
            if clash := mine.keys() & new.keys():
                raise ValueError(f"two parts of this method both send {sorted(clash)[0]!r}")
            mine.update(new)
    return joined
