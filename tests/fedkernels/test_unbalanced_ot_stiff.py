"""unbalanced_ot's interior point, on stiff problems and others, its masks, optima of 0 and the plan's derivative."""

import sys

import ot
import pytest
import torch
from torch._subclasses import FakeTensorMode

from fedkernels import unbalanced_ot, unbalanced_ot_plan
from tests.fedkernels.test_unbalanced_ot import assert_certified, objective, problem, sphere

operator_module = sys.modules["fedkernels.unbalanced_ot"]  # the package's attribute of that name is the function


def spread(rows, columns, seed=0):
    """Squared distances between uniform points of the square, at most 1, and equal masses with sum 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator, dtype=torch.float64)
    y = torch.rand(columns, 2, generator=generator, dtype=torch.float64)
    cost = (x[:, None] - y).square().sum(-1)
    return cost / cost.max(), torch.full((rows,), 1 / rows).double(), torch.full((columns,), 1 / columns).double()


@pytest.mark.parametrize("tau", [1.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (13, 30), (30, 13)])
def test_the_interior_point_takes_tens_of_steps_whatever_tau_is(rows, columns, tau):
    cost, a, b = spread(rows, columns)
    plan, info = unbalanced_ot_plan(cost, a, b, tau, tau, tol=1e-8, method="interior_point")
    assert info.gap <= 1e-8
    assert info.iterations <= 30
    tight = unbalanced_ot(cost, a, b, tau, tau, tol=1e-10, method="interior_point")
    value = objective(cost, a, b, tau, tau, plan)
    assert -1e-9 <= (value - tight) / tight <= 1e-8
    assert (plan >= 0).all()
    if tau <= 1e4:
        assert (plan > 0).sum() <= 2 * (rows + columns)  # exact zeros, as an optimal plan has


@pytest.mark.cpu_only(reason="a GPU's kernel has no interior point")
@pytest.mark.parametrize("tau", [1e6, 1e10, 1e12])
def test_stiff_problems_tend_to_balanced_transport(tau):
    cost, a, b = spread(40, 30)
    plan, _ = unbalanced_ot_plan(cost, a, b, tau, tau, tol=1e-9, method="interior_point")
    balanced = ot.emd2(a.numpy(), b.numpy(), cost.numpy())
    assert (cost * plan).sum().item() == pytest.approx(balanced, rel=1e-4)
    torch.testing.assert_close(plan.sum(1), a, rtol=1e-4, atol=0)


@pytest.mark.cpu_only(reason="a GPU's kernel has no interior point")
@pytest.mark.parametrize("tau", [(1e10, 1.0), (1.0, 1e10)])
def test_prices_that_are_far_apart_hide_no_entry(tau):
    """Their limit is reached long before; a gap below the rounding of tau_a |a|^2 would leave 2e-3."""
    options = {"tol": 1e-12, "method": "interior_point"}
    for seed in range(5):
        given = problem(7, 5, seed=seed)
        plan, info = unbalanced_ot_plan(*given, *tau, **options)
        limit, _ = unbalanced_ot_plan(*given, *(min(each, 1e6) for each in tau), **options)
        assert info.gap <= 1e-12
        torch.testing.assert_close(plan, limit, rtol=0, atol=2e-5)


POINTS = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double()
DUPLICATES = (POINTS[:, None] - POINTS[torch.arange(20).flip(0)]).square().sum(-1)  # each point is on both sides
COSTS = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("method", ["accelerated", "interior_point"])
@pytest.mark.parametrize(
    ("cost", "a", "b", "tau"),
    [
        pytest.param(torch.zeros(20, 20).half(), 1.0, 1.0, 0.8, id="float16"),
        pytest.param(torch.zeros(1, 20).double(), 20.0, 1.0, 0.8, id="one row"),
        pytest.param(1 - torch.eye(20).double(), 1.0, 1.0, 0.8, id="costs 0 and 1"),
        pytest.param(DUPLICATES, 1.0, 1.0, 0.8, id="duplicates"),
        pytest.param(DUPLICATES, 0.05, 0.05, 1e-6, id="duplicates, a small tau"),
        pytest.param(1e-30 * COSTS, 1.0, 1.0, 0.8, id="costs that rounding hides"),
        pytest.param(COSTS, 0.0, 0.0, 0.8, id="masses 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
def test_an_optimum_of_zero_is_reached(cost, a, b, tau, method):
    """Relative to 0 no gap is small: the solver would take all its steps, and warn of a gap of 0.67 at 1e-32."""
    value = unbalanced_ot(cost, a, b, tau, tau, method=method)
    _, info = unbalanced_ot_plan(cost, a, b, tau, tau, method=method)
    rows, columns = cost.shape
    assert 0 <= value <= 2e-15 * tau / 2 * (rows * a**2 + columns * b**2)
    assert info.gap == 0
    assert info.iterations <= 1030


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_costs_and_prices_changes_nothing(scale):
    plan, info = unbalanced_ot_plan(COSTS, 1.0, 1.0, 0.8, 0.8)
    scaled_plan, scaled_info = unbalanced_ot_plan(scale * COSTS, 1.0, 1.0, 0.8 * scale, 0.8 * scale)
    torch.testing.assert_close(scaled_plan, plan, rtol=0, atol=1e-6)
    assert scaled_info.iterations == info.iterations


@pytest.mark.cpu_only(reason="a GPU's kernel goes on by itself")
def test_what_is_not_solved_in_time_goes_on_by_the_interior_point():
    cost, a, b = spread(20, 25)
    stiff = unbalanced_ot_plan(cost, a, b, 1e4, 1e4, tol=1e-8)
    assert 1000 < stiff[1].iterations <= 1030
    assert stiff[1].gap <= 1e-8
    of_zero = unbalanced_ot_plan(DUPLICATES, 0.05, 0.05, 1e4, 1e4, tol=1e-8)[1]
    assert of_zero.gap == 0
    assert 1000 < of_zero.iterations <= 1030
    batch = torch.stack([cost, problem(20, 25)[0]])  # of which only the first is stiff
    masses_a, masses_b = torch.stack([a, a + 1]), torch.stack([b, b + 1])
    plans, info = unbalanced_ot_plan(batch, 100 * masses_a, 100 * masses_b, 100.0, 100.0, tol=1e-7)
    assert (info.gap <= 1e-7).all()
    for k in range(2):
        alone = unbalanced_ot_plan(batch[k], 100 * masses_a[k], 100 * masses_b[k], 100.0, 100.0, tol=1e-7)
        torch.testing.assert_close(plans[k], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("masses", [(0.0, 0.0), (0.0, 1.0), (1e-6, 1e6), (-1.0, 2.0)])
def test_the_interior_point_starts_anywhere(masses):
    """Negative costs create mass from nothing; negative and tiny masses are legal."""
    cost = problem(6, 9, seed=3)[0] - 1
    plan, info = unbalanced_ot_plan(cost, *masses, 2.0, 3.0, tol=1e-9, method="interior_point")
    assert info.gap <= 1e-9
    assert info.iterations <= 40
    reference, _ = unbalanced_ot_plan(cost, *masses, 2.0, 3.0, tol=1e-9, max_iterations=200_000)
    full = torch.full((6,), masses[0]).double(), torch.full((9,), masses[1]).double()
    value, truth = (objective(cost, *full, 2.0, 3.0, each).item() for each in (plan, reference))
    assert value == pytest.approx(truth, rel=1e-8, abs=1e-9)


MASK = torch.tensor([True, True, False, True, True, True, False])


@pytest.mark.parametrize(
    ("case", "tau_a", "tau_b", "options"),
    [
        (lambda: problem(7, 5, seed=5, batch=(2,)), 0.8, 1.3, {}),
        (lambda: problem(7, 5, seed=6), 0.8, 1.3, {"row_mask": MASK}),
        (lambda: spread(20, 15), 100.0, 50.0, {}),
        (lambda: spread(15, 20), 1e4, 1e4, {}),
        (lambda: problem(7, 5, seed=5, batch=(2,)), 1e8, 1.0, {}),
        (lambda: problem(7, 5, seed=6), 1.0, 1e8, {"row_mask": MASK}),
    ],
)
def test_the_plan_has_its_derivative(case, tau_a, tau_b, options):
    """And so has <cost, plan>."""

    def results(cost, *masses):
        plan, _ = unbalanced_ot_plan(cost, *masses, tau_a, tau_b, tol=1e-12, method="interior_point", **options)
        return plan, (cost * plan).sum()

    inputs = [tensor.requires_grad_() for tensor in case()]
    assert torch.autograd.gradcheck(results, inputs, eps=3e-5, rtol=2e-3, atol=1e-9, fast_mode=True)


@pytest.mark.parametrize("seed", [1, 14])
def test_an_entry_that_only_the_computed_plan_has_does_not_count(seed):
    """At a gap of 1e-10 the interior point's plan has entries whose slack is 1e-5. One can double a gradient."""
    cost = sphere(128, 128, seed).requires_grad_()
    grads = []
    for tol in (1e-10, 1e-14):
        plan, _ = unbalanced_ot_plan(cost, 1.0, 1.0, 0.8, 0.8, tol=tol, method="interior_point")
        grads.append(torch.autograd.grad((cost * plan).sum(), cost)[0])
    assert (grads[0] - grads[1]).norm() <= 1e-3 * grads[1].norm()


def test_the_linear_cost_has_a_gradient_where_the_plan_is_not_unique():
    """All costs c: the optimum moves mass m in all, with c = tau (2 - m / 6 - m / 4), so d(cm)/dc = m - c 2.4 / tau."""
    level = torch.tensor(0.7).double().requires_grad_()
    cost = level.expand(6, 4)
    plan, _ = unbalanced_ot_plan(cost, 1.0, 1.0, 0.8, 0.8, tol=1e-12, method="interior_point")
    (gradient,) = torch.autograd.grad((cost * plan).sum(), level)
    assert gradient.item() == pytest.approx(2.4 * (2 - 0.7 / 0.8) - 0.7 * 2.4 / 0.8, rel=1e-5)


@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
def test_what_the_plans_gradient_is_where_there_is_none():
    cost, a, b = problem(3, 4, batch=(3,))
    cost[0], cost[1, 0, 0], cost[2, 0, 0] = 9.0, torch.nan, torch.inf
    cost.requires_grad_()
    plan, _ = unbalanced_ot_plan(cost, a, b, 0.8, 0.9, tol=1e-10, method="interior_point")
    (gradient,) = torch.autograd.grad((plan**2).sum(), cost, create_graph=True)
    assert not gradient[0].any()  # nothing is transported, before and after a small change
    assert gradient[1].isnan().all()
    assert gradient[2].isfinite().all()
    assert gradient[2, 0, 0] == 0
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient[2].sum().backward()


def test_the_default_tolerance_gives_fedu2s_gradient_to_a_few_percent():
    cost = sphere(128, 512).requires_grad_()
    grads = [
        torch.autograd.grad(unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.8, **options), cost)[0]
        for options in ({}, {"tol": 1e-12, "method": "interior_point"})
    ]
    assert (grads[0] - grads[1]).norm() <= 0.06 * grads[1].norm()


@pytest.mark.cpu_only(reason="it looks at what a GPU would run")
@pytest.mark.parametrize(
    ("size", "method", "steps"),
    [(100, "accelerated", 10_000), (4096, "accelerated", 1000), (100, "steepest", 100_000), (1024, "steepest", 8192)],
)
def test_on_cuda_a_launch_has_fewer_steps(size, method, steps):
    def given(device, max_iterations=None):
        cost = torch.empty(8, size, size, device=device)
        return operator_module._check(cost, 1.0, 1.0, 1.0, 1.0, None, None, 1e-6, max_iterations, method)[3][3]

    with FakeTensorMode():
        assert [given("cuda"), given("cuda", 200_000), given("cpu")] == [steps, 200_000, 100_000]


@pytest.mark.filterwarnings("ignore:max_iterations reached")
def test_the_interior_point_is_certified_wherever_its_steps_end():
    given = *spread(30, 20, seed=1), 1e3, 1e3
    truth = unbalanced_ot(*given, tol=1e-10, method="interior_point")
    for steps in (1, 2, 4, 8):
        plan, info = unbalanced_ot_plan(*given, tol=1e-9, max_iterations=steps, method="interior_point")
        assert info.iterations <= steps
        assert_certified(given, plan, info, truth)


@pytest.mark.parametrize("method", ["accelerated", "interior_point"])
def test_masked_problems_are_the_smaller_ones(method):
    """What lies in the padding has no influence, NaN included, and gets exact zeros."""
    sizes = [(5, 6), (3, 6), (5, 2), (1, 1)]
    costs, masses_a, masses_b = problem(5, 6, seed=7, batch=(4,))
    row_mask = torch.stack([torch.arange(5) < rows for rows, _ in sizes])
    column_mask = torch.stack([torch.arange(6) < columns for _, columns in sizes])
    inside = row_mask[:, :, None] & column_mask[:, None, :]
    padded = [
        costs.masked_fill(~inside, torch.nan).requires_grad_(),
        masses_a.masked_fill(~row_mask, torch.nan).requires_grad_(),
        masses_b.masked_fill(~column_mask, torch.inf).requires_grad_(),
    ]
    options = {"tol": 1e-10, "method": method}
    masks = {"row_mask": row_mask, "column_mask": column_mask}
    values = unbalanced_ot(*padded, 0.8, 0.9, **masks, **options)
    grads = torch.autograd.grad(values.sum(), padded)
    plans, info = unbalanced_ot_plan(*padded, 0.8, 0.9, **masks, **options)
    assert not plans[~inside].any()
    assert not grads[0][~inside].any()
    assert not grads[1][~row_mask].any()
    assert not grads[2][~column_mask].any()
    for k, (rows, columns) in enumerate(sizes):
        single = costs[k, :rows, :columns], masses_a[k, :rows], masses_b[k, :columns]
        torch.testing.assert_close(values[k], unbalanced_ot(*single, 0.8, 0.9, **options), rtol=1e-9, atol=1e-12)
        alone, alone_info = unbalanced_ot_plan(*single, 0.8, 0.9, **options)
        torch.testing.assert_close(plans[k, :rows, :columns], alone, rtol=0, atol=1e-4)
        torch.testing.assert_close(info.transported_mass[k], alone_info.transported_mass, rtol=0, atol=1e-4)
