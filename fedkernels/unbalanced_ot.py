"""Unbalanced optimal transport with half-squared marginal penalties, solved to a certified gap."""

import math
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks, native
from fedkernels.internal.autograd import keep_missing_as_none
from fedkernels.internal.transport_gradients import FirstOrderOnly, PlanGradient
from fedkernels.internal.transport_warnings import warn
from fedkernels.reference import unbalanced_ot as _reference
from fedkernels.reference._precision import compute_dtype
from fedkernels.reference.unbalanced_ot import TransportInfo

METHODS = ("accelerated", "interior_point", "steepest")


def unbalanced_ot(
    cost: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    tau_a: float,
    tau_b: float,
    *,
    row_mask: Tensor | None = None,
    column_mask: Tensor | None = None,
    tol: float = 1e-7,
    max_iterations: int | None = None,
    method: str = "accelerated",
) -> Tensor:
    """The least cost of moving the masses a to the masses b, where mass may be created and destroyed at a price.

    ``min over plan >= 0 of <cost, plan> + tau_a/2 |plan 1 - a|^2 + tau_b/2 |plan' 1 - b|^2``

    Source: FedU2 (Liao et al. 2024), Eq. 4. An entry of the plan is positive only where
    ``cost_ij < tau_a a_i + tau_b b_j``. If that holds for no entry, the plan is 0, nothing is transported and the
    gradient in cost is 0. The function then warns, because a loss term without a gradient trains nothing. On a GPU the
    host does not wait for the solution, so a later call warns, once the solution is there. Not every call is looked at,
    and none in a CUDA graph: the info that ``unbalanced_ot_plan`` returns tells it of each.

    Args:
        cost: [..., M, N], float16, bfloat16, float32 or float64, any strides. An entry of +inf forbids that pair.
        a: [..., M] masses of the rows, broadcast against cost's leading dimensions, or one number for all.
        b: [..., N] masses of the columns, likewise.
        tau_a: positive price of a deviation from a.
        tau_b: positive price of a deviation from b.
        row_mask: [..., M] bool, broadcast like a. False marks a row that is padding. Its costs and its mass are
            ignored, even NaN, its entries of the plan are 0, and so are its gradients. So a batch can hold problems of
            unequal sizes. Each has the value that it has alone, up to tol.
        column_mask: [..., N] bool, likewise.
        tol: the solver stops at this duality gap, relative to ``<|cost|, plan>`` + the penalties, which is the value
            itself where cost >= 0. A gap below 1.8e-15 of the value of the plan 0, ``tau_a/2 |a|^2 + tau_b/2 |b|^2``,
            counts as 0, for rounding hides it (while the interior point runs, below 1.8e-15 of what it is relative
            to). So an optimum of 0 is reached too. The gradient converges more slowly
            than the value. For FedU2's costs and batches of 32 to 256 it is off by at most 7 % at 1e-7, and in half of
            the problems by less than 0.6 %. At 1e-4 it is off by 8 to 21 % in half of them, and by up to 29 %, after a
            third to a seventh of the steps (docs/operators/unbalanced_ot.md).
        max_iterations: steps of the solver, 100,000 for None. On a GPU all steps are one launch. So None is there
            10,000 for "accelerated" and 100,000 for "steepest", or 2^33 / (M N) if that is less, but at least 1000. If
            they do not suffice, the function warns and tells the gap that it reached, on a GPU as said above.
        method: "accelerated" is FISTA with restart and a backtracking line search. Its number of steps grows with
            tau_a and tau_b. On the CPU, a problem that it has not solved after 1000 steps is solved by the interior
            point (in large problems after M N min(M, N) / (16 (M + N)) steps). On a GPU the kernel has no interior
            point and continues with FISTA: choose "interior_point" there where tau is large beside the costs.
            "interior_point" is Mehrotra's predictor-corrector method from the start: 7 to 30 steps for any tau, of
            O(M N min(M, N)) operations each. On a GPU it runs on the reference in PyTorch, and the host waits for it.
            "steepest" is FedU2's Eq. 6 with the safeguards that it needs to converge. It takes about a hundred times as
            many iterations as "accelerated".

    Returns:
        [...], float64 where an input is float64, else float32; solved in float64. It is the objective at the
        computed plan, so it is never below the optimum. A problem that holds NaN, a cost of -inf or an infinite
        mass has the value NaN; the other problems of its batch are not affected.

        Differentiable once in cost, a and b by the envelope theorem: the gradient in cost is the plan, in a
        ``tau_a (a - plan 1)``, in b ``tau_b (b - plan' 1)``. There is none in tau_a and tau_b.

    Raises:
        TypeError: a tensor is not floating, a mask is not bool, or an argument that must be a number is not one.
        ValueError: M = 0 or N = 0, shapes that do not fit, unequal devices, a number or method out of range.
    """
    cost, a, b, options = _check(cost, a, b, tau_a, tau_b, row_mask, column_mask, tol, max_iterations, method)
    value, iterations, gap, mass, *_ = _UnbalancedOT.apply(cost, a, b, *options, _link(cost, a, b))
    warn(TransportInfo(iterations, gap, mass), options[2])
    return value


def unbalanced_ot_plan(
    cost: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    tau_a: float,
    tau_b: float,
    *,
    row_mask: Tensor | None = None,
    column_mask: Tensor | None = None,
    tol: float = 1e-7,
    max_iterations: int | None = None,
    method: str = "accelerated",
) -> tuple[Tensor, TransportInfo]:
    """The plan of ``unbalanced_ot`` and facts about its solution. Arguments, warnings and errors are the same.

    Returns:
        plan [..., M, N] (float64 where an input is float64, else float32) and info, a named tuple of tensors [...].
        These are ``iterations`` (int64), ``gap`` (float64, relative, NaN for a problem that holds NaN) and
        ``transported_mass`` (float64, the sum of the plan).

        The plan is differentiable once in cost, a and b, by the implicit function theorem on its positive entries. So
        ``(cost * plan).sum()`` has its true gradient. It is as exact as these entries are: pass tol = 1e-10 and method
        "interior_point". The backward pass solves a system of M + N equations; ``plan.detach()`` does without. Where
        the plan is not unique, its derivative is that of the part that cost, a and b determine. The info carries no
        gradient: for the mass, sum the plan.
    """
    cost, a, b, options = _check(cost, a, b, tau_a, tau_b, row_mask, column_mask, tol, max_iterations, method)
    plan, u, v, _, mass, iterations, gap = _solve(cost, a, b, *options)
    info = TransportInfo(iterations, gap, mass)
    warn(info, options[2])
    return PlanGradient.apply(plan, u, v, cost, a, b, *options[:2], _link(cost, a, b)), info


# An operator of its own for torch.compile: its loop ends depending on the data, which a compiled graph cannot express.
torch.library.define("fedkernels::unbalanced_ot_reference", native.SCHEMAS["unbalanced_ot"])


@torch.library.impl("fedkernels::unbalanced_ot_reference", ("cpu", "cuda"))
def _(
    cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, tol: float, max_iterations: int, method: str
) -> tuple[Tensor, ...]:
    plan, iterations, gap = _reference.solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
    wide_a, wide_b = a.double(), b.double()
    value = _reference.objective(cost.double(), wide_a, wide_b, tau_a, tau_b, plan)
    rows, columns = plan.sum(-1), plan.sum(-2)
    u, v = tau_a * (wide_a - rows), tau_b * (wide_b - columns)
    return plan.to(compute_dtype(cost, a, b)), u, v, value, rows.sum(-1), iterations, gap


def _shapes(
    cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, tol: float, max_iterations: int, method: str
) -> tuple[Tensor, ...]:
    """plan in the dtype of the result; u [..., M], v [..., N], value, mass and gap [...] float64; iterations int64."""
    batch, wide = cost.shape[:-2], torch.float64
    return (
        cost.new_empty(cost.shape, dtype=compute_dtype(cost, a, b)),
        cost.new_empty(a.shape, dtype=wide),
        cost.new_empty(b.shape, dtype=wide),
        cost.new_empty(batch, dtype=wide),
        cost.new_empty(batch, dtype=wide),
        cost.new_empty(batch, dtype=torch.int64),
        cost.new_empty(batch, dtype=wide),
    )


torch.library.register_fake("fedkernels::unbalanced_ot_reference")(_shapes)
if native.module is not None:
    torch.library.register_fake("fedkernels::unbalanced_ot")(_shapes)


def _solve(cost: Tensor, a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        operator = _operator(cost, a, b, options[-1])
        return operator(cost.contiguous(), a.contiguous(), b.contiguous(), *options)


def _operator(cost: Tensor, a: Tensor, b: Tensor, method: str) -> Any:
    """The compiled operator, or the reference. The CUDA kernels have no interior point, and count in 32 bits."""
    reference = torch.ops.fedkernels.unbalanced_ot_reference
    if cost.is_cuda and (method == "interior_point" or max(cost.shape[-2:]) > 2**24):
        return reference
    return native.operator("unbalanced_ot", cost, a, b) or reference


class _UnbalancedOT(torch.autograd.Function):
    """The value with its gradient by the envelope theorem, and the solver's other results without gradients.

    `setup_context` is separate from `forward`, and there is a `vmap`, so that torch.func accepts it. The vmap rule adds
    a batch dimension, which the solvers support.
    """

    @staticmethod
    def forward(
        cost: Tensor,
        a: Tensor,
        b: Tensor,
        tau_a: float,
        tau_b: float,
        tol: float,
        max_iterations: int,
        method: str,
        link: Tensor,
    ) -> tuple[Tensor, ...]:
        plan, u, v, value, mass, iterations, gap = _solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
        # A copy: of a tensor that `to` returns as it is, torch 2.11 compiles a gradient of 0.
        return value.to(plan.dtype, copy=True), iterations, gap, mass, plan, u, v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keep_missing_as_none(ctx)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[4:], inputs[-1])
        ctx.dtypes = [tensor.dtype for tensor in inputs[:3]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        *solution, link = ctx.saved_tensors
        if torch.is_grad_enabled():
            solution = [FirstOrderOnly.apply(tensor, link) for tensor in solution]
        plan, u, v = solution
        cost_dtype, a_dtype, b_dtype = ctx.dtypes
        # Not by ctx.needs_input_grad: where torch 2.14 compiles torch.func.grad, it is False for all inputs.
        return (
            (grad[..., None, None] * plan).to(cost_dtype),
            (grad[..., None] * u).to(a_dtype),
            (grad[..., None] * v).to(b_dtype),
            *(None,) * 6,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs[:3], in_dims, strict=False)
        ]
        return _UnbalancedOT.apply(*batched, *inputs[3:]), (0,) * 7


def _steps_of_a_launch(cost: Tensor, method: str) -> int:
    """The default number of steps on a GPU, which does nothing else before they end."""
    by_size = max(1000, 2**33 // (cost.shape[-2] * cost.shape[-1]))
    return min(by_size, 100_000 if method == "steepest" else 10_000)


def _link(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """It has no entries, but the graph leads from it to all three tensors: see FirstOrderOnly."""
    return cost[..., :0].flatten() + a[..., :0].flatten() + b[..., :0].flatten()


def _check(
    cost: Tensor,
    a: Tensor | float,
    b: Tensor | float,
    tau_a: float,
    tau_b: float,
    row_mask: Tensor | None,
    column_mask: Tensor | None,
    tol: float,
    max_iterations: int | None,
    method: str,
) -> tuple[Tensor, Tensor, Tensor, tuple[float, float, float, int, str]]:
    """Returns cost, a and b as tensors of matching batch shape with the masks applied, and the checked options."""
    checks.floating("cost", cost, at_least=2, layout="[..., M, N]")
    checks.not_empty("cost", cost, (-2, -1), "M or N")
    a = _masses("a", a, cost, -2)
    b = _masses("b", b, cost, -1)
    if row_mask is not None:
        padding = ~_mask("row_mask", row_mask, a, cost)
        cost, a = cost.masked_fill(padding[..., :, None], math.inf), a.masked_fill(padding, 0)
    if column_mask is not None:
        padding = ~_mask("column_mask", column_mask, b, cost)
        cost, b = cost.masked_fill(padding[..., None, :], math.inf), b.masked_fill(padding, 0)
    tau_a, tau_b = checks.positive("tau_a", tau_a), checks.positive("tau_b", tau_b)
    tol = checks.positive("tol", tol)
    checks.one_of("method", method, METHODS)
    if max_iterations is None:
        max_iterations = _steps_of_a_launch(cost, method) if cost.is_cuda else _reference.DEFAULT_MAX_ITERATIONS
    else:
        max_iterations = checks.integer("max_iterations", max_iterations, "a positive integer or None")
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be a positive integer or None, got {max_iterations}")
        max_iterations = min(max_iterations, 2**62)  # fits the operator's int64
    return cost, a, b, (tau_a, tau_b, tol, max_iterations, method)


def _masses(name: str, masses: Tensor | float, cost: Tensor, dim: int) -> Tensor:
    wanted = [*cost.shape[:-2], cost.shape[dim]]
    if not isinstance(masses, Tensor):
        mass = checks.finite(name, masses, "a torch.Tensor or a Python number")
        # Never in half precision, which is off by up to 0.4 %. The dtype of the result does not change.
        return cost.new_full(wanted, mass, dtype=torch.promote_types(cost.dtype, torch.float32))
    checks.floating(name, masses)
    checks.same_device(**{"cost": cost, name: masses})
    # A tensor with one mass instead of a row of masses is probably a mistake; a number is accepted.
    return checks.expanded(name, masses, wanted, "cost", cost, "be a number or have")


def _mask(name: str, mask: Tensor, masses: Tensor, cost: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor or None, got {given}")
    checks.dense(name, mask)
    checks.same_device(**{"cost": cost, name: mask})
    return checks.expanded(name, mask, list(masses.shape), "cost", cost)
