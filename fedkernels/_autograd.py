"""What the gradients of compiled operators share."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.forward_ad import unpack_dual


def needs_gradient(tensor: Tensor) -> bool:
    """Will a gradient be asked for? The operators form it together with the value."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_tangent(*tensors: Tensor) -> bool:
    """Is a forward-mode derivative asked for? The references have it; the operators would drop it without a word."""
    return not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_without_data(tensor: Tensor) -> bool:
    """Is this a tensor of the meta device or a fake one, which have a shape and no numbers?"""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_transformed() -> bool:
    """Is this within torch.func.grad, vmap or another transform? It has no rule for the compiled operators."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# torch.compile keeps the stack as its own when it traces torch.func.grad, and takes the answer as a constant. The mark
# is that of torch.compiler.assume_constant_result, which would import all of the compiler: seconds.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep_missing(ctx: Any) -> None:
    """A gradient that nobody formed arrives as None, not as zeros."""
    ctx.set_materialize_grads(False)


def refuse_second_derivative(name: str, *grads: Tensor | None) -> None:
    """`grads` belong to the outputs that are gradients: one that is there asks for a derivative of a gradient."""
    if any(grad is not None for grad in grads):
        raise RuntimeError(
            f"{name} has no second derivative in its compiled form; its reference has: set FEDKERNELS_NATIVE=0"
        )
