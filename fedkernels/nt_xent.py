"""NT-Xent: SimCLR's contrastive loss."""

from torch import Tensor

from fedkernels import _checks
from fedkernels.reference.nt_xent import nt_xent as _reference


def nt_xent(view1: Tensor, view2: Tensor, temperature: float, reduction: str = "mean") -> Tensor:
    """SimCLR's loss over the 2B rows ``z = [view1; view2]``; the positive of a row is its other view.

    ``loss_i = logsumexp_{j != i}(z_i . z_j / temperature) - z_i . z_p(i) / temperature``

    A row's similarity to itself is left out (as -inf, not as 0). The rows are used as given: normalise them first
    (``torch.nn.functional.normalize``) if the similarity is to be the cosine, as SimCLR does. Source: Chen et al.
    2020, "A Simple Framework for Contrastive Learning of Visual Representations", Eq. 1.

    Args:
        view1: [B, d], float16, bfloat16, float32 or float64, any strides.
        view2: [B, d].
        temperature: positive, finite Python number.
        reduction: "mean" or "sum" over the 2B rows, or "none".

    Returns:
        A scalar, or [2B] for "none" (view1's rows, then view2's): float64 where an input is float64, else float32.
        Products and sums have that precision too, under autocast as well. Gradients come back in each input's dtype.
        NaN in gives NaN out. With B = 1 the positive is the only other row and the loss is 0.

    Raises:
        TypeError: an input is not a floating tensor, or temperature not a number.
        ValueError: B = 0, d = 0, unequal shapes or devices, a temperature or reduction out of range.
    """
    _checks.floating("view1", view1, ndim=2, layout="[B, d]")
    _checks.floating("view2", view2, ndim=2, layout="[B, d]")
    _checks.not_empty("view1", view1, (0, 1), "B or d")
    if view2.shape != view1.shape:
        raise ValueError(f"view2 must have the shape {list(view1.shape)} of view1, got {list(view2.shape)}")
    _checks.same_device(view1=view1, view2=view2)
    temperature = _checks.positive("temperature", temperature)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    return _reference(view1, view2, temperature, reduction)
