"""InfoNCE in plain PyTorch (van den Oord et al. 2018, Eq. 4; MoCo v3's contrastive loss)."""

from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._reduce import reduce


def info_nce(query: Tensor, key: Tensor, temperature: float, reduction: str = "mean") -> Tensor:
    """loss_i = logsumexp_j(q_i . k_j / t) - q_i . k_i / t, query [B, d], key [N, d], N >= B."""
    dtype = compute_dtype(query, key)
    with no_autocast(query):
        logits = query.to(dtype) @ key.to(dtype).T / temperature
        # log_softmax subtracts the row's maximum before anything is rounded, which logsumexp - positive does not.
        losses = -logits.log_softmax(dim=1).diagonal()
        return reduce(losses, reduction)
