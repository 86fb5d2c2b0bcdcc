"""The former place of `fedkernels.compat.torchjd_aggregators`: imports from here go on."""

from fedkernels.compat.torchjd_aggregators import MinimumNorm, MinimumNormWeighting

__all__ = ["MinimumNorm", "MinimumNormWeighting"]
