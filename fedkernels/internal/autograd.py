"""What the gradients of the operators share.

The compiled operators get their gradients by torch.library.register_autograd, so that a direct call of
torch.ops.fedkernels has them too and opcheck finds them. torch.func does not accept such gradients: within its
transforms the references serve, which autograd differentiates. The one exception is unbalanced_ot, whose reference is
an iteration that autograd cannot differentiate: it is a torch.autograd.Function around either solver, in the form that
torch.func accepts.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def needs_gradient(tensor: Tensor) -> bool:
    """Can a gradient be asked for later? The operators compute it together with the value."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_tangent(*values: Tensor | float) -> bool:
    """Has one of these a forward-mode derivative? The references use it; the operators would silently drop it."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return forward_ad._current_level >= 0  # a tangent cannot be looked for while compiling, which guards the level
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_without_data(tensor: Tensor) -> bool:
    """Is this a meta or fake tensor, which has a shape but no data?"""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_transformed() -> bool:
    """Is this inside torch.func.grad, vmap or another transform? They do not support the compiled operators."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# When torch.compile traces torch.func.grad it maintains this stack itself and treats the result as a constant. The
# attribute is the one that torch.compiler.assume_constant_result sets; calling that would import the compiler, which
# takes seconds.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_batched(value: Tensor | float) -> bool:
    """Is this a batch of gradients, as torch.autograd.grad's is_grads_batched makes? It does not support `out`."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor):
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value)


def keep_missing_as_none(ctx: Any) -> None:
    """Lets a missing gradient of an output arrive in the backward pass as None instead of zeros."""
    ctx.set_materialize_grads(False)


def refuse_second_derivative(name: str, *grads: Tensor | None) -> None:
    """Raises RuntimeError if one of `grads`, which belong to the outputs that are gradients, is not None."""
    if any(grad is not None for grad in grads):
        raise RuntimeError(
            f"the compiled {name} has no second derivative; its reference has one: set FEDKERNELS_NATIVE=0 in the "
            "environment"
        )


def register_no_derivative(operator: str, name: str) -> None:
    """Makes `operator`, which forms the gradients of the compiled `name`, refuse a derivative of its own."""

    def refuse(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        refuse_second_derivative(name, *grads)
        return (None,) * len(ctx.needs_input_grad)

    torch.library.register_autograd(f"fedkernels::{operator}", refuse)
