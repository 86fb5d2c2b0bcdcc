"""csrc/cuda/unbalanced_ot.cu against the reference: by one block up to 128 x 128, by several beyond.

What is compared: plan, value, duals, certificate and number of iterations.
"""

import pytest
import torch

from fedkernels.reference import unbalanced_ot as reference
from tests.cuda_on_cpu.planted_faults import OF_ORDERS, number_of

WIDE = torch.float64
TEAM = (3, 20, 130), torch.float32, (1e-3, 40)
BLOCKS = (2, 100, 97), WIDE, (1e-4, 20)
TEAMS = [{"multiprocessors": 1}, {"multiprocessors": 3}]  # one team for three problems, and two teams


def problem(batch, rows, columns, seed=0, dtype=WIDE):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(batch, rows, columns, generator=generator, dtype=WIDE) * 3
    a = torch.rand(batch, rows, generator=generator, dtype=WIDE) + 0.5
    b = torch.rand(batch, columns, generator=generator, dtype=WIDE) + 0.5
    return cost.to(dtype), a.to(dtype), b.to(dtype)


def solve(bindings, cost, a, b, tau_a, tau_b, tol, max_iterations=100_000, method="accelerated", **device):
    """Plan, u, v, value, mass, iterations and gap."""
    operator = torch.ops.fedkernels.unbalanced_ot.default
    return bindings.results(operator, cost, a, b, tau_a, tau_b, tol, max_iterations, method, **device)


def check(found, cost, a, b, tau_a, tau_b, tol, max_iterations=100_000, method="accelerated"):
    plan, u, v, value, mass, iterations, gap = found
    true_plan, true_iterations, _ = reference.solve(cost, a, b, tau_a, tau_b, tol, max_iterations, method)
    true_value = reference.objective(cost.double(), a.double(), b.double(), tau_a, tau_b, true_plan)
    assert ((iterations - true_iterations).abs() <= 10).all()  # rounding may move the end by one check
    torch.testing.assert_close(value, true_value, rtol=2 * tol, atol=1e-12)
    torch.testing.assert_close(plan.double(), true_plan, rtol=0, atol=10 * tol**0.5)
    assert (gap <= tol).all() or max_iterations < 100_000
    # What is told of the plan is true of it.
    slack = 1e-6 if plan.dtype == torch.float32 else 1e-12
    wide = plan.double()
    torch.testing.assert_close(
        value, reference.objective(cost.double(), a.double(), b.double(), tau_a, tau_b, wide), rtol=slack, atol=slack
    )
    torch.testing.assert_close(u, tau_a * (a - wide.sum(-1)), rtol=slack, atol=10 * slack, check_dtype=False)
    torch.testing.assert_close(v, tau_b * (b - wide.sum(-2)), rtol=slack, atol=10 * slack, check_dtype=False)
    torch.testing.assert_close(mass, wide.sum((-2, -1)), rtol=slack, atol=10 * slack)


def check_problem(bindings, shape, dtype, options, **device):
    given, options = problem(*shape, dtype=dtype), (0.8, 0.9, *options)
    check(solve(bindings, *given, *options, **device), *given, *options)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "device"),
    [
        ((2, 1, 1), WIDE, (1e-6,), {}),
        ((2, 20, 17), torch.float32, (1e-6,), {}),
        ((2, 33, 32), WIDE, (1e-6,), {}),
        ((2, 9, 33), WIDE, (1e-6,), {}),
        ((2, 64, 64), torch.float32, (1e-6,), {}),
        ((2, 65, 70), WIDE, (1e-6,), {}),
        ((1, 128, 128), torch.float32, (1e-6,), {}),
        ((1, 127, 101), WIDE, (1e-6,), {}),
        ((2, 3, 128), WIDE, (1e-6,), {}),
        ((2, 128, 3), torch.float32, (1e-6,), {}),
        ((1, 30, 25), WIDE, (1e-12,), {}),
        # wherever the entries lie
        *((*BLOCKS, {"shared_limit": kilobytes << 10}) for kilobytes in (227, 163, 99, 48)),
        # by a team of blocks
        ((1, 129, 40), torch.float32, (1e-3,), {"multiprocessors": 1}),
        ((3, 40, 131), torch.float32, (1e-3,), {"multiprocessors": 1}),
        ((3, 5, 300), torch.float32, (1e-3,), {"multiprocessors": 1}),
        ((1, 21, 130), torch.float32, (1e-3,), {"multiprocessors": 4}),
        *((*TEAM, device) for device in TEAMS),
        *((shape, WIDE, (1e-3, 150, "steepest"), {}) for shape in ((2, 6, 5), (2, 20, 33), (2, 12, 130))),
    ],
    ids=str,
)
def test_equals_the_reference(bindings, shape, dtype, options, device):
    check_problem(bindings, shape, dtype, options, **device)


@pytest.mark.parametrize("columns", [20, 130])
def test_forbidden_hopeless_idle_and_late_problems(bindings, columns):
    cost, a, b = problem(6, 10, columns)
    cost[0, 2:4] = torch.inf
    cost[1, 3, 4] = torch.nan
    cost[2, 0, 0] = -torch.inf
    a[3, 1] = torch.inf
    cost[4] += 100
    found = solve(bindings, cost, a, b, 0.8, 0.9, 1e-6)
    plan, u, v, value, mass, iterations, gap = found
    for bad in (1, 2, 3):
        assert all(x[bad].isnan().all() for x in (plan, u, v, value, mass, gap))
        assert iterations[bad] == 0
    assert not plan[0, 2:4].any()
    assert not plan[4].any()
    assert gap[4] == 0 == mass[4]
    good = [0, 4, 5]
    check([x[good] for x in found], cost[good], a[good], b[good], 0.8, 0.9, 1e-6)
    late = solve(bindings, cost[5:], a[5:], b[5:], 0.8, 0.9, 1e-12, 7)
    check(late, cost[5:], a[5:], b[5:], 0.8, 0.9, 1e-12, 7)
    assert late[5].item() == 7
    assert late[6].item() > 1e-12


@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (20, 130)])
@pytest.mark.parametrize("scale", [0, 1e-30])
def test_an_optimum_of_zero_is_reached(bindings, rows, columns, scale):
    """By a block and by a team. Relative to 0 no gap is small: they would take all their steps."""
    cost, _, _ = problem(1, rows, columns)
    a, b = torch.full((1, rows), 1 / rows).double(), torch.full((1, columns), 1 / columns).double()
    given, options = (scale * cost, a, b), (0.8, 0.9, 1e-6, 500)
    *_, iterations, gap = found = solve(bindings, *given, *options)
    check(found, *given, *options)
    assert gap == 0
    assert iterations < 500


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "case", "devices"),
    [
        ("u and v", ((1, 20, 40), WIDE, (1e-6, 200)), [{}]),  # it might never end
        ("the turns of sums", TEAM, TEAMS),
        ("the last wait", TEAM, TEAMS),
        ("scratch of its own", TEAM, TEAMS),
        ("scratch of its own", BLOCKS, [{"shared_limit": 48 << 10}]),
    ],
)
def test_a_missing_barrier_or_shared_scratch_is_found(card, name, case, devices):
    """Only the two orders show it."""
    card.plant(number_of(next(fault for fault in OF_ORDERS if fault.family == name)))
    with pytest.raises((AssertionError, RuntimeError)):  # the latter where a barrier waits for ever
        [check_problem(card, *case, **device) for device in devices]
