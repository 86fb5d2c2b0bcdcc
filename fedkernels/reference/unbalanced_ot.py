"""Unbalanced optimal transport with half-squared marginal penalties (FedU2, Eq. 4), in plain PyTorch, in float64.

Primal   min_{pi >= 0}  <C, pi> + tau_a/2 |pi 1 - a|^2 + tau_b/2 |pi'1 - b|^2
Dual     max_{u, v}     <a, u> - |u|^2 / (2 tau_a) + <b, v> - |v|^2 / (2 tau_b)   subject to  u_i + v_j <= C_ij

At the optimum u = tau_a (a - pi 1), v = tau_b (b - pi'1), and the gradient in pi is C - u - v. The quadratic sees pi
only through its row and column sums, so a step reads and writes the M x N entries and nothing larger.

The primal value at any plan is above the optimum, the dual value at any feasible (u, v) is below: their distance
certifies both. It is taken relative to <|C|, pi> + the penalties, which is the primal value itself where C >= 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype

DEFAULT_MAX_ITERATIONS = 100_000
_CHECK_EVERY = 10  # the certificate costs about as much as four steps


class TransportInfo(NamedTuple):
    """How a plan was reached. Every field has the batch shape [...] of the cost."""

    iterations: Tensor  # int64: steps of the solver, rejected step lengths included
    gap: Tensor  # float64: duality gap relative to <|cost|, plan> + penalties
    transported_mass: Tensor  # float64: the sum of the plan's entries


def unbalanced_ot(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    tau_a: float,
    tau_b: float,
    *,
    tol: float = 1e-4,
    max_iterations: int = DEFAULT_MAX_ITERATIONS,
    method: str = "accelerated",
) -> Tensor:
    """cost [..., M, N], a [..., M], b [..., N] -> the optimal value [...].

    Gradients by the envelope theorem: those of the objective with the optimal plan held fixed.
    """
    plan, _, _ = solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
    return objective(cost.double(), a.double(), b.double(), tau_a, tau_b, plan).to(compute_dtype(cost, a, b))


def unbalanced_ot_plan(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    tau_a: float,
    tau_b: float,
    *,
    tol: float = 1e-4,
    max_iterations: int = DEFAULT_MAX_ITERATIONS,
    method: str = "accelerated",
) -> tuple[Tensor, TransportInfo]:
    """The same problem -> (plan [..., M, N], info)."""
    plan, iterations, gap = solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
    return plan.to(compute_dtype(cost, a, b)), TransportInfo(iterations, gap, plan.sum((-2, -1)))


def objective(cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, plan: Tensor) -> Tensor:
    """<C, pi> + tau_a/2 |pi 1 - a|^2 + tau_b/2 |pi'1 - b|^2, where a forbidden entry (C = inf, pi = 0) costs 0."""
    linear = torch.where(plan > 0, cost * plan, 0).sum((-2, -1))
    row_penalty = tau_a / 2 * (plan.sum(-1) - a).square().sum(-1)
    column_penalty = tau_b / 2 * (plan.sum(-2) - b).square().sum(-1)
    return linear + row_penalty + column_penalty


@torch.no_grad()
def solve(
    cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, tol: float, max_iterations: int, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> plan [..., M, N] in float64, iterations [...], relative gap [...].

    All problems of the batch step together; one that is solved stays as it is.
    """
    batch, (rows, columns) = cost.shape[:-2], cost.shape[-2:]
    problem = _Problem(
        cost.double().reshape(-1, rows, columns),
        a.double().reshape(-1, rows),
        b.double().reshape(-1, columns),
        tau_a,
        tau_b,
    )
    best = torch.zeros_like(problem.cost)
    best_value = objective(problem.cost, problem.a, problem.b, tau_a, tau_b, best)
    best_bound = torch.full_like(best_value, -torch.inf)
    gap = torch.full_like(best_value, torch.inf)
    iterations = torch.zeros(best_value.shape, dtype=torch.int64, device=cost.device)

    # Where no entry has a negative gradient at pi = 0, pi = 0 is optimal.
    descent = tau_a * problem.a[:, :, None] + tau_b * problem.b[:, None, :] - problem.cost
    gap[descent.amax((-2, -1)) <= 0] = 0
    # cost = -inf has no minimum; cost = inf forbids an entry.
    hopeless = (problem.cost.isnan() | problem.cost.isneginf()).any(-1).any(-1)
    hopeless |= ~(problem.a.isfinite().all(-1) & problem.b.isfinite().all(-1))
    best[hopeless] = torch.nan
    gap[hopeless] = torch.nan

    iterate: _Accelerated | _Steepest = _Accelerated(problem) if method == "accelerated" else _Steepest(problem)
    active = gap > tol
    for iteration in range(1, max_iterations + 1):
        if not active.any():
            break
        iterate.step()
        if iteration % _CHECK_EVERY and iteration != max_iterations:
            continue
        plan = iterate.plan
        value = objective(problem.cost, problem.a, problem.b, tau_a, tau_b, plan)
        improved = active & (value < best_value)
        best = torch.where(improved[:, None, None], plan, best)
        best_value = torch.where(improved, value, best_value)
        best_bound = torch.where(active, torch.maximum(best_bound, problem.bound(plan)), best_bound)
        size = objective(problem.cost.abs(), problem.a, problem.b, tau_a, tau_b, best)
        relative = ((best_value - best_bound) / size.clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0)
        gap = torch.where(active, relative, gap)
        iterations[active] = iteration
        active = gap > tol
    return best.reshape(cost.shape), iterations.reshape(batch), gap.reshape(batch)


@dataclass(frozen=True)
class _Problem:
    """P problems side by side: cost [P, M, N], a [P, M], b [P, N]."""

    cost: Tensor
    a: Tensor
    b: Tensor
    tau_a: float
    tau_b: float

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

    def bound(self, plan: Tensor) -> Tensor:
        """A lower bound on the optimum: the dual value of the plan's u and v, made feasible."""
        u, v = self.duals(plan)
        v_first = self._value(self._best_u(v), self._best_v(self._best_u(v)))
        u_first = self._value(self._best_u(self._best_v(u)), self._best_v(u))
        return torch.maximum(v_first, u_first)

    def _best_u(self, v: Tensor) -> Tensor:
        """The u that maximises the dual for this v: its free maximum tau_a a, or the constraint."""
        return torch.minimum(self.tau_a * self.a, (self.cost - v[:, None, :]).amin(2))

    def _best_v(self, u: Tensor) -> Tensor:
        return torch.minimum(self.tau_b * self.b, (self.cost - u[:, :, None]).amin(1))

    def _value(self, u: Tensor, v: Tensor) -> Tensor:
        row_part = (self.a * u - u.square() / (2 * self.tau_a)).sum(-1)
        return row_part + (self.b * v - v.square() / (2 * self.tau_b)).sum(-1)


class _Accelerated:
    """FISTA (Beck and Teboulle 2009) with a backtracking line search and adaptive restart (O'Donoghue and Candes 2015).

    The step is 1 / curvature. The curvature along the way is about 1 % of the largest eigenvalue, for the optimum
    has about two entries in a row: hence a line search that also lowers it.
    """

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.plan = torch.zeros_like(problem.cost)
        self.point = self.plan  # the plan with momentum
        self.momentum = problem.cost.new_ones(problem.cost.shape[0])  # t_k of the paper
        self.lowest = 1e-3 * (problem.tau_a + problem.tau_b)  # only keeps a problem at rest from dividing by 0
        self.curvature = torch.full_like(self.momentum, problem.tau_a + problem.tau_b)  # of a single entry

    def step(self) -> None:
        curvature = self.curvature[:, None, None]
        trial = (self.point - self.problem.gradient(self.point) / curvature).clamp(min=0)
        move = trial - self.point
        accept = self.problem.curvature(move) <= self.curvature * move.square().sum((-2, -1))

        advance = trial - self.plan
        restart = (move * advance).sum((-2, -1)) < 0  # the momentum points uphill
        next_momentum = (1 + (1 + 4 * self.momentum.square()).sqrt()) / 2
        weight = torch.where(restart, 0, (self.momentum - 1) / next_momentum)

        where = accept[:, None, None]
        self.point = torch.where(where, trial + weight[:, None, None] * advance, self.point)
        self.plan = torch.where(where, trial, self.plan)
        self.momentum = torch.where(accept, torch.where(restart, 1, next_momentum), self.momentum)
        self.curvature = torch.where(accept, self.curvature * 0.9, self.curvature * 2).clamp(min=self.lowest)


class _Steepest:
    """FedU2's Eq. 6, pi <- max(0, pi - eta* grad) with eta* = |grad|^2 / (grad' Q grad), guarded.

    As printed it divides by zero where grad has no row and column sums, and may increase the objective, for eta*
    knows nothing of the projection. Here a vanishing denominator takes the step 1 / largest eigenvalue of Q, and a
    step that does not decrease the objective enough (Armijo) is halved.
    """

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.plan = torch.zeros_like(problem.cost)
        self.shorten = problem.cost.new_ones(problem.cost.shape[0])

    def step(self) -> None:
        gradient = self.problem.gradient(self.plan)
        square, curvature = gradient.square().sum((-2, -1)), self.problem.curvature(gradient)
        limit = self.problem.curvature_limit()
        usable = curvature > 1e-6 * limit * square
        eta = self.shorten * torch.where(usable, square / torch.where(usable, curvature, 1), 1 / limit)

        trial = (self.plan - eta[:, None, None] * gradient).clamp(min=0)
        move = trial - self.plan
        slope = (gradient * move).sum((-2, -1))
        accept = slope + self.problem.curvature(move) / 2 <= 1e-4 * slope
        self.plan = torch.where(accept[:, None, None], trial, self.plan)
        self.shorten = torch.where(accept, 1, self.shorten / 2)
