"""Which compiled operator serves a contrastive loss, and in which precision."""

from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks, contrastive_cuda, native
from fedkernels.internal.autograd import has_tangent, is_batched
from fedkernels.reference._precision import compute_dtype, no_autocast

for _name, _schema in contrastive_cuda.SCHEMAS.items():
    torch.library.define(f"fedkernels::{_name}", _schema)
if "info_nce" in native.CUDA:
    for _name, _function in contrastive_cuda.OPERATORS.items():
        torch.library.impl(f"fedkernels::{_name}", "cuda", _function)
_fallthrough = torch.library.Library("fedkernels", "IMPL")
if native.module is not None:
    # A loss of one tile has a gradient of its own: to ask its operators for one takes the host as long as a launch.
    for _name in ("contrastive_one_tile", "contrastive_finish"):
        _fallthrough.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def operator(name: str, first: Tensor, second: Tensor, *scales: Tensor | float) -> Any:
    """The compiled operator `name`, or None if the reference is to be used."""
    return None if has_tangent(first, second, *scales) else native.operator(name, first, second)


def scaled_rows(rows: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """``rows * scale`` in `dtype`: what a loss of unscaled inner products takes in place of a temperature."""
    return rows.to(dtype) * scale


def stays_narrow(first: Tensor, second: Tensor) -> bool:
    """Are these multiplied in 16 bits? Scaled before, they would be widened."""
    return first.is_cuda and first.dtype == second.dtype and first.dtype.itemsize == 2


def scalar(value: Tensor | float, like: Tensor) -> Tensor:
    """A scale or a bias as float64 [] on the device of `like`."""
    if isinstance(value, Tensor):
        return value.double().reshape(())
    return like.new_full((), value, dtype=torch.float64)


def with_negatives(query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
    """The rows of `key` and then those of `negatives`, which are checked."""
    checks.floating("negatives", negatives, ndim=2, layout="[M, d]")
    if negatives.shape[1] != query.shape[1]:
        raise ValueError(f"negatives must have the d = {query.shape[1]} columns of query, got {negatives.shape[1]}")
    checks.same_device(query=query, negatives=negatives)
    return rows_of(key, negatives)


def rows_of(*parts: Tensor) -> Tensor:
    """The rows of all parts, one after the other."""
    with no_autocast(parts[0]):  # under autocast to bfloat16 torch.cat of float16 raises an error
        return torch.cat(parts)


def with_bias(query: Tensor, key: Tensor, scale: Tensor | float, bias: Tensor | float) -> tuple[Tensor, Tensor]:
    """Rows [B, d + 1] and [N, d + 1] whose inner products are ``scale * q_i . k_j + bias``.

    One more column adds the bias to every logit, and autograd gives it its gradient.
    """
    scaled = scaled_rows(query, scale, compute_dtype(query, key))
    with no_autocast(query):  # as in `rows_of`
        biases = scaled.new_ones(query.shape[0], 1) * bias
        return torch.cat([scaled, biases], dim=1), torch.cat([key, key.new_ones(key.shape[0], 1)], dim=1)


def scaled(gradient: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in `dtype`, for a backward pass.

    Where possible the product is written in `dtype` directly, without a copy in the gradient's own dtype.
    """
    if gradient.dtype == dtype or torch.is_grad_enabled() or is_batched(gradient) or is_batched(factor):
        return (gradient * factor).to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
