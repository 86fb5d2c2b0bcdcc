"""Operators of federated self-supervised learning, exact and differentiable: see README.md in this folder."""

from fedkernels import nn as nn  # not in __all__, so that `import *` leaves torch.nn as `nn`
from fedkernels.accumulate_cka import CKAAccumulator
from fedkernels.apply_deltas import apply_deltas
from fedkernels.client_weights import client_weights
from fedkernels.clip_loss import clip_loss
from fedkernels.compare_networks import Comparison, compare
from fedkernels.debiased_cka import debiased_cka, debiased_cka_pairwise
from fedkernels.delta_gram import delta_gram
from fedkernels.gradient_cache import GradientCache
from fedkernels.info_nce import info_nce
from fedkernels.internal.native import build_info
from fedkernels.linear_cka import linear_cka, linear_cka_pairwise, linear_cka_to_kernel
from fedkernels.minibatch_cka import MinibatchCKA
from fedkernels.nt_xent import nt_xent
from fedkernels.self_test import self_test
from fedkernels.sigmoid_loss import sigmoid_loss
from fedkernels.sigreg import sigreg
from fedkernels.supervised_contrastive_loss import supervised_contrastive_loss
from fedkernels.two_views import two_views, view_parameters
from fedkernels.unbalanced_ot import TransportInfo, unbalanced_ot, unbalanced_ot_plan
from fedkernels.view_options import ViewKey, ViewOptions, ViewParameters

__version__ = "0.1.0"

__all__ = [
    "CKAAccumulator",
    "Comparison",
    "GradientCache",
    "MinibatchCKA",
    "TransportInfo",
    "ViewKey",
    "ViewOptions",
    "ViewParameters",
    "apply_deltas",
    "build_info",
    "client_weights",
    "clip_loss",
    "compare",
    "debiased_cka",
    "debiased_cka_pairwise",
    "delta_gram",
    "info_nce",
    "linear_cka",
    "linear_cka_pairwise",
    "linear_cka_to_kernel",
    "nt_xent",
    "self_test",
    "sigmoid_loss",
    "sigreg",
    "supervised_contrastive_loss",
    "two_views",
    "unbalanced_ot",
    "unbalanced_ot_plan",
    "view_parameters",
]
