"""NT-Xent in plain PyTorch (Chen et al. 2020, SimCLR, Eq. 1)."""

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._reduce import reduce


def nt_xent(view1: Tensor, view2: Tensor, temperature: float, reduction: str = "mean") -> Tensor:
    """loss_i = logsumexp_{j != i}(z_i . z_j / t) - z_i . z_{p(i)} / t over the 2B rows z = [view1; view2]."""
    dtype = compute_dtype(view1, view2)
    batch = view1.shape[0]
    with no_autocast(view1):
        rows = torch.cat([view1.to(dtype), view2.to(dtype)])
        logits = rows @ rows.T / temperature
        # -inf, not 0: exp(0) = 1 would leave every row's self-similarity among its negatives.
        itself = torch.eye(2 * batch, dtype=torch.bool, device=rows.device)
        log_p = logits.masked_fill(itself, -torch.inf).log_softmax(dim=1)
        losses = -torch.cat([log_p[:batch, batch:].diagonal(), log_p[batch:, :batch].diagonal()])
        return reduce(losses, reduction)
