"""Derivatives that unbalanced_ot's autograd needs beside the envelope theorem."""

from typing import Any

import torch
from torch import Tensor

from fedkernels.internal.autograd import keep_missing_as_none

_DAMPING = 1e-8  # of the plan's system, relative to its least diagonal block


class PlanGradient(torch.autograd.Function):
    """The plan with its derivatives in cost, a and b by the implicit function theorem.

    Where the plan is positive, cost_ij = u_i + v_j with u = tau_a (a - plan 1) and v = tau_b (b - plan' 1). Elsewhere
    it stays 0. So a small change obeys, on the positive entries,

        tau_a (dplan 1)_i + tau_b (dplan' 1)_j = tau_a da_i + tau_b db_j - dcost_ij

    which is a symmetric system K dplan = right side. With a gradient g of the plan and z = K^-1 g, the gradient in cost
    is -z, in a tau_a z 1 and in b tau_b z' 1. These two are numbers that the solution of the system finds by itself. As
    sums of z they would cancel out where tau_a and tau_b are far apart.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        plan: Tensor, u: Tensor, v: Tensor, cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, link: Tensor
    ) -> Tensor:
        return plan.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep_missing_as_none(ctx)
        plan, u, v, cost, a, b, ctx.tau_a, ctx.tau_b, link = inputs
        ctx.save_for_backward(plan, u, v, cost, link)
        ctx.dtypes = cost.dtype, a.dtype, b.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        plan, u, v, cost, link = ctx.saved_tensors
        positive = _positive(plan.double(), cost.double(), u, v, ctx.tau_a, ctx.tau_b)
        if torch.is_grad_enabled():
            positive = FirstOrderOnly.apply(positive, link)
        of_rows, of_columns, z = _solve(positive, grad.double(), ctx.tau_a, ctx.tau_b)
        of_inputs = (each.to(dtype) for each, dtype in zip((-z, of_rows, of_columns), ctx.dtypes, strict=True))
        return (None, None, None, *of_inputs, None, None, None)


def _positive(plan: Tensor, cost: Tensor, u: Tensor, v: Tensor, tau_a: float, tau_b: float) -> Tensor:
    """1 where the optimal plan is positive, 0 where it is 0, NaN where the plan is.

    The computed plan may also be positive where the optimal one is 0. There its slack, cost - u - v, is larger, or the
    plan at which all slacks are 0 is negative. One such entry too many can make a gradient twice as large.
    """
    duals = u[..., :, None] + v[..., None, :]
    slack = cost - duals
    unit = torch.where(cost.isfinite(), cost.abs() + duals.abs(), 0).mean((-2, -1), keepdim=True)
    positive = (plan > 0) & (plan * unit >= slack * plan.mean((-2, -1), keepdim=True))
    positive = torch.where(plan.isnan(), torch.nan, positive.double())
    for _ in range(2):  # in tests a third time changes nothing
        positive = torch.where(plan - _solve(positive, slack, tau_a, tau_b)[2] <= 0, 0, positive)
    return positive


def _solve(positive: Tensor, grad: Tensor, tau_a: float, tau_b: float) -> tuple[Tensor, Tensor, Tensor]:
    """tau_a z 1, tau_b z' 1 and z = K^-1 grad on the positive entries, 0 elsewhere.

    K has a row for each positive entry, but sees them only through row and column sums. So (K + d)^-1, with a small d,
    takes a system with a row for each row and column of the plan. Where the plan is not unique, K is singular. The part
    of grad that it maps to 0 is left out, as the pseudo-inverse does.
    """
    rows = positive.shape[-2]
    damping = _DAMPING * min(tau_a, tau_b)
    of_rows, of_columns = positive.sum(-1) + damping / tau_a, positive.sum(-2) + damping / tau_b
    upper = torch.cat([torch.diag_embed(of_rows), positive], -1)
    lower = torch.cat([positive.mT, torch.diag_embed(of_columns)], -1)
    factor, pivots = torch.linalg.lu_factor(torch.cat([upper, lower], -2))

    def of_sums(entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A number r for each row, one c for each column, and r + c: (K + d) z = entries has r + c = entries - d z."""
        sums = torch.cat([entries.sum(-1), entries.sum(-2)], -1)
        numbers = torch.linalg.lu_solve(factor, pivots, sums[..., None])[..., 0]
        r, c = numbers[..., :rows], numbers[..., rows:]
        return r, c, positive * (r[..., :, None] + c[..., None, :])

    seen = of_sums(positive * torch.where(positive == 0, 0, grad))[2]
    r, c, again = of_sums(seen)
    return r, c, (seen - again) / damping


class FirstOrderOnly(torch.autograd.Function):
    """Raises an error when a second derivative is asked for.

    Plan and duals depend on cost, a and b. Autograd would treat them as constants within a gradient and silently return
    a wrong second derivative. Here they depend, through `link`, on all three inputs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, link: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("unbalanced_ot has no second derivative")
