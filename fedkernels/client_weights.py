"""The convex combination of the clients' updates that has the least norm."""

import math
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks, native
from fedkernels.internal.autograd import is_transformed, is_without_data
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference.client_weights import client_weights as _reference


def client_weights(gram: Tensor, *, lower_bounds: Tensor | float | None = None, tol: float = 1e-8) -> Tensor:
    """Weights of the clients: ``argmin p'Gp`` over ``p >= 0, sum(p) = 1``.

    With ``G_ij = <g_i, g_j>`` this is the combination of the g_k of least norm, along which every client improves at
    the same or a better rate. Source: FedU2 (Liao et al. 2024), Eq. 10, without its constants; the ADMM keeps p apart
    from its non-negative copy where the paper's Eq. 12 clips p itself, which is not the optimum.

    Args:
        gram: [..., K, K] symmetric positive semi-definite, float16, bfloat16, float32 or float64, any strides.
            May be of deficient rank: equal clients are fine. Where rounding to its dtype has made it indefinite, so
            that there need be no minimum, the nearest positive semi-definite matrix is solved in its place.
        lower_bounds: [..., K] least weight of each client, broadcast against gram's leading dimensions, or one number
            for all. Not negative, with a sum of at most 1 for each problem. None stands for 0.
        tol: the iterations stop at ``p'Gp - min_k (Gp)_k <= tol * min(mean(G), min_k G_kk)``. The left side bounds the
            excess over the optimum; the minimum on the right side is never below the optimum. An exact solve on the
            clients with positive weight follows. A difference below ``K * 2.2e-16 * trace(G)`` is rounding and counts
            as reached. If the iterations do not reach even that, the function warns.

    With lower bounds l, ``p = l + s q`` with ``s = 1 - sum(l)``, and q has the least norm among the combinations of
    ``s g_k + sum_j l_j g_j``. So q is solved for as above, and tol refers to the Gram matrix of these vectors.

    Returns:
        [..., K], non-negative with sum 1; float64 for a float64 gram, else float32; solved in float64, on a GPU up to
        K = 40, else on the CPU.
        Detached: the weights are not differentiable. K = 1 gives 1. A zero gram gives equal weights. A client with
        ``G_kk = 0`` takes part in a minimum of 0.

    Up to K = 40 on a GPU, the host never waits, so it sees no values. Instead of a ValueError, a gram or lower bounds
    with an invalid value give the weights NaN for their problem, and the function never warns. Where the optimum is 0
    or not unique, or rounding has made gram indefinite, the kernel solves ``p'Gp + r sum_k G_kk p_k^2`` with the
    smallest ridge r of 1e-8, 1e-6, ... that makes the problem definite.

    Raises:
        TypeError: gram is not a floating tensor, tol not a number, or lower_bounds neither a tensor nor a number.
        ValueError: K = 0, not square, not finite, not symmetric, not a Gram matrix (``G_kk < 0`` or
            ``G_ij^2 > G_ii G_jj``; beyond rounding in each case), tol out of range; a lower bound that is negative or
            not finite, or lower bounds with a sum above 1.
    """
    checks.floating("gram", gram, at_least=2, layout="[..., K, K]")
    checks.not_empty("gram", gram, (-2, -1), "K")
    if gram.shape[-1] != gram.shape[-2]:
        raise ValueError(f"gram must have shape [..., K, K], got {list(gram.shape)}")
    tol = checks.positive("tol", tol)
    with torch.no_grad():
        if lower_bounds is not None:
            return _bounded(gram, _bounds(lower_bounds, gram), tol)
        if torch.compiler.is_compiling() or is_transformed() or is_without_data(gram):
            weights: Tensor = torch.ops.fedkernels.client_weights_solve(gram, tol)
            return weights
        return _solve(gram, tol)  # the dispatcher would take as long as a problem of ten clients


def _bounded(gram: Tensor, bounds: Tensor, tol: float) -> Tensor:
    """The weights with lower bounds, by the problem without them that the docstring names."""
    rest = (1 - bounds.sum(-1, keepdim=True)).clamp(min=0)
    wide = gram.double()
    with_bounds = (wide @ bounds[..., None])[..., 0]  # of each g_k with the sum of the l_j g_j
    square = (bounds * with_bounds).sum(-1)[..., None, None]
    cross = rest * with_bounds
    shifted = rest[..., None].square() * wide + cross[..., :, None] + cross[..., None, :] + square
    if checks.has_values(gram):  # which may be invalid where the shifted matrix is not
        _check_gram(gram)
    return (bounds + rest * client_weights(shifted, tol=tol)).to(compute_dtype(gram))


def _bounds(lower_bounds: Tensor | float, gram: Tensor) -> Tensor:
    """The lower bounds as float64 [..., K], checked where the data can be seen."""
    if not isinstance(lower_bounds, Tensor):
        bound = checks.finite("lower_bounds", lower_bounds, "a torch.Tensor or a Python number")
        _check_bounds(bound, gram.shape[-1] * bound)
        return gram.new_full(gram.shape[:-1], bound, dtype=torch.float64)
    checks.floating("lower_bounds", lower_bounds)
    checks.same_device(gram=gram, lower_bounds=lower_bounds)
    wanted = list(gram.shape[:-1])
    bounds = checks.expanded("lower_bounds", lower_bounds.double(), wanted, "gram", gram, "be a number or have")
    if torch.compiler.is_compiling() or is_transformed() or is_without_data(bounds):
        return bounds
    if bounds.is_cuda:  # the host does not wait for the values
        valid = (bounds >= 0).all(-1, keepdim=True) & (bounds.sum(-1, keepdim=True) <= _MOST_IN_SUM)
        return bounds.where(valid, math.nan)
    if bounds.numel():
        _check_bounds(float(bounds.min()), float(bounds.sum(-1).max()))  # of NaN the least is NaN
    return bounds


_MOST_IN_SUM = 1 + 1e-6  # float32 bounds that are meant to have the sum 1


def _check_bounds(least: float, largest_sum: float) -> None:
    if not least >= 0:
        raise ValueError(f"lower_bounds must not be negative or NaN, got {least:.3g}")
    if largest_sum > _MOST_IN_SUM:
        raise ValueError(f"lower_bounds must have a sum of at most 1, got {largest_sum:.6g}")


_MOST_ON_CUDA = 40  # clients; by a model the CPU is faster beyond, copies counted, though one block takes 128


def _solve(gram: Tensor, tol: float) -> Tensor:
    operator = native.operator("client_weights", gram)
    if gram.is_cuda and (operator is None or gram.shape[-1] > _MOST_ON_CUDA):
        return _solve(gram.cpu(), tol).to(gram.device)
    if operator is None:
        _check_gram(gram)
        return _reference(gram, tol=tol)
    weights: Tensor = operator(gram.contiguous(), tol)
    if not gram.is_cuda and math.isnan(weights.sum()):  # the CUDA kernel solves all that are valid
        _check_gram(gram)
        unsolved = weights.isnan().any(-1)  # their optimum is 0 or not unique
        weights[unsolved] = _reference(gram[unsolved], tol=tol)
    return weights


# An operator of its own for torch.compile, fake tensors and vmap, which have no data for the checks and the loop.
torch.library.define("fedkernels::client_weights_solve", native.SCHEMAS["client_weights"])
torch.library.impl("fedkernels::client_weights_solve", ("cpu", "cuda"))(_solve)


def _shape(gram: Tensor, tol: float) -> Tensor:
    return gram.new_empty(gram.shape[:-1], dtype=compute_dtype(gram))


torch.library.register_fake("fedkernels::client_weights_solve")(_shape)
if native.module is not None:
    torch.library.register_fake("fedkernels::client_weights")(_shape)


@torch.library.register_vmap("fedkernels::client_weights_solve")
def _(info: Any, in_dims: tuple[int | None, ...], gram: Tensor, tol: float) -> tuple[Tensor, int]:
    assert in_dims[0] is not None  # it is the one tensor
    return torch.ops.fedkernels.client_weights_solve(gram.movedim(in_dims[0], 0), tol), 0


def _check_gram(gram: Tensor) -> None:
    gram = gram.double()
    if not gram.isfinite().all():
        raise ValueError(f"gram must be finite, got {int((~gram.isfinite()).sum())} entries that are NaN or infinite")
    slack = 1e-2 * gram.abs().amax((-2, -1), keepdim=True)  # a bfloat16 gram is rounded to 0.4 %
    if ((gram - gram.mT).abs() > slack).any():
        raise ValueError("gram must be symmetric, got a matrix that differs from its transpose by more than 1 %")
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    if (diagonal < -slack[..., 0]).any():
        raise ValueError(f"gram must be positive semi-definite, got {float(diagonal.min()):.3g} on its diagonal")
    size = diagonal.clamp(min=0).sqrt()
    if (gram.abs() > size[..., :, None] * size[..., None, :] + slack).any():
        raise ValueError("gram must be positive semi-definite, got an entry with G_ij^2 > G_ii G_jj")
