"""sentence-transformers' similarity functions that the losses compute without their matrix."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Computes the cosines of the rows of a [N, d] and b [M, d], [N, M]."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def dot_score(a: Tensor, b: Tensor) -> Tensor:
    """Computes the inner products of the rows of a [N, d] and b [M, d], [N, M]."""
    return a @ b.T


def name_of(similarity_fct: Any) -> str:
    """Returns "cos_sim" or "dot_score" for this name, the function here or sentence-transformers' own.

    Raises:
        ValueError: it is something else, such as another function of that name.
    """
    name = similarity_fct if isinstance(similarity_fct, str) else getattr(similarity_fct, "__name__", "")
    package = __name__ if isinstance(similarity_fct, str) else getattr(similarity_fct, "__module__", None) or ""
    if name not in ("cos_sim", "dot_score") or package.partition(".")[0] not in ("fedkernels", "sentence_transformers"):
        raise ValueError(
            f"similarity_fct must be cos_sim or dot_score of sentence_transformers.util, got {similarity_fct!r}: use "
            "the original loss for others"
        )
    return str(name)
