"""The server's step along the weighted updates in plain PyTorch, in float64 and in place."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def apply_deltas(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]], weights: Tensor) -> None:
    """global <- global - sum_k w_k (global - client_k). The weights need not sum to one."""
    for index, target in enumerate(global_params):
        start = target.double()
        step = torch.zeros_like(start)
        for weight, params in zip(weights.to(target.device).double(), client_params, strict=True):
            step += weight * (start - params[index].double())
        target.copy_(start - step)
