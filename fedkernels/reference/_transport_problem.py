"""The problem of unbalanced_ot with its objective and its certificate.

Primal   min_{pi >= 0}  <C, pi> + tau_a/2 |pi 1 - a|^2 + tau_b/2 |pi'1 - b|^2
Dual     max_{u, v}     <a, u> - |u|^2 / (2 tau_a) + <b, v> - |v|^2 / (2 tau_b)   subject to  u_i + v_j <= C_ij

At the optimum u = tau_a (a - pi 1), v = tau_b (b - pi'1), and the gradient in pi is C - u - v.

The primal value at any plan is above the optimum, the dual value at any feasible (u, v) is below: their distance
certifies both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def objective(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, plan: Tensor) -> Tensor:
    """<C, pi> + tau_a/2 |pi 1 - a|^2 + tau_b/2 |pi'1 - b|^2, where a forbidden entry (C = inf, pi = 0) costs 0."""
    linear = torch.where(plan > 0, cost * plan, 0).sum((-2, -1))
    row_penalty = tau_a / 2 * (plan.sum(-1) - a).square().sum(-1)
    column_penalty = tau_b / 2 * (plan.sum(-2) - b).square().sum(-1)
    return linear + row_penalty + column_penalty


@dataclass(frozen=True)
class Problem:
    """P problems side by side: cost [P, M, N], a [P, M], b [P, N]."""

    cost: Tensor
    a: Tensor
    b: Tensor
    tau_a: float
    tau_b: float

    def value(self, plan: Tensor) -> Tensor:
        """The objective at each problem's plan."""
        return objective(self.cost, self.a, self.b, self.tau_a, self.tau_b, plan)

    def size(self, plan: Tensor) -> Tensor:
        """<|cost|, plan> + the penalties, which the gap is relative to."""
        return objective(self.cost.abs(), self.a, self.b, self.tau_a, self.tau_b, plan)

    def select(self, index: Tensor) -> "Problem":
        """The problems at these positions."""
        return Problem(self.cost[index], self.a[index], self.b[index], self.tau_a, self.tau_b)

    def duals(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """u = tau_a (a - pi 1) and v = tau_b (b - pi'1)."""
        return self.tau_a * (self.a - plan.sum(-1)), self.tau_b * (self.b - plan.sum(-2))

    def gradient(self, plan: Tensor) -> Tensor:
        """C - u - v; 0 at a forbidden entry, which never leaves pi = 0."""
        u, v = self.duals(plan)
        return (self.cost - u[:, :, None] - v[:, None, :]).masked_fill(self.cost.isinf(), 0)

    def curvature(self, move: Tensor) -> Tensor:
        """move' Q move = tau_a |move 1|^2 + tau_b |move' 1|^2, with Q of FedU2's Eq. 5."""
        row_part = self.tau_a * move.sum(-1).square().sum(-1)
        return row_part + self.tau_b * move.sum(-2).square().sum(-1)

    def curvature_limit(self) -> float:
        """The largest eigenvalue of Q."""
        return self.tau_a * self.cost.shape[2] + self.tau_b * self.cost.shape[1]

    def bound(self, u: Tensor, v: Tensor) -> Tensor:
        """A lower bound on the optimum: the dual value of u [P, M] and v [P, N], made feasible."""
        v_first = self._value(self.best_u(v), self.best_v(self.best_u(v)))
        u_first = self._value(self.best_u(self.best_v(u)), self.best_v(u))
        return torch.maximum(v_first, u_first)

    def best_u(self, v: Tensor) -> Tensor:
        """The u that maximises the dual for this v: its free maximum tau_a a, or the constraint."""
        return torch.minimum(self.tau_a * self.a, (self.cost - v[:, None, :]).amin(2))

    def best_v(self, u: Tensor) -> Tensor:
        return torch.minimum(self.tau_b * self.b, (self.cost - u[:, :, None]).amin(1))

    def _value(self, u: Tensor, v: Tensor) -> Tensor:
        row_part = (self.a * u - u.square() / (2 * self.tau_a)).sum(-1)
        return row_part + (self.b * v - v.square() / (2 * self.tau_b)).sum(-1)
