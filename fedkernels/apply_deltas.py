"""The server's step along the weighted updates of the clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels import _checks, _native
from fedkernels.reference.apply_deltas import apply_deltas as _reference


def apply_deltas(
    global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]], weights: Tensor | Sequence[float]
) -> None:
    """``global <- global - sum_k weights_k (global - client_k)``, in place and without autograd.

    With weights that sum to one this is the weighted mean of the clients; other sums are a longer or shorter step.
    Source: FedU2 (Liao et al. 2024), the server's step ``theta_g - eta d`` below Eq. 12.

    Args:
        global_params: T >= 1 tensors, float16, bfloat16, float32 or float64, any shapes and strides; overwritten.
        client_params: K >= 1 lists of T tensors with the shapes and devices of the global ones; dtypes may differ.
            They are only read.
        weights: K finite numbers of any sign, a tensor [K] or a list.

    The step is summed in float64 and rounded once to each global tensor's dtype. Nothing is written unless all
    arguments are good.

    Raises:
        TypeError: not lists of floating tensors (leave integer buffers, such as BatchNorm's counters, out).
        ValueError: an empty list; a tensor that differs from the global one in shape or device (its index is named);
            not K weights, or one that is not finite; a global tensor that shares memory with another or with itself.
    """
    _checks.parameter_lists(global_params, client_params)
    weights = _check_weights(weights, len(client_params))
    if not torch.compiler.is_compiling():  # a traced tensor has no address
        _check_memory(global_params, client_params)
    clients = [tensor for params in client_params for tensor in params]
    operator = _native.operator("apply_deltas", *global_params, *clients)
    if operator is None:
        _reference(global_params, client_params, weights)
        return
    with torch.no_grad():
        targets = [tensor.contiguous() for tensor in global_params]
        operator(targets, [tensor.contiguous() for tensor in clients], weights.to("cpu", torch.float64).contiguous())
        for tensor, target in zip(global_params, targets, strict=True):
            if target is not tensor:  # a copy, for it was not contiguous
                tensor.copy_(target)
    if not torch.compiler.is_compiling():
        # The operator writes behind autograd's back: a graph that holds the old values must notice.
        torch.autograd.graph.increment_version(list(global_params))


if _native.module is not None:

    @torch.library.register_fake("fedkernels::apply_deltas")
    def _(global_params: list[Tensor], client_params: list[Tensor], weights: Tensor) -> None:
        return None


def _check_weights(weights: Tensor | Sequence[float], clients: int) -> Tensor:
    if not isinstance(weights, Tensor):
        if isinstance(weights, str) or not isinstance(weights, Sequence):
            raise TypeError(f"weights must be a tensor [K] or a list of K numbers, got {type(weights).__name__}")
        weights = torch.tensor(weights, dtype=torch.float64)
    weights = weights.detach()
    _checks.floating("weights", weights, ndim=1, layout="[K]")
    if len(weights) != clients:
        raise ValueError(f"weights must hold one number for each of the {clients} clients, got {len(weights)}")
    if not torch.compiler.is_compiling() and not weights.isfinite().all():
        raise ValueError(f"weights must be finite, got {weights.tolist()}")
    return weights


def _check_memory(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> None:
    """A global tensor that is written must not be read again under another name."""
    regions = []  # device, first byte, end, is it written, name
    for index, tensor in enumerate(global_params):
        name = f"global_params[{index}]"
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name} must not overlap itself, got an expanded tensor")
        regions.append((*_memory(tensor), True, name))
    for client, params in enumerate(client_params):
        for index, tensor in enumerate(params):
            regions.append((*_memory(tensor), False, f"client_params[{client}][{index}]"))
    # In order of address, a region overlaps an earlier one exactly where it starts before the furthest end so far.
    furthest: dict[bool, tuple[str, int, str]] = {}  # of all that is written (True) or only read (False)
    for device, start, end, written, name in sorted(regions):
        for other_written, (other_device, other_end, other) in furthest.items():
            if device == other_device and start < other_end and (written or other_written):
                one, two = (other, name) if written and not other_written else (name, other)
                raise ValueError(f"{one} must not share memory with {two}")
        if start < end and furthest.get(written, ("", 0, ""))[:2] < (device, end):
            furthest[written] = (device, end, name)


def _memory(tensor: Tensor) -> tuple[str, int, int]:
    """Device and the range of bytes from a tensor's first entry to its last."""
    if tensor.numel() == 0 or tensor.is_meta:
        return str(tensor.device), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
