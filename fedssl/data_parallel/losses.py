"""The contrastive losses of `fedkernels`, whose negatives are the whole batch's wherever its shares are."""

from __future__ import annotations

from torch import Tensor

import fedkernels


def info_nce(query: Tensor, key: Tensor, temperature: float, shared: bool) -> Tensor:
    """`fedkernels.info_nce`; where the batch is shared, that of this process's queries against all processes' keys.

    Args:
        query, key: [n, d], this process's.
        temperature: divides the products.
        shared: whether other processes have the rest of the batch (`Model.shares_batches`).

    Returns:
        A scalar, whose mean over the processes is the loss of the whole batch.
    """
    if not shared:
        return fedkernels.info_nce(query, key, temperature)
    from fedkernels import distributed  # here, as some builds of torch lack torch.distributed

    return distributed.info_nce(query, key, temperature)


def nt_xent(view1: Tensor, view2: Tensor, temperature: float, shared: bool) -> Tensor:
    """`fedkernels.nt_xent`; where the batch is shared, that of this process's views against all processes' views.

    Args:
        view1, view2: [n, d], this process's.
        temperature: divides the products.
        shared: whether other processes have the rest of the batch (`Model.shares_batches`).

    Returns:
        A scalar, whose mean over the processes is the loss of the whole batch.
    """
    if not shared:
        return fedkernels.nt_xent(view1, view2, temperature)
    from fedkernels import distributed

    return distributed.nt_xent(view1, view2, temperature)
