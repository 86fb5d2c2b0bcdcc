"""TorchJD's MGDA, with its name and arguments, where TorchJD need not be installed.

``fedkernels.compat.torchjd_aggregators`` has the same weights as a ``Weighting`` and an ``Aggregator`` of TorchJD,
with a lower bound.
"""

import torch
from torch import Tensor, nn

from fedkernels.client_weights import client_weights

__all__ = ["MGDA", "MGDAWeighting"]


class MGDAWeighting(nn.Module):
    """TorchJD's ``MGDAWeighting``: weights [m] of the combination of least norm, from the Gramian [m, m].

    The problem is solved exactly (``fedkernels.client_weights``), where TorchJD takes at most `max_iters` steps of
    Frank-Wolfe and stops above the optimum. `epsilon` and `max_iters` are accepted and change nothing.
    """

    def __init__(self, epsilon: float = 0.001, max_iters: int = 100) -> None:
        super().__init__()
        if epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
        if max_iters <= 0:
            raise ValueError(f"max_iters must be a positive integer, got {max_iters}")
        self.epsilon = epsilon
        self.max_iters = max_iters

    def forward(self, gramian: Tensor, /) -> Tensor:
        return client_weights(gramian).to(gramian.dtype)


class MGDA(nn.Module):
    """TorchJD's ``MGDA``: the combination of least norm of the rows of a Jacobian [m, n], solved exactly.

    `epsilon` and `max_iters` are accepted and change nothing.
    """

    def __init__(self, epsilon: float = 0.001, max_iters: int = 100) -> None:
        super().__init__()
        self.gramian_weighting = MGDAWeighting(epsilon, max_iters)

    def forward(self, matrix: Tensor, /) -> Tensor:
        if matrix.ndim != 2:
            raise ValueError(f"matrix must have shape [m, n], got {list(matrix.shape)}")
        with torch.no_grad():
            gramian = matrix @ matrix.T
        return self.gramian_weighting(gramian) @ matrix
