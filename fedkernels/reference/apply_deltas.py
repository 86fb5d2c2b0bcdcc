"""The server's step along the weighted updates in plain PyTorch, in float64 and in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference._chunks import chunks, join

# Entries of a model at a time. Start, step and the differences of a client, 24 bytes an entry, stay in a GPU's
# second-level cache, or in a CPU's.
_ENTRIES, _ENTRIES_ON_CPU = 1 << 20, 1 << 18


@torch.no_grad()
def apply_deltas(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]], weights: Tensor) -> None:
    """global <- global - sum_k w_k (global - client_k). The weights need not sum to one."""
    targets = [tensor.contiguous() for tensor in global_params]
    entries = _ENTRIES_ON_CPU if targets[0].is_cpu else _ENTRIES
    for model, *clients in chunks([targets, *client_params], entries):
        start = join(model).double()
        step = torch.zeros_like(start)
        # Weights on the host stay there: a number is an argument of the multiplication.
        of_clients = weights.to(start.device) if weights.is_cuda else weights
        for weight, pieces in zip(of_clients.double().unbind(), clients, strict=True):
            step += weight * (start - join(pieces))
        for piece, stepped in zip(model, (start - step).split([piece.numel() for piece in model]), strict=True):
            piece.copy_(stepped)
    for tensor, target in zip(global_params, targets, strict=True):
        if target is not tensor:  # a copy, because the tensor was not contiguous
            tensor.copy_(target)
