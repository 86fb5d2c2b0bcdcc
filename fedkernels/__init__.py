"""Operators of federated self-supervised learning."""

from .info_nce import info_nce
from .linear_cka import linear_cka, linear_cka_pairwise, linear_cka_to_kernel
from .nt_xent import nt_xent

__all__ = ["info_nce", "linear_cka", "linear_cka_pairwise", "linear_cka_to_kernel", "nt_xent"]
