"""unbalanced_ot against quadprog on the dual, the steps of FISTA by its formulas and the optimality conditions."""

import math
import warnings

import numpy as np
import pytest
import quadprog
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import TransportInfo, unbalanced_ot, unbalanced_ot_plan

TIGHT = 1e-11


def problem(rows, columns, seed=0, batch=(), dtype=torch.float64):
    """Costs around half the price of the masses, so that some pairs are worth it and some are not."""
    generator = torch.Generator().manual_seed(seed)
    cost = 2 * torch.rand(*batch, rows, columns, generator=generator, dtype=torch.float64)
    a = 0.2 + torch.rand(*batch, rows, generator=generator, dtype=torch.float64)
    b = 0.2 + torch.rand(*batch, columns, generator=generator, dtype=torch.float64)
    return cost.to(dtype), a.to(dtype), b.to(dtype)


def sphere(batch, d, seed=0):
    """The cost 1 - cos between random unit vectors, as the uniformity regulariser poses it."""
    generator = torch.Generator().manual_seed(seed)
    points = F.normalize(torch.randn(2, batch, d, generator=generator, dtype=torch.float64), dim=2)
    return 1 - points[0] @ points[1].T


def objective(cost, a, b, tau_a, tau_b, plan):
    rows, columns = plan.sum(-1) - a, plan.sum(-2) - b
    return (cost * plan).sum() + tau_a / 2 * rows @ rows + tau_b / 2 * columns @ columns


def assert_certified(given, plan, info, truth, rounding=1e-9):
    """The value is above the optimum by at most the gap that it claims, relative to the sum of what it adds up."""
    value, size = objective(*given, plan), objective(given[0].abs(), *given[1:], plan)
    assert -rounding * size <= value - truth <= (info.gap + rounding) * size


def dual_active_set(cost, a, b, tau_a, tau_b):
    """The optimal value and plan by quadprog on the dual, which is strictly convex; its multipliers are the plan."""
    rows, columns = cost.shape
    curvature = np.diag([1 / tau_a] * rows + [1 / tau_b] * columns)
    pairs = np.zeros((rows + columns, rows * columns))
    for i in range(rows):
        for j in range(columns):
            pairs[[i, rows + j], i * columns + j] = -1
    masses = np.concatenate([a.numpy(), b.numpy()])
    _, value, _, _, multipliers, _ = quadprog.solve_qp(curvature, masses, pairs, -cost.numpy().ravel())
    return -value, torch.from_numpy(multipliers).view(rows, columns)


SIZES = [(1, 1, 0.8, 0.8), (1, 6, 0.5, 2.0), (5, 4, 0.8, 0.8), (7, 7, 3.0, 0.6), (3, 11, 1.0, 1.5)]


@pytest.mark.parametrize(("method", "tol"), [("accelerated", TIGHT), ("interior_point", 1e-10), ("steepest", 1e-7)])
@pytest.mark.parametrize(("rows", "columns", "tau_a", "tau_b"), SIZES)
def test_equals_an_active_set_solver(rows, columns, tau_a, tau_b, method, tol):
    cost, a, b = problem(rows, columns, seed=rows)
    truth, truth_plan = dual_active_set(cost, a, b, tau_a, tau_b)
    value = unbalanced_ot(cost, a, b, tau_a, tau_b, tol=tol, method=method)
    plan, info = unbalanced_ot_plan(cost, a, b, tau_a, tau_b, tol=tol, method=method)
    assert value.item() == pytest.approx(truth, rel=2 * tol)
    torch.testing.assert_close(objective(cost, a, b, tau_a, tau_b, plan), value)
    torch.testing.assert_close(plan, truth_plan, rtol=0, atol=10 * math.sqrt(tol))
    assert (plan >= 0).all()
    assert 0 <= info.gap <= tol
    assert info.iterations <= 30 or method != "interior_point"
    torch.testing.assert_close(info.transported_mass, plan.sum())


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.integers(1, 12), st.integers(1, 12), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(-1, 1), st.integers(0, 999)
)
def test_certificate_holds_on_ragged_problems(rows, columns, tau_a, tau_b, shift, seed):
    """Negative costs included."""
    cost, a, b = problem(rows, columns, seed)
    given = cost + shift, a, b, tau_a, tau_b
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plan, info = unbalanced_ot_plan(*given, tol=1e-5)
    assert_certified(given, plan, info, dual_active_set(*given)[0])
    assert info.gap <= 1e-5


def test_takes_few_iterations_on_the_sphere():
    """FISTA with a line search needs some hundreds where the printed steepest descent needs tens of thousands."""
    cost = sphere(128, 512)
    _, info = unbalanced_ot_plan(cost, 1.0, 1.0, 0.8, 0.8, tol=1e-4)
    assert info.iterations <= 250
    assert info.transported_mass.item() / 128 == pytest.approx(0.45, abs=0.02)
    assert unbalanced_ot_plan(cost, 1.0, 1.0, 0.8, 0.8, tol=1e-6)[1].iterations <= 900


def fista(cost, a, b, tau_a, tau_b, steps):
    """The plan of one row after so many steps, rejected step lengths included, by the formulas of the papers."""
    plan = point = torch.zeros_like(cost)
    t, curvature = 1.0, tau_a + tau_b
    for _ in range(steps):
        gradient = cost + tau_a * (point.sum() - a) + tau_b * (point - b)
        trial = (point - gradient / curvature).clamp(min=0)
        move, advance = trial - point, trial - plan
        if tau_a * move.sum() ** 2 + tau_b * move @ move > curvature * move @ move:
            curvature *= 2
            continue
        curvature *= 0.9
        if move @ advance < 0:
            t, point = 1.0, trial
        else:
            t, before = (1 + math.sqrt(1 + 4 * t**2)) / 2, t
            point = trial + (before - 1) / t * advance
        plan = trial
    return plan


@pytest.mark.filterwarnings("ignore:max_iterations reached", "ignore:the optimum transports nothing")
@pytest.mark.parametrize("steps", range(1, 11))  # of which the 8th ends the momentum
def test_takes_the_steps_of_fista(steps):
    """A row whose entries all pay: the compiled operator steps on all of them from the first step on."""
    cost, b = torch.tensor([0.1, 0.2, 0.5]).double(), torch.tensor([1.0, 0.8, 1.2]).double()
    a = torch.tensor([2.0]).double()
    plan, info = unbalanced_ot_plan(cost[None], a, b, 0.8, 0.9, tol=1e-15, max_iterations=steps)
    torch.testing.assert_close(plan[0], fista(cost, a, b, 0.8, 0.9, steps), rtol=1e-12, atol=0)
    assert info.iterations == steps


def test_entries_that_look_dear_at_first_are_found():
    """The kernel steps on entries that it chooses by their cost; dear ones are needed where cheap rows are used up.

    The three problems are one batch, whose steps the reference takes together.
    """
    generator = torch.Generator().manual_seed(20)
    rows, columns = 24, 30
    column = torch.rand(columns, generator=generator).double()
    noise = 0.01 * torch.rand(rows, columns, generator=generator).double()
    a = 2 * torch.rand(rows, generator=generator).double()
    b = 2 * torch.rand(columns, generator=generator).double()
    x, y = torch.rand(rows, 1, generator=generator).double(), torch.rand(1, columns, generator=generator).double()
    unstructured = 2 * torch.rand(rows, columns, generator=generator).double()
    costs = torch.stack([column + noise, (x - y).square(), unstructured])  # first all rows want the same columns
    plans, info = unbalanced_ot_plan(costs, a, b, 0.8, 0.9, tol=1e-6)
    assert (info.gap <= 1e-6).all()
    for k in range(3):
        given = costs[k], a, b, 0.8, 0.9
        assert_certified(given, plans[k], TransportInfo(*(facts[k] for facts in info)), dual_active_set(*given)[0])


def test_a_batch_is_its_problems():
    cost, a, b = problem(5, 6, seed=7, batch=(2, 3))
    plan, info = unbalanced_ot_plan(cost, a, b, 0.8, 0.9)
    value = unbalanced_ot(cost, a, b, 0.8, 0.9)
    assert value.shape == info.gap.shape == info.iterations.shape == info.transported_mass.shape == (2, 3)
    assert len(info.iterations.unique()) > 1  # they end at different times, and each stays as it was then
    for i in range(2):
        for j in range(3):
            alone, alone_info = unbalanced_ot_plan(cost[i, j], a[i, j], b[i, j], 0.8, 0.9)
            torch.testing.assert_close(plan[i, j], alone)
            assert info.iterations[i, j] == alone_info.iterations
            torch.testing.assert_close(value[i, j], objective(cost[i, j], a[i, j], b[i, j], 0.8, 0.9, alone))
    assert unbalanced_ot(cost[:, :0], a[:, :0], b[:, :0], 0.8, 0.9).shape == (2, 0)


@pytest.mark.cpu_only(reason="it never warns")
def test_an_optimum_that_transports_nothing_warns():
    """FedU2's printed setting: squared distances of about 2 against tau (a + b) = 1.6."""
    cost = (2 * sphere(6, 512)).requires_grad_()
    a = torch.ones(6).double().requires_grad_()
    with pytest.warns(UserWarning, match="transports nothing in 1 of 1 problems"):
        value = unbalanced_ot(cost, a, 1.0, 0.8, 0.8)
    assert value.item() == pytest.approx(0.8 * 6)  # every mass is created or destroyed
    grad_cost, grad_a = torch.autograd.grad(value, [cost, a])
    assert not grad_cost.any()
    torch.testing.assert_close(grad_a, torch.full((6,), 0.8).double())
    with pytest.warns(UserWarning, match="transports nothing"):
        plan, info = unbalanced_ot_plan(cost, a, 1.0, 0.8, 0.8)
    assert not plan.any()
    assert info.iterations == info.gap == info.transported_mass == 0


@pytest.mark.cpu_only(reason="it calls by way of conftest.py")
def test_the_warning_comes_once_for_each_line_that_calls():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            unbalanced_ot(torch.full((2, 2), 9.0), 1.0, 1.0, 0.8, 0.8)
        unbalanced_ot(torch.full((2, 2), 9.0), 1.0, 1.0, 0.8, 0.8)
    assert [warning.filename for warning in caught] == [__file__] * 2


@pytest.mark.filterwarnings("ignore:max_iterations reached", "ignore:the optimum transports nothing")
@pytest.mark.parametrize("seed", [0, 1])
def test_certificate_holds_wherever_the_steps_end(seed):
    """Early in a solve the compiled operator knows few of the entries, and the certificate is that of all."""
    given = *problem(60, 50, seed), 0.8, 0.9
    truth = unbalanced_ot(*given, tol=1e-9)
    for steps in (1, 2, 5, 10, 15, 20, 30, 40, 60):
        assert_certified(given, *unbalanced_ot_plan(*given, tol=1e-9, max_iterations=steps), truth, rounding=1e-8)


def test_the_certificate_is_that_of_all_entries():
    """A certificate of the entries that the compiled operator knows would end this solve 3 % above the optimum."""
    cost = torch.tensor([[5.0, 5.0], [8.0, 3.0], [6.0, 5.0]]).double()
    a, b = torch.tensor([9.0, 1.0, 5.0]).double(), torch.tensor([7.0, 2.0]).double()
    given = cost, a, b, 1.0, 8.0
    plan, info = unbalanced_ot_plan(*given)
    assert_certified(given, plan, info, dual_active_set(*given)[0])
    assert info.gap <= 1e-4


@pytest.mark.cpu_only(reason="it never warns")
def test_exactly_at_the_threshold_nothing_moves():
    with pytest.warns(UserWarning, match="transports nothing"):
        assert unbalanced_ot(torch.full((2, 2), 2.0), 1.0, 1.0, 1.0, 1.0) == 2
    assert unbalanced_ot(torch.full((2, 2), 1.9), 1.0, 1.0, 1.0, 1.0) < 2


@pytest.mark.cpu_only(reason="it never warns")
def test_too_few_iterations_warn_and_keep_the_best():
    given = *problem(20, 20, seed=11), 0.8, 0.8
    with pytest.warns(RuntimeWarning, match=r"max_iterations reached in 1 of 1 problems at a relative gap of up to"):
        plan, info = unbalanced_ot_plan(*given, tol=1e-9, max_iterations=7)
    assert info.iterations == 7
    assert info.gap > 1e-9
    assert_certified(given, plan, info, dual_active_set(*given)[0])


def test_the_operator_refuses_a_method_that_it_does_not_know():
    with pytest.raises(RuntimeError, match="method must be accelerated, interior_point or steepest"):
        torch.ops.fedkernels.unbalanced_ot(torch.ones(2, 2), torch.ones(2), torch.ones(2), 1.0, 1.0, 1e-6, 9, "newton")


@pytest.mark.parametrize("method", ["accelerated", "steepest"])
def test_the_case_where_the_printed_step_divides_by_zero(method):
    cost = torch.tensor([[4.0, 0.0], [0.0, 4.0]]).double()
    plan, _ = unbalanced_ot_plan(cost, 1.0, 1.0, 2.0, 2.0, tol=1e-10, method=method)
    torch.testing.assert_close(plan, 1 - torch.eye(2).double(), rtol=0, atol=1e-4)
    assert unbalanced_ot(cost, 1.0, 1.0, 2.0, 2.0, tol=1e-10, method=method).abs() < 1e-8


@pytest.mark.parametrize(("method", "tol"), [("accelerated", TIGHT), ("interior_point", 1e-10), ("steepest", 1e-6)])
def test_infinite_cost_forbids_a_pair(method, tol):
    cost, a, b = problem(4, 5, seed=12)
    cost[1, 2] = cost[3] = cost[:, 0] = torch.inf
    cost.requires_grad_()
    plan, info = unbalanced_ot_plan(cost.detach(), a, b, 0.8, 0.9, tol=tol, method=method)
    assert info.gap <= tol
    assert not plan[cost.isinf()].any()
    value = unbalanced_ot(cost, a, b, 0.8, 0.9, tol=tol, method=method)
    truth, _ = dual_active_set(cost.detach().clamp(max=1e3), a, b, 0.8, 0.9)
    assert value.item() == pytest.approx(truth, rel=max(1e-9, 10 * tol))
    grad = torch.autograd.grad(value, cost)[0]
    assert not grad[cost.isinf()].any()
    assert grad.sum() > 0


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_hopeless_problem_is_nan_and_leaves_its_batch_alone(bad):
    cost, a, b = problem(4, 5, seed=13, batch=(3,))
    truth = unbalanced_ot(cost, a, b, 0.8, 0.9)
    cost[1, 2, 3] = bad
    cost.requires_grad_()
    value = unbalanced_ot(cost, a, b, 0.8, 0.9)
    assert value.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(value[[0, 2]], truth[[0, 2]])
    grad = torch.autograd.grad(value.sum(), cost)[0]
    assert grad[1].isnan().all()
    assert grad[[0, 2]].isfinite().all()
    a[2, 0] = torch.inf
    assert unbalanced_ot(cost, a, b, 0.8, 0.9).isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("masses", [(0.303, 0.7), (1e6, 1e6)])  # the latter beyond float16
def test_masses_given_as_numbers_are_not_rounded_to_half_precision(dtype, masses):
    cost = problem(4, 5, seed=14, batch=(2,))[0].to(dtype)
    value = unbalanced_ot(cost, *masses, 0.8, 0.9, tol=TIGHT)
    full = [torch.full((size,), mass).double() for size, mass in zip((4, 5), masses, strict=True)]
    truth = unbalanced_ot(cost.double(), *full, 0.8, 0.9, tol=TIGHT)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(value.double(), truth, rtol=1e-6, atol=0)
