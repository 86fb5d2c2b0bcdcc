"""The former names of `fedkernels.compat.torchjd`'s classes with a lower bound: imports from here go on."""

from fedkernels.compat.torchjd import MGDA, MGDAWeighting

__all__ = ["MinimumNorm", "MinimumNormWeighting"]


class MinimumNormWeighting(MGDAWeighting):
    """`MGDAWeighting` with `lower_bound` and `tol` alone."""

    def __init__(self, lower_bound: float = 0.0, tol: float = 1e-8) -> None:
        super().__init__(lower_bound=lower_bound, tol=tol)


class MinimumNorm(MGDA):
    """`MGDA` with `lower_bound` and `tol` alone."""

    def __init__(self, lower_bound: float = 0.0, tol: float = 1e-8) -> None:
        super().__init__(lower_bound=lower_bound, tol=tol)
