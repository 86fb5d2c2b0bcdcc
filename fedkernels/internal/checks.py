"""Argument checks that the public functions share: one line names the argument, what was expected and what it got."""

import sys
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fedkernels.internal.autograd import is_transformed
from fedkernels.view_options import integer as integer  # these are here for all that check arguments
from fedkernels.view_options import number as number
from fedkernels.view_options import plain
from fedkernels.view_options import short as short

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STRIDED = torch.strided
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)
_NUMBER_OR_TENSOR = "a Python number or a floating tensor"


def floating(name: str, tensor: object, ndim: int | None = None, at_least: int = 0, layout: str = "") -> None:
    """`tensor` is a dense floating tensor of `ndim` dimensions (or of at least `at_least`)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim == ndim and tensor.dtype in _FLOATING and tensor.layout is _STRIDED and not tensor.is_nested:
        return
    if tensor.dtype not in _FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    dense(name, tensor)
    if (ndim is not None and tensor.ndim != ndim) or tensor.ndim < at_least:
        raise ValueError(f"{name} must have shape {layout}, got {list(tensor.shape)}")


def dense(name: str, tensor: Tensor) -> None:
    """`tensor` is neither sparse nor nested."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one")


def not_empty(name: str, tensor: Tensor, dims: Sequence[int], layout: str) -> None:
    """`tensor` has no size 0 among its dimensions `dims`."""
    if tensor.numel():  # which takes less long than to look at each size
        return
    shape = tensor.shape
    if 0 in [shape[dim] for dim in dims]:
        raise ValueError(f"{name} must not be empty in {layout}, got shape {list(tensor.shape)}")


def same_device(**tensors: Tensor) -> None:
    """All tensors are on one device."""
    devices = [tensor.device for tensor in tensors.values()]
    if devices.count(devices[0]) == len(devices):
        return
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name} must be on the device of {first} ({reference.device}), got {tensor.device}")


def paired_rows(dims: Sequence[int] = (0, 1), **both: Tensor) -> None:
    """Two tensors [B, d] of one shape on one device; those of its sizes that `dims` names are not 0."""
    (first, rows), (second, others) = both.items()
    floating(first, rows, ndim=2, layout="[B, d]")
    floating(second, others, ndim=2, layout="[B, d]")
    not_empty(first, rows, dims, "B or d" if 0 in dims else "d")
    if others.shape != rows.shape:
        raise ValueError(f"{second} must have the shape {list(rows.shape)} of {first}, got {list(others.shape)}")
    same_device(**both)


def expanded(name: str, tensor: Tensor, wanted: list[int], of: str, whole: Tensor, may: str = "have") -> Tensor:
    """`tensor` broadcast to `wanted`, whose last size it must have itself; `of` is the name of `whole`."""
    if tensor.ndim == 0 or tensor.shape[-1] != wanted[-1]:
        expected = f"{may} shape [..., {wanted[-1]}]"
    else:
        try:
            return tensor.expand(wanted)
        except RuntimeError:
            expected = f"broadcast to {wanted}"
    raise ValueError(f"{name} must {expected} for {of} of shape {list(whole.shape)}, got {list(tensor.shape)}")


def positive(name: str, value: object, expected: str = "a Python number") -> float:
    """`value` is a positive, finite number."""
    checked = number(name, value, expected)
    if not 0 < checked <= sys.float_info.max:  # also refuses NaN, and integers beyond float's range
        raise ValueError(f"{name} must be positive and finite, got {short(checked)}")
    return float(checked)


def finite(name: str, value: object, expected: str = "a Python number") -> float:
    """`value` is a finite number."""
    checked = number(name, value, expected)
    if not abs(checked) <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {short(checked)}")
    return float(checked)


def number_or_tensor(name: str, value: object, device: torch.device, *, above_zero: bool = False) -> float | Tensor:
    """`value` is a finite number, or a floating tensor of one entry on `device`.

    Returns a tensor as a scalar of float32 or wider on `device`. The scalar that is given may also be on the CPU, as
    torch's operators take it. An entry that must be positive is looked at where it costs nothing, on the CPU, eagerly.
    """
    if not isinstance(value, Tensor):
        return (positive if above_zero else finite)(name, value, _NUMBER_OR_TENSOR)
    floating(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one entry, got shape {list(value.shape)}")
    if value.device != device and (value.ndim > 0 or value.device.type != "cpu"):
        raise ValueError(f"{name} must be on the device of the rows ({device}), got {value.device}")
    if above_zero and has_values(value) and not 0 < float(value.detach()) < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {short(float(value.detach()))}")
    value = value.reshape(()) if value.ndim else value  # a view is one more step of the backward pass
    value = value if value.device == device else value.to(device)
    return value.float() if value.dtype.itemsize == 2 else value


def positive_number_or_tensor(name: str, value: object, device: torch.device) -> float | Tensor:
    """The same for a positive number."""
    if type(value) is float and 0 < value <= sys.float_info.max:
        return value
    return number_or_tensor(name, value, device, above_zero=True)


def has_values(tensor: Tensor) -> bool:
    """Can the entries be looked at without a cost: on the CPU, eagerly, outside of torch.func's transforms?"""
    if torch.compiler.is_compiling() or is_transformed() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu"


def integers(name: str, tensor: object, shape: tuple[int, ...], layout: str) -> None:
    """`tensor` is an int64 tensor of this shape."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    dense(name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {layout} = {list(shape)}, got {list(tensor.shape)}")


def boolean(name: str, value: object) -> bool:
    """`value` is True or False, of Python or numpy."""
    truth = value if value is True or value is False else plain(value)
    if not isinstance(truth, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return truth


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """`value` is one of the strings `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {short(value)}")


def parameter_lists(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> None:
    """K >= 1 lists of floating tensors that match the global list in length, shape and device."""
    if isinstance(global_params, Tensor) or not isinstance(global_params, Sequence):
        raise TypeError(f"global_params must be a list of tensors, got {type(global_params).__name__}")
    if isinstance(client_params, Tensor) or not isinstance(client_params, Sequence):
        raise TypeError(
            f"client_params must be a list with one list of tensors per client, got {type(client_params).__name__}"
        )
    if len(global_params) == 0:
        raise ValueError("global_params must hold at least one tensor, got an empty list")
    if len(client_params) == 0:
        raise ValueError("client_params must hold at least one client, got an empty list")
    for index, tensor in enumerate(global_params):
        floating(f"global_params[{index}]", tensor)
    wanted = [(tensor.shape, tensor.device) for tensor in global_params]
    for client, params in enumerate(client_params):
        if isinstance(params, Tensor) or not isinstance(params, Sequence):
            raise TypeError(f"client_params[{client}] must be a list of tensors, got {type(params).__name__}")
        if len(params) != len(global_params):
            raise ValueError(
                f"client_params[{client}] must hold {len(global_params)} tensors as global_params does, "
                f"got {len(params)}"
            )
        for index, (tensor, (shape, device)) in enumerate(zip(params, wanted, strict=True)):
            # There are thousands of tensors and their names take longer than the checks: only a bad one gets its name.
            good = isinstance(tensor, Tensor) and tensor.dtype in _FLOATING and tensor.layout == torch.strided
            if good and not tensor.is_nested and tensor.shape == shape and tensor.device == device:
                continue
            name = f"client_params[{client}][{index}]"
            floating(name, tensor)
            of_global = f"of global_params[{index}]"
            if tensor.shape != shape:
                raise ValueError(f"{name} must have the shape {list(shape)} {of_global}, got {list(tensor.shape)}")
            raise ValueError(f"{name} must be on the device {of_global} ({device}), got {tensor.device}")
