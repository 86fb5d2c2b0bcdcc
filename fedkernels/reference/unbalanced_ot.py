"""Unbalanced optimal transport with half-squared marginal penalties (FedU2, Eq. 4), in plain PyTorch, in float64.

_transport_problem.py holds the problem, its dual and its certificate. The quadratic sees the plan pi only through its
row and column sums, so a step of the first-order methods reads and writes the M x N entries and nothing larger.

The primal value at any plan is above the optimum, the dual value at any feasible (u, v) is below: their distance
certifies both. It is taken relative to <|C|, pi> + the penalties, which is the primal value itself where C >= 0.

u = tau_a (a - pi 1) is rounded by eps tau_a a, and so is the dual value by 2 eps (tau_a/2 |a|^2 + tau_b/2 |b|^2). In
brackets is the value of pi = 0. A distance below 8 eps times this value counts as 0: else an optimum of 0 would never
be reached, for no distance is small relative to it. The interior point's duals are no such differences: while it runs,
only a distance below 8 eps times what it is relative to counts as 0, unless that itself is hidden by rounding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype
from fedkernels.reference._transport_interior_point import MOST_STEPS as INTERIOR_STEPS
from fedkernels.reference._transport_interior_point import InteriorPoint
from fedkernels.reference._transport_problem import Problem, objective

DEFAULT_MAX_ITERATIONS = 100_000
_CHECK_EVERY = 10  # the certificate costs about as much as four steps
_LEAST_PATIENCE = 1000
_ROUNDING = 8 * torch.finfo(torch.float64).eps


class TransportInfo(NamedTuple):
    """How a plan was reached. Every field has the batch shape [...] of the cost."""

    iterations: Tensor  # int64: steps of the solver, rejected step lengths included
    gap: Tensor  # float64: duality gap relative to <|cost|, plan> + penalties, 0 where rounding hides it
    transported_mass: Tensor  # float64: the sum of the plan's entries


def unbalanced_ot(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    tau_a: float,
    tau_b: float,
    *,
    tol: float = 1e-7,
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
    tol: float = 1e-7,
    max_iterations: int = DEFAULT_MAX_ITERATIONS,
    method: str = "accelerated",
) -> tuple[Tensor, TransportInfo]:
    """The same problem -> (plan [..., M, N], info)."""
    plan, iterations, gap = solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
    return plan.to(compute_dtype(cost, a, b)), TransportInfo(iterations, gap, plan.sum((-2, -1)))


@torch.no_grad()
def solve(
    cost: Tensor, a: Tensor, b: Tensor, tau_a: float, tau_b: float, tol: float, max_iterations: int, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> plan [..., M, N] in float64, iterations [...], relative gap [...].

    All problems of the batch step together; one that is solved stays as it is. "accelerated" hands the problems that
    it has not solved in time to the interior point, whose number of steps does not grow with tau.
    """
    batch, (rows, columns) = cost.shape[:-2], cost.shape[-2:]
    problem = Problem(
        cost.double().reshape(-1, rows, columns),
        a.double().reshape(-1, rows),
        b.double().reshape(-1, columns),
        tau_a,
        tau_b,
    )
    best = _Best.start(problem)
    if method == "steepest":
        best.advance(_Steepest(problem), tol, max_iterations)
    else:
        accelerated = _Accelerated(problem)
        if method == "accelerated":
            best.advance(accelerated, tol, min(max_iterations, patience(rows, columns)))
        late = (best.gap > tol).nonzero()[:, 0]
        if len(late) and best.steps < max_iterations:
            rest = best.select(late)
            rest.advance_interior(tol, max_iterations)
            best.replace(late, rest)
        best.advance(accelerated, tol, max_iterations)  # only where rounding has stopped the interior point
    return best.plan.reshape(cost.shape), best.iterations.reshape(batch), best.gap.reshape(batch)


def patience(rows: int, columns: int) -> int:
    """The steps of "accelerated" after which the interior point takes over: about as much work as it then needs."""
    return max(_LEAST_PATIENCE, rows * columns * min(rows, columns) // (16 * (rows + columns)))


@dataclass
class _Best:
    """The best plan of each problem so far, with its certificate."""

    problem: Problem
    plan: Tensor  # [P, M, N]
    value: Tensor  # [P]: of the plan
    bound: Tensor  # [P]: the largest lower bound on the optimum
    gap: Tensor  # [P]
    iterations: Tensor  # [P]
    rounding: Tensor  # [P]: a distance between value and bound that counts as 0
    steps: int = 0  # taken with all problems together

    @classmethod
    def start(cls, problem: Problem) -> "_Best":
        """The plan 0, with gap 0 where it is optimal, and NaN where the problem has no solution."""
        plan = torch.zeros_like(problem.cost)
        value = problem.value(plan)
        gap = torch.full_like(value, torch.inf)
        # Where no entry has a negative gradient at pi = 0, pi = 0 is optimal.
        descent = problem.tau_a * problem.a[:, :, None] + problem.tau_b * problem.b[:, None, :] - problem.cost
        gap[descent.amax((-2, -1)) <= 0] = 0
        # cost = -inf has no minimum; cost = inf forbids an entry.
        hopeless = (problem.cost.isnan() | problem.cost.isneginf()).any(-1).any(-1)
        hopeless |= ~(problem.a.isfinite().all(-1) & problem.b.isfinite().all(-1))
        plan[hopeless] = torch.nan
        gap[hopeless] = torch.nan
        iterations = torch.zeros(value.shape, dtype=torch.int64, device=value.device)
        return cls(problem, plan, value, torch.full_like(value, -torch.inf), gap, iterations, _ROUNDING * value)

    def advance(self, method: "_Accelerated | _Steepest", tol: float, max_iterations: int) -> None:
        """Steps until every problem is solved to the tolerance, or there were max_iterations in all."""
        while self.steps < max_iterations and bool((self.gap > tol).any()):
            method.step()
            self.steps += 1
            if self.steps % _CHECK_EVERY == 0 or self.steps == max_iterations:
                self.offer(method.plan, *self.problem.duals(method.plan), tol)

    def advance_interior(self, tol: float, max_iterations: int) -> None:
        """The same by the interior-point method, with its limit of steps."""
        method = InteriorPoint(self.problem)
        last = min(max_iterations, self.steps + INTERIOR_STEPS)
        while self.steps < last and bool((self.gap > tol).any()):
            method.step()
            self.steps += 1
            self.offer(method.sparse_plan(), method.u, method.v, tol, exact=True)
            self.offer(method.plan, method.u, method.v, tol, exact=True)  # which is better while there is far to go
        hidden = (self.gap > tol) & (self.value - self.bound <= self.rounding)
        self.gap = torch.where(hidden, 0, self.gap)

    def offer(self, plan: Tensor, u: Tensor, v: Tensor, tol: float, exact: bool = False) -> None:
        """Takes over plan and bound where they are better, in the problems that are not solved.

        `exact`: u and v are no differences.
        """
        active = self.gap > tol
        value = self.problem.value(plan)
        improved = active & (value < self.value)
        self.plan = torch.where(improved[:, None, None], plan, self.plan)
        self.value = torch.where(improved, value, self.value)
        self.bound = torch.where(active, torch.fmax(self.bound, self.problem.bound(u, v)), self.bound)
        distance, size = self.value - self.bound, self.problem.size(self.plan)
        rounding = torch.where(size > self.rounding, _ROUNDING * size, self.rounding) if exact else self.rounding
        gap = torch.where(distance <= rounding, 0, distance / size)
        self.gap = torch.where(active, gap, self.gap)
        self.iterations[active] = self.steps

    def select(self, index: Tensor) -> "_Best":
        """The problems at these positions."""
        plan, value, bound, gap = self.plan[index], self.value[index], self.bound[index], self.gap[index]
        iterations, rounding = self.iterations[index], self.rounding[index]
        return _Best(self.problem.select(index), plan, value, bound, gap, iterations, rounding, self.steps)

    def replace(self, index: Tensor, other: "_Best") -> None:
        self.plan[index], self.value[index], self.bound[index] = other.plan, other.value, other.bound
        self.gap[index], self.iterations[index] = other.gap, other.iterations
        self.steps = other.steps


class _Accelerated:
    """FISTA (Beck and Teboulle 2009) with a backtracking line search and adaptive restart (O'Donoghue and Candes 2015).

    The step is 1 / curvature. The curvature along the way is about 1 % of the largest eigenvalue, for the optimum
    has about two entries in a row: hence a line search that also lowers it.
    """

    def __init__(self, problem: Problem) -> None:
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

    def __init__(self, problem: Problem) -> None:
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
