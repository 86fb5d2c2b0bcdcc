"""The former place of `fedkernels.compat.pot`: imports from here go on."""

from fedkernels.compat.pot import mm_unbalanced, mm_unbalanced2

__all__ = ["mm_unbalanced", "mm_unbalanced2"]
