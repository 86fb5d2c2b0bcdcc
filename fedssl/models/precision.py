"""In which floating-point type and memory layout a model's networks compute while they train."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from .model import Model

Precision = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise a UserError for float16 on anything but CUDA."""
    if precision == "float16" and device.type != "cuda":
        raise UserError(
            f"training.precision float16 needs a CUDA device, got device {device.type}: use training.precision=bfloat16"
        )


def has_bfloat16() -> bool:
    """Tell whether a GPU, or else the processor (AVX512-BF16, AMX or Arm's), has instructions for bfloat16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    described = Path("/proc/cpuinfo")
    return described.is_file() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(described.read_text().split())


@contextmanager
def networks_compute_in(model: Model, precision: Precision) -> Iterator[None]:
    """Make each network of a model, and each copy made in the body, compute in the given precision.

    Images [n, C, H, W] are laid out in memory with the channels last before they enter a network. Its convolutions keep
    that layout, in which they are faster (docs/speed.md) and which rounds differently.

    Whatever calls a network gets float32 back, so that losses and regularizers compute in float32. Weights,
    buffers and gradients stay float32 too: `torch.autocast` casts the weights for each call, or once for all calls
    within `torch.autocast(..., enabled=False)`. Deep copies made in the body keep their hooks.

    On CUDA the rows of contrastive losses are rounded to the networks' type (`Model.unit_rows`), whose products tensor
    cores form and sum in float32. Products of float32 follow torch's setting for tf32, which it allows by default for
    convolutions alone.
    """
    hooks = _Hooks(model.device.type, _DTYPES.get(precision))
    model.rows_dtype = contrastive_dtype(precision, model.device)
    with ExitStack() as stack:
        stack.callback(setattr, model, "rows_dtype", None)
        for network in (*model.online.values(), *model.target.values()):
            stack.enter_context(network.register_forward_pre_hook(hooks.before))
            stack.enter_context(network.register_forward_hook(hooks.after, always_call=True))
        yield


def contrastive_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the dtype that rows are rounded to for contrastive losses, if any: the CPU would gain nothing by it."""
    return _DTYPES.get(precision) if device.type == "cuda" else None


class _Hooks(threading.local):
    """Hooks that run before and after a network's forward pass; two threads may call it at a time."""

    def __init__(self, device_type: str, dtype: torch.dtype | None):
        self.device_type, self.dtype = device_type, dtype
        self._entered: list[torch.autocast] = []  # of this thread; a network may call another one

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        return self  # serves any network

    def before(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.dtype is not None:
            autocast = torch.autocast(self.device_type, self.dtype)
            autocast.__enter__()
            self._entered.append(autocast)
        return tuple(with_channels_last(value) for value in inputs)

    def after(self, network: nn.Module, inputs: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        if self.dtype is None:
            return output
        self._entered.pop().__exit__(None, None, None)
        return None if output is None else output.float()  # None: the forward pass has failed


def with_channels_last(value: Any) -> Any:
    """Return images [n, C, H, W] with the channels last in memory; return anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    if value.stride(1) == 1 and value.is_contiguous(memory_format=torch.channels_last):
        return value
    # Grey images count as contiguous in both layouts, and `contiguous` would leave their strides.
    return torch.empty_like(value, memory_format=torch.channels_last).copy_(value)
