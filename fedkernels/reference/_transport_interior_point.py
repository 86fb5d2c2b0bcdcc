"""An interior-point method for unbalanced_ot, whose number of steps hardly depends on tau.

The larger tau is beside the costs, the closer the problem is to balanced transport and the more steps do first-order
methods take: tens of thousands. This one takes 7 to 30. A step solves one system of the size of the smaller side.

It follows plan_ij slack_ij = mu to mu = 0, with slack = C - u - v > 0, by Mehrotra's predictor and corrector
(S. Mehrotra, "On the implementation of a primal-dual interior point method", SIAM J. Optimization 2, 1992). Eliminating
the plan from Newton's equations leaves, with the weights D = plan / slack,

    [ 1/tau_a + diag(D 1)   D                     ] [ du ]
    [ D'                    1/tau_b + diag(D' 1)  ] [ dv ]   =   right-hand side

and eliminating du a system in dv. The duals are feasible throughout, so that every step has a certificate.
"""

import torch
from torch import Tensor

from fedkernels.reference._transport_problem import Problem

MOST_STEPS = 100  # it takes 7 to 30; after so many, rounding keeps it from the tolerance
_FRACTION = 0.995  # of the way to the boundary that a step goes


class InteriorPoint:
    """Steps on all problems of `problem`.

    They begin at zero duals, made feasible. Those of a plan have the size of tau, and would round the slack away.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.allowed = problem.cost.isfinite()
        self.entries = self.allowed.sum((-2, -1)).clamp(min=1)
        self.v = problem.best_v(problem.best_u(torch.zeros_like(problem.b)))
        self.u = problem.best_u(self.v)
        masses_a, masses_b = problem.a.abs().sum(-1), problem.b.abs().sum(-1)
        inward = self._mean(self._slack()) / 2
        # The mean slack is 0 where all entries are tight. Any positive number of the costs' unit will do.
        inward = torch.where(inward > 0, inward, problem.tau_a * masses_a + problem.tau_b * masses_b)
        self.u = self.u - inward[:, None]
        slack = self._slack()
        # Equal products with the slack, of about the total mass, or where all masses are 0 what negative costs create.
        rows, columns = problem.cost.shape[1:]
        level = self._mean(slack)
        entry = (masses_a + masses_b) / (2 * rows * columns) + level / (problem.tau_a * columns + problem.tau_b * rows)
        self.plan = torch.where(self.allowed, (level * entry)[:, None, None] / slack, 0)

    def step(self) -> None:
        problem, plan, slack = self.problem, self.plan, self._slack()
        weights = plan / slack  # 0 where the cost is infinite
        own = 1 / problem.tau_a + weights.sum(-1)  # the block of du, which is diagonal
        lower, pivots = _factorise(weights, own, 1 / problem.tau_a, 1 / problem.tau_b)
        row_residual = problem.a - plan.sum(-1) - self.u / problem.tau_a
        column_residual = problem.b - plan.sum(-2) - self.v / problem.tau_b

        def direction(target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Newton's step in u, v, plan and slack; `target` is the step in the plan where the slack does not move."""
            right_u = row_residual - target.sum(-1)
            right_v = column_residual - target.sum(-2)
            right_v = right_v - (weights.mT @ (right_u / own)[..., None])[..., 0]
            v = _substitute(lower, pivots, right_v)
            u = (right_u - (weights @ v[..., None])[..., 0]) / own
            slack_step = -(u[:, :, None] + v[:, None, :])
            return u, v, target - weights * slack_step, slack_step

        mu = self._mean(plan * slack)
        _, _, plan_step, slack_step = direction(-plan)
        reach = self._reach(plan_step, slack_step, slack)[:, None, None]
        ahead = self._mean((plan + reach * plan_step) * (slack + reach * slack_step))
        centre = (ahead / mu) ** 3 * mu
        target = (centre[:, None, None] - plan_step * slack_step) / slack - plan
        u, v, plan_step, slack_step = direction(target)
        length = (_FRACTION * self._reach(plan_step, slack_step, slack))[:, None]
        self.u, self.v = self.u + length * u, self.v + length * v
        self.plan = torch.where(self.allowed, plan + length[..., None] * plan_step, 0)

    def sparse_plan(self) -> Tensor:
        """The plan with exact zeros where it is small beside its slack, for there it tends to 0."""
        slack = self._slack()
        least = slack * (self._mean(self.plan) / self._mean(slack))[:, None, None]
        return torch.where(self.plan > least, self.plan, 0)

    def _slack(self) -> Tensor:
        return self.problem.cost - self.u[:, :, None] - self.v[:, None, :]

    def _mean(self, entries: Tensor) -> Tensor:
        return torch.where(self.allowed, entries, 0).sum((-2, -1)) / self.entries

    def _reach(self, plan_step: Tensor, slack_step: Tensor, slack: Tensor) -> Tensor:
        """The longest step up to 1 at which plan and slack are not negative."""
        plan_room = torch.where(self.allowed & (plan_step < 0), self.plan / -plan_step, 1).amin((-2, -1))
        slack_room = torch.where(self.allowed & (slack_step < 0), slack / -slack_step, 1).amin((-2, -1))
        return torch.minimum(plan_room, slack_room).clamp(max=1)


def _factorise(weights: Tensor, own: Tensor, row_excess: float, column_excess: float) -> tuple[Tensor, Tensor]:
    """The factors of the system in dv: L [P, N, N], unit lower triangular, and the pivots p [P, N], of L diag(p) L'.

    The matrix is a graph's Laplacian plus a positive diagonal: no entry off the diagonal is positive, and each row has
    a small positive sum, its excess. Subtractions would lose an excess of 1/tau beside weights of 1e10. So the
    elimination carries the excess along, as Grassmann, Taksar and Heyman do (Operations Research 33, 1985), and
    computes each pivot as a sum of positive numbers.
    """
    links = weights.mT @ (weights / own[:, :, None])  # between columns, through the rows that they share
    excess = column_excess + (weights * (row_excess / own)[:, :, None]).sum(-2)
    columns = links.shape[-1]
    pivots = torch.empty_like(excess)
    for k in range(columns):
        below = links[:, k + 1 :, k]
        pivot = excess[:, k] + below.sum(-1)
        ratio = below / pivot[:, None]
        links[:, k + 1 :, k + 1 :] += ratio[:, :, None] * below[:, None, :]
        excess[:, k + 1 :] += ratio * excess[:, k, None]
        links[:, k + 1 :, k] = ratio
        pivots[:, k] = pivot
    return torch.eye(columns, dtype=links.dtype, device=links.device) - links.tril(-1), pivots


def _substitute(lower: Tensor, pivots: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(lower, right[..., None], upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(lower.mT, half / pivots[..., None], upper=True, unitriangular=True)[..., 0]
