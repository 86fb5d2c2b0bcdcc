"""What the gradients of compiled operators share."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def needs_gradient(tensor: Tensor) -> bool:
    """Will a gradient be asked for? The operators form it together with the value."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_tangent(*tensors: Tensor) -> bool:
    """Is a forward-mode derivative asked for? The references have it; the operators would drop it without a word."""
    return not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def keep_missing(ctx: Any) -> None:
    """A gradient that nobody formed arrives as None, not as zeros."""
    ctx.set_materialize_grads(False)


def refuse_second_derivative(name: str, *grads: Tensor | None) -> None:
    """`grads` belong to the outputs that are gradients: one that is there asks for a derivative of a gradient."""
    if any(grad is not None for grad in grads):
        raise RuntimeError(
            f"{name} has no second derivative in its compiled form; its reference has: set FEDKERNELS_NATIVE=0"
        )
