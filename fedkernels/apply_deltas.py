"""The server's step along the weighted updates of the clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.internal import checks, native
from fedkernels.internal.autograd import is_without_data
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
    arguments are valid. Weights that are on the GPU with the models are not looked at, because the host would have to
    wait for them: one that is not finite makes the new parameters NaN or infinite.

    Raises:
        TypeError: not lists of floating tensors (leave integer buffers, such as BatchNorm's counters, out).
        ValueError: an empty list; a tensor that differs from the global one in shape or device (its index is named);
            not K weights, or one that is not finite; a global tensor that shares memory with another or with itself.
    """
    checks.parameter_lists(global_params, client_params)
    weights = _check_weights(weights, len(client_params), global_params[0])
    if not (torch.compiler.is_compiling() or any(is_without_data(tensor) for tensor in global_params)):
        _check_memory(global_params, client_params)  # a traced tensor has no address
    clients = [tensor for params in client_params for tensor in params]
    operator = native.operator("apply_deltas", *global_params)  # each client's tensor is on its global tensor's device
    if operator is None:
        _reference(global_params, client_params, weights)
        return
    with torch.no_grad():
        targets = [tensor.contiguous() for tensor in global_params]
        operator(targets, [tensor.contiguous() for tensor in clients], weights)
        for tensor, target in zip(global_params, targets, strict=True):
            if target is not tensor:  # a copy, because the tensor was not contiguous
                tensor.copy_(target)
    if not torch.compiler.is_compiling():
        # Autograd does not see the operator's writes: a graph that holds the old values must raise an error.
        torch.autograd.graph.increment_version(list(global_params))


if native.module is not None:

    @torch.library.register_fake("fedkernels::apply_deltas")
    def _(global_params: list[Tensor], client_params: list[Tensor], weights: Tensor) -> None:
        return None


def _check_weights(weights: Tensor | Sequence[float], clients: int, model: Tensor) -> Tensor:
    """The weights as a copy in float64, on the GPU if they and the model's first tensor are there, else on the CPU."""
    if not isinstance(weights, Tensor):
        if isinstance(weights, str) or not isinstance(weights, Sequence):
            raise TypeError(f"weights must be a tensor [K] or a list of K numbers, got {type(weights).__name__}")
        try:
            if any(isinstance(one, bool) for one in weights):
                raise TypeError("each must be a number, got bool")
            weights = torch.tensor(weights, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"weights must be a tensor [K] or a list of K numbers, got a list: {error}") from None
    checks.floating("weights", weights, ndim=1, layout="[K]")
    if len(weights) != clients:
        raise ValueError(f"weights must hold one number for each of the {clients} clients, got {len(weights)}")
    # A copy, because the weights may be one of the tensors that are written.
    if weights.is_cuda and model.is_cuda:
        return weights.detach().to(model.device, torch.float64, copy=True).contiguous()
    weights = weights.detach().to("cpu", torch.float64, copy=True).contiguous()
    if not (torch.compiler.is_compiling() or is_without_data(weights)) and not weights.isfinite().all():
        raise ValueError(f"weights must be finite, got {weights.tolist()}")
    return weights


# Device, first byte, end, whether it is written, client (-1: the global model), index of the tensor.
_Region = tuple[str, int, int, bool, int, int]


def _check_memory(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> None:
    """Raises ValueError if a global tensor, which is written, shares memory with another tensor or with itself."""
    written: list[_Region] = []
    read: dict[int, _Region] = {}  # by id; of clients that share a tensor only the first
    for index, tensor in enumerate(global_params):
        if not tensor.is_contiguous() and _overlaps_itself(tensor):
            raise ValueError(f"global_params[{index}] must not overlap itself, got strides {list(tensor.stride())}")
        device = str(tensor.device)
        written.append((device, *_memory(tensor), True, -1, index))
        for k, params in enumerate(client_params):
            if id(params[index]) not in read:
                read[id(params[index])] = (device, *_memory(params[index]), False, k, index)

    def tensor_of(client: int, index: int) -> Tensor:
        return global_params[index] if client < 0 else client_params[client][index]

    # In order of address, a region can only overlap those before it that have not ended.
    before: list[_Region] = []
    for region in sorted([*written, *read.values()]):
        device, start, end, is_written, *name = region
        before = [other for other in before if other[0] == device and other[2] > start]
        for *_, other_is_written, client, index in before if start < end else ():
            other = client, index
            if (is_written or other_is_written) and _share(tensor_of(*name), tensor_of(*other)):
                one, two = (name, other) if is_written <= other_is_written else (other, name)
                raise ValueError(f"{_name(*one)} must not share memory with {_name(*two)}")
        if start < end:
            before.append(region)


def _name(client: int, index: int) -> str:
    return f"global_params[{index}]" if client < 0 else f"client_params[{client}][{index}]"


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes from a tensor's first entry to its last."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0, 0
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: Tensor) -> bool:
    """Does a strided tensor have two entries at one address?"""
    span, clear = 0, True  # the span of the dimensions so far, in the order of their strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        clear &= size == 1 or stride > span  # a step leads beyond all entries of the dimensions so far
        span += (size - 1) * stride
    if clear or tensor.numel() == 0:
        return False
    return tensor.numel() > span + 1 or len(_entries(tensor).unique()) < tensor.numel()


def _share(one: Tensor, other: Tensor) -> bool:
    """Do two tensors whose ranges of memory overlap hold a byte in common? Columns of one matrix do not."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    return bool(torch.isin(_bytes(one), _bytes(other)).any())


def _entries(tensor: Tensor) -> Tensor:
    """The offset of each entry from the first, in entries."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return places


def _bytes(tensor: Tensor) -> Tensor:
    width = tensor.element_size()
    first = tensor.data_ptr() + _entries(tensor) * width
    return (first[:, None] + torch.arange(width, device="cpu")).flatten()
