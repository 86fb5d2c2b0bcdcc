"""Which compiled operator serves a contrastive loss, and in which precision."""

from typing import Any

import torch
from torch import Tensor

from fedkernels import _native
from fedkernels._autograd import has_tangent


def operator(name: str, first: Tensor, second: Tensor) -> Any:
    """The compiled operator `name`, or None: then the reference serves."""
    return None if has_tangent(first, second) else _native.operator(name, first, second)


def allows_tf32() -> bool:
    """Does torch allow tf32 for products of float32 matrices on CUDA? The newer setting follows the older ones."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# torch.compile takes the answer as a constant, and compiles again when the setting changes. The mark is that of
# torch.compiler.assume_constant_result, which would import all of the compiler: seconds.
allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def scaled(gradient: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in `dtype`, for a backward pass; where it can be had without the product in the gradient's
    own dtype beside it."""
    if gradient.dtype == dtype or torch.is_grad_enabled() or _is_batched(gradient) or _is_batched(factor):
        return (gradient * factor).to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _is_batched(value: Tensor | float) -> bool:
    """Are several gradients asked for at once, as by torch.autograd.grad's is_grads_batched? They know no `out`."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor):
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value)
