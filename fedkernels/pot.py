"""The former place of `fedkernels.compat.pot`: imports from here go on, with a warning."""

import warnings

from fedkernels.compat.pot import mm_unbalanced, mm_unbalanced2

__all__ = ["mm_unbalanced", "mm_unbalanced2"]

warnings.warn("fedkernels.pot is deprecated: import from fedkernels.compat.pot", DeprecationWarning, stacklevel=2)
