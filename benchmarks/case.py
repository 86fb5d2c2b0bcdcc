"""What a benchmark is made of: an operator at one size, who computes it, what bounds it, and the bars to meet."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Inputs = dict[str, Any]  # whatever the calls of a case take
Outputs = dict[str, Tensor]  # "value", and "gradient in NAME" for each gradient
Errors = dict[str, float]  # of "value" and of "gradient"
Timer = Callable[[], float]  # calls once more -> seconds


class Clock(Protocol):
    def timer(self, run: Callable[[], object], before: Callable[[], None] | None) -> Timer:
        """Return a timer of run(); before() is called first and is not timed."""
        ...


@dataclass(frozen=True)
class Implementation:
    """Someone who computes the operator: ours or a peer."""

    name: str
    call: Callable[[Inputs], Outputs]
    package: str = ""  # the distribution that has to be installed
    note: str = ""  # its settings, and what it does otherwise than ours
    same_result: bool = True  # computes the same to the same tolerance: may be called the best peer
    scale: Callable[[Inputs], float] | None = None  # the call does 1/scale of the work: its times are multiplied


@dataclass(frozen=True)
class Floor:
    """The least work that the operator cannot avoid, as calls of plain PyTorch."""

    definition: str
    prepare: Callable[[Inputs], Callable[[], object]]  # makes the buffers; what it returns is timed


@dataclass(frozen=True)
class Work:
    """The least work that the operator cannot avoid, as a number; its time at a GPU's measured rate is the bound."""

    amount: float  # bytes for the rate "copy", floating-point operations for the others
    rate: str  # "copy", "bf16", "tf32" or "fp32", as benchmarks/gpu.py measures them
    definition: str


@dataclass(frozen=True)
class Bar:
    """What has to be reached. One of the limits is set."""

    faster_than: tuple[str, ...] = ()  # names of peers; the fastest of those that ran counts
    times: float = 0.0  # at least this many times as fast as that peer
    floor: float = 0.0  # at most this many times the floor
    share: float = 0.0  # at least this part of the rate that bounds the work
    milliseconds: float = 0.0  # at most this time
    extra_mib: float = 0.0  # at most this much memory beyond the outputs
    error: float = 0.0  # at most this error of the value


@dataclass(frozen=True)
class Case:
    """An operator at one size."""

    size: str
    inputs: Callable[[torch.device], Inputs]
    implementations: tuple[Implementation, ...]  # ours comes first
    tiny: Callable[[torch.device], Inputs] | None = None  # small inputs: a warm-up before memory is measured on the CPU
    truth: Callable[[Inputs], Outputs] | None = None  # in float64; None: errors are not measured
    errors: Callable[[Outputs, Outputs, Inputs], Errors] | None = None  # on the CPU; None: `largest_errors`
    floor: Floor | None = None
    work: Work | None = None
    bars: tuple[Bar, ...] = ()
    reset: Callable[[Inputs], None] | None = None  # before each call, untimed: where a call changes its inputs
    timed: bool = True  # False: memory alone, one call
    large: bool = False  # left out by --skip-large


def value_and_gradients(loss: Tensor, wanted: Mapping[str, Tensor]) -> Outputs:
    """The loss and its gradients in those of the tensors `wanted` that ask for one."""
    wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    named = {f"gradient in {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return {"value": loss.detach(), **named}


def in_float64(inputs: Inputs) -> Inputs:
    """The same with floating tensors in float64, as leaves that ask for the same gradients."""

    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return {name: widen(value) for name, value in inputs.items()}


def largest_errors(outputs: Outputs, truth: Outputs, inputs: Inputs) -> Errors:
    """max |output - truth| / max |truth|, of the value and of the worst gradient. Outputs without a truth are left."""
    errors: Errors = {}
    for name, wide in truth.items():
        if name in outputs:
            error = float((outputs[name].double() - wide).abs().max() / wide.abs().max())
            kind = "gradient" if name.startswith("gradient") else "value"
            so_far = errors.get(kind, 0.0)
            errors[kind] = error if math.isnan(error) or error > so_far else so_far
    return errors
