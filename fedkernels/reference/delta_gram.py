"""The inner products of the clients' updates in plain PyTorch, summed in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 16  # entries of one tensor in float64 at a time, for each client


@torch.no_grad()
def delta_gram(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> Tensor:
    """G_ij = sum over the tensors of <global - client_i, global - client_j> -> [K, K] in float64."""
    clients = len(client_params)
    gram = torch.zeros(clients, clients, dtype=torch.float64, device=global_params[0].device)
    for index, reference in enumerate(global_params):
        pieces = [_pieces(params[index]) for params in client_params]
        for start, *parts in zip(_pieces(reference), *pieces, strict=True):
            deltas = torch.stack([start.double() - part.double() for part in parts])
            gram += (deltas @ deltas.T).to(gram.device)
    return (gram + gram.T) / 2  # a matrix product need not be symmetric to the last bit


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    # A view of a contiguous tensor; of another one a copy of that tensor alone.
    return tensor.detach().reshape(-1).split(_CHUNK)
