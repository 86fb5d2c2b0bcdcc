"""The former place of `fedkernels.compat.torchjd_aggregators`: imports from here go on, with a warning."""

import warnings

from fedkernels.compat.torchjd_aggregators import MinimumNorm, MinimumNormWeighting

__all__ = ["MinimumNorm", "MinimumNormWeighting"]

warnings.warn(
    "fedkernels.torchjd is deprecated: import from fedkernels.compat.torchjd_aggregators",
    DeprecationWarning,
    stacklevel=2,
)
