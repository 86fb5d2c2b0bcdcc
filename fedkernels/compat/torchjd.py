"""TorchJD's MGDA with its name and arguments, solved exactly. Where TorchJD is installed, both classes are TorchJD's.

They are then a ``Weighting`` and a ``GramianWeightedAggregator``, which ``jac_to_grad`` takes and which give it their
weights. Without TorchJD they are plain modules with the same values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fedkernels.client_weights import client_weights
from fedkernels.internal import checks
from fedkernels.reference._precision import no_autocast

try:
    from torchjd.aggregation import GramianWeightedAggregator, Weighting
except ImportError:
    Weighting = nn.Module

    class GramianWeightedAggregator(nn.Module):  # type: ignore[no-redef]
        """What `MGDA` takes from TorchJD's class of this name."""

        def __init__(self, gramian_weighting: nn.Module) -> None:
            super().__init__()
            self.gramian_weighting = gramian_weighting


__all__ = ["MGDA", "MGDAWeighting"]


_CHUNK = 1 << 16  # columns of a Jacobian in float64 at a time


class MGDAWeighting(Weighting):
    """TorchJD's ``MGDAWeighting``: weights [m] of the combination of least norm, from the Gramian [m, m].

    The problem is solved exactly (``fedkernels.client_weights``), where TorchJD takes at most `max_iters` steps of
    Frank-Wolfe and stops above the optimum. Source: Désidéri 2012, "Multiple-gradient descent algorithm (MGDA) for
    multiobjective optimization".

    Args:
        epsilon: accepted as in TorchJD; changes nothing.
        max_iters: accepted as in TorchJD; changes nothing.
        lower_bound: least weight of each row, at most 1/m.
        tol: as ``fedkernels.client_weights``.

    Raises:
        TypeError: the Gramian is not a floating tensor, or lower_bound or tol not a number.
        ValueError: an argument out of range; a Gramian that is not square, not finite or no Gramian.
    """

    def __init__(
        self, epsilon: float = 0.001, max_iters: int = 100, *, lower_bound: float = 0.0, tol: float = 1e-8
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.max_iters = max_iters
        if lower_bound != 0:
            checks.positive("lower_bound", lower_bound)
        self.lower_bound = float(lower_bound)
        self.tol = checks.positive("tol", tol)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("epsilon", "max_iters") and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
        super().__setattr__(name, value)

    def forward(self, gramian: Tensor, /) -> Tensor:
        """Returns the weights [m] in the dtype of the Gramian [m, m], without a gradient."""
        checks.floating("gramian", gramian, ndim=2, layout="[m, m]")
        checks.not_empty("gramian", gramian, (0, 1), "m")
        _largest("gramian", gramian)
        return client_weights(gramian, lower_bounds=self.lower_bound or None, tol=self.tol).to(gramian.dtype)


class _WeightingOfRows(Weighting):
    """The weights [m] of a matrix [m, n] by those of its Gramian, in the matrix's dtype."""

    def __init__(self, weighting: nn.Module) -> None:
        super().__init__()
        self.weighting = weighting

    def forward(self, matrix: Tensor, /) -> Tensor:
        return self.weighting(_gramian(matrix)).to(matrix.dtype)


class MGDA(GramianWeightedAggregator):
    """TorchJD's ``MGDA``: the combination of least norm of the rows of a Jacobian [m, n], solved exactly.

    The Gramian is formed in float64 from rows that are divided by the largest entry, so that none is too small or too
    large for it, in any dtype. With ``optimize_gramian_computation=True`` TorchJD forms it, in the dtype of the rows.
    The arguments are those of `MGDAWeighting`.

    Raises:
        TypeError: the Jacobian is not a floating tensor.
        ValueError: the Jacobian is not a matrix, has no row, or is not finite.
    """

    def __init__(
        self, epsilon: float = 0.001, max_iters: int = 100, *, lower_bound: float = 0.0, tol: float = 1e-8
    ) -> None:
        super().__init__(MGDAWeighting(epsilon, max_iters, lower_bound=lower_bound, tol=tol))
        self.weighting = _WeightingOfRows(self.gramian_weighting)

    @property
    def epsilon(self) -> float:
        return self.gramian_weighting.epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self.gramian_weighting.epsilon = value

    @property
    def max_iters(self) -> int:
        return self.gramian_weighting.max_iters

    @max_iters.setter
    def max_iters(self, value: int) -> None:
        self.gramian_weighting.max_iters = value

    def forward(self, matrix: Tensor, /) -> Tensor:
        """Returns the combination [n] in the dtype of the Jacobian [m, n]."""
        weights = self.weighting(matrix)
        with no_autocast(matrix):
            return weights @ matrix

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epsilon={self.epsilon}, max_iters={self.max_iters})"

    def __str__(self) -> str:
        return type(self).__name__


@torch.no_grad()
def _gramian(matrix: Tensor) -> Tensor:
    """The inner products [m, m] of the rows of a matrix [m, n], in float64, up to a common factor."""
    checks.floating("matrix", matrix, ndim=2, layout="[m, n]")
    checks.not_empty("matrix", matrix, (0,), "m")
    gramian = matrix.new_zeros(len(matrix), len(matrix), dtype=torch.float64)
    if matrix.shape[1] == 0:
        return gramian
    largest = _largest("matrix", matrix)
    scale = largest.where(largest > 0, 1)
    for columns in matrix.split(_CHUNK, dim=1):
        columns = columns.double() / scale
        gramian += columns @ columns.T
    return gramian


def _largest(name: str, matrix: Tensor) -> Tensor:
    """The largest absolute value in float64, without a copy of the matrix; finite where the host sees values."""
    largest = torch.linalg.vector_norm(matrix.detach(), torch.inf).double()
    if checks.has_values(largest) and not largest.isfinite():
        raise ValueError(f"{name} must be finite, got {float(largest)} among its entries")
    return largest
