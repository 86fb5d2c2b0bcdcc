"""The exact weights of least norm for TorchJD. Import this module where TorchJD is installed; fedkernels does not.

``MinimumNorm`` takes the place of TorchJD's ``MGDA``, whose Frank-Wolfe iteration only approaches these weights::

    from torchjd.autojac import backward, jac_to_grad
    from fedkernels.compat.torchjd_aggregators import MinimumNorm

    backward(losses)
    jac_to_grad(model.parameters(), MinimumNorm())

``fedkernels.compat.torchjd`` has ``MGDA`` with TorchJD's own name and arguments, and needs no TorchJD. The classes
here are a ``Weighting`` and an ``Aggregator`` of TorchJD, which ``jac_to_grad`` takes, and have a lower bound.
"""

from typing import Any

from torch import Tensor
from torchjd.aggregation import GramianWeightedAggregator, Weighting

from fedkernels.client_weights import client_weights
from fedkernels.internal import checks

__all__ = ["MinimumNorm", "MinimumNormWeighting"]


class MinimumNormWeighting(Weighting[Any]):
    """TorchJD's ``Weighting`` of a Gramian [m, m]: the weights [m] of the convex combination of least norm.

    Source: Desideri, "Multiple-gradient descent algorithm (MGDA) for multiobjective optimization" (2012). They are
    exact, up to ``tol`` of ``fedkernels.client_weights``, where ``MGDAWeighting`` stops after 100 steps.

    Args:
        lower_bound: least weight of each row, at most 1/m.
        tol: as ``fedkernels.client_weights``.
    """

    def __init__(self, lower_bound: float = 0.0, tol: float = 1e-8) -> None:
        super().__init__()
        if lower_bound != 0:
            checks.positive("lower_bound", lower_bound)
        self.lower_bound = float(lower_bound)
        self.tol = checks.positive("tol", tol)

    def forward(self, gramian: Tensor, /) -> Tensor:
        weights = client_weights(gramian, lower_bounds=self.lower_bound or None, tol=self.tol)
        return weights.to(gramian.dtype)


class MinimumNorm(GramianWeightedAggregator):
    """TorchJD's ``Aggregator`` of a Jacobian [m, n] to its convex combination of rows of least norm.

    Args:
        lower_bound: least weight of each row, at most 1/m.
        tol: as ``fedkernels.client_weights``.
    """

    def __init__(self, lower_bound: float = 0.0, tol: float = 1e-8) -> None:
        super().__init__(MinimumNormWeighting(lower_bound, tol))
