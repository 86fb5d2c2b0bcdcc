"""The inner products of the clients' updates in plain PyTorch: differences, products and sums are float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.reference._chunks import chunks, join

# Entries of all clients' differences at a time. On a GPU few calls count: 128 MB, and half of that for the float32
# parameters side by side. On a CPU the caches count.
_ENTRIES, _ENTRIES_ON_CPU = 1 << 24, 1 << 20
_RUN = 1024  # entries that one product sums: a chunk has many, so that a GPU is busy with few clients, too


@torch.no_grad()
def delta_gram(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> Tensor:
    """G_ij = sum over the tensors of <global - client_i, global - client_j> -> [K, K] in float64."""
    clients = len(client_params)
    gram = global_params[0].new_zeros((clients, clients), dtype=torch.float64)
    entries = _ENTRIES_ON_CPU if gram.is_cpu else _ENTRIES
    runs, exporting = max(entries // (_RUN * clients), 1), torch.compiler.is_exporting()
    for models in chunks([global_params, *client_params], runs * _RUN):
        # Differences of 0 fill the last run. An exported program, which may not depend on sizes, has one run.
        count = sum(piece.numel() for piece in models[0])
        run = count if exporting else _RUN
        padding = [] if exporting else [models[0][0].new_zeros(-count % run)]
        versions = join([piece for pieces in models for piece in (*pieces, *padding)]).view(1 + clients, -1)
        deltas = versions[0].double() - versions[1:]
        deltas = deltas.view(clients, -1, run).transpose(0, 1)
        gram += (deltas @ deltas.mT).sum(0).to(gram.device)
    return (gram + gram.T) / 2  # a matrix product need not be symmetric to the last bit
