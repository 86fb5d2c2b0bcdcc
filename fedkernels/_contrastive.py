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
