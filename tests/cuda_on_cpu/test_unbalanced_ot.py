"""csrc/cuda/unbalanced_ot.cu against the reference: by one block up to 128 x 128, by several beyond.

What is compared: plan, value, duals, certificate and number of iterations.
"""

import ctypes

import pytest
import torch

from fedkernels.reference import unbalanced_ot as reference
from tests.cuda_on_cpu.emulation import Array, arrays, poison

WIDE = torch.float64
KERNEL = "unbalanced_ot.cu"


class Transport(ctypes.Structure):
    """struct Transport of csrc/cuda/unbalanced_ot.h."""

    _fields_ = (
        ("cost", Array),
        ("a", Array),
        ("b", Array),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "columns")),
        *((name, ctypes.c_double) for name in ("tau_a", "tau_b", "tol")),
        ("max_iterations", ctypes.c_int64),
        ("accelerated", ctypes.c_bool),
        ("plan", Array),
        *((name, ctypes.c_void_p) for name in ("u", "v", "value", "mass", "gap", "iterations")),
    )


def problem(batch, rows, columns, seed=0, dtype=WIDE):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(batch, rows, columns, generator=generator, dtype=WIDE) * 3
    a = torch.rand(batch, rows, generator=generator, dtype=WIDE) + 0.5
    b = torch.rand(batch, columns, generator=generator, dtype=WIDE) + 0.5
    return cost.to(dtype), a.to(dtype), b.to(dtype)


def solve(compiler, *given, **options):
    """Plan, u, v, value, mass, iterations and gap, as the operator returns them."""
    return solve_by(compiler.load(KERNEL), *given, **options)


def solve_by(library, cost, a, b, tau_a, tau_b, tol, max_iterations=100_000, method="accelerated", **device):
    batch, rows, columns = cost.shape

    def run(call):
        dtype = WIDE if WIDE in (cost.dtype, a.dtype, b.dtype) else torch.float32
        plan, u, v = poison(batch, rows, columns, dtype=dtype), poison(batch, rows), poison(batch, columns)
        value, mass, gap = poison(batch), poison(batch), poison(batch)
        iterations = poison(batch, dtype=torch.int64)
        transport = Transport(
            *arrays([cost, a, b]),
            *(batch, rows, columns, tau_a, tau_b, tol, max_iterations, method == "accelerated"),
            *arrays([plan]),
            *(tensor.data_ptr() for tensor in (u, v, value, mass, gap, iterations)),
        )
        memory = poison(library.ask("cuda_unbalanced_ot_words", ctypes.byref(transport)))
        call("cuda_unbalanced_ot", ctypes.byref(transport), memory, None)
        return plan, u, v, value, mass, iterations, gap

    return library.results(run, **device)


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


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (1, 1, WIDE),
        (2, 5, WIDE),
        (20, 17, torch.float32),
        (33, 32, WIDE),
        (9, 33, WIDE),
        (64, 64, torch.float32),
        (65, 70, WIDE),
        (128, 128, torch.float32),
        (127, 101, WIDE),
        (3, 128, WIDE),
        (128, 3, torch.float32),
    ],
)
def test_one_block(compiler, rows, columns, dtype):
    given = problem(2, rows, columns, dtype=dtype)
    options = (0.8, 0.9, 1e-6)
    check(solve(compiler, *given, *options), *given, *options)


@pytest.mark.parametrize("shared_limit", [227 << 10, 163 << 10, 99 << 10])
def test_wherever_the_entries_lie(compiler, shared_limit):
    given, options = problem(2, 100, 97), (0.8, 0.9, 1e-4)
    check(solve(compiler, *given, *options, shared_limit=shared_limit), *given, *options)


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "multiprocessors"), [(129, 40, 1, 1), (40, 131, 3, 1), (5, 300, 3, 1), (21, 130, 1, 4)]
)
def test_a_team_of_blocks(compiler, rows, columns, batch, multiprocessors):
    given, options = problem(batch, rows, columns, dtype=torch.float32), (0.8, 0.9, 1e-3)
    found = solve(compiler, *given, *options, multiprocessors=multiprocessors)
    check(found, *given, *options)


@pytest.mark.parametrize(("rows", "columns"), [(6, 5), (20, 33), (12, 130)])
def test_steepest_descent(compiler, rows, columns):
    given, options = problem(2, rows, columns), (0.8, 0.9, 1e-3, 150)
    check(solve(compiler, *given, *options, method="steepest"), *given, *options, "steepest")


@pytest.mark.parametrize("method", ["accelerated", "steepest"])
def test_where_the_printed_step_divides_by_zero(compiler, method):
    cost, masses = torch.tensor([[[4.0, 0.0], [0.0, 4.0]]]).double(), torch.ones(1, 2).double()
    plan = solve(compiler, cost, masses, masses, 2.0, 2.0, 1e-10, method=method)[0]
    torch.testing.assert_close(plan[0], 1 - torch.eye(2).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [20, 130])
def test_forbidden_hopeless_idle_and_late_problems(compiler, columns):
    cost, a, b = problem(6, 10, columns)
    cost[0, 2:4] = torch.inf
    cost[1, 3, 4] = torch.nan
    cost[2, 0, 0] = -torch.inf
    a[3, 1] = torch.inf
    cost[4] += 100
    found = solve(compiler, cost, a, b, 0.8, 0.9, 1e-6)
    plan, u, v, value, mass, iterations, gap = found
    for bad in (1, 2, 3):
        assert all(x[bad].isnan().all() for x in (plan, u, v, value, mass, gap))
        assert iterations[bad] == 0
    assert not plan[0, 2:4].any()
    assert not plan[4].any()
    assert gap[4] == 0 == mass[4]
    good = [0, 4, 5]
    check([x[good] for x in found], cost[good], a[good], b[good], 0.8, 0.9, 1e-6)
    late = solve(compiler, cost[5:], a[5:], b[5:], 0.8, 0.9, 1e-12, 7)
    check(late, cost[5:], a[5:], b[5:], 0.8, 0.9, 1e-12, 7)
    assert late[5].item() == 7
    assert late[6].item() > 1e-12


@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (20, 130)])
@pytest.mark.parametrize("scale", [0, 1e-30])
def test_an_optimum_of_zero_is_reached(compiler, rows, columns, scale):
    """By a block and by a team. Relative to 0 no gap is small: they would take all their steps."""
    cost, _, _ = problem(1, rows, columns)
    a, b = torch.full((1, rows), 1 / rows).double(), torch.full((1, columns), 1 / columns).double()
    given, options = (scale * cost, a, b), (0.8, 0.9, 1e-6, 500)
    *_, iterations, gap = found = solve(compiler, *given, *options)
    check(found, *given, *options)
    assert gap == 0
    assert iterations < 500


def test_tight(compiler):
    given, options = problem(1, 30, 25), (0.8, 1.1, 1e-12)
    check(solve(compiler, *given, *options), *given, *options)


@pytest.mark.nightly
def test_a_missing_barrier_is_found(compiler):
    faulty = compiler.mutant(
        KERNEL,
        "    __syncthreads();  // u and v have been read\n    for_rows([&](int i) {",
        "    for_rows([&](int i) {",
    )
    given, options = problem(1, 20, 40), (0.8, 0.9, 1e-6, 200)  # it might never end
    with pytest.raises(AssertionError):
        check(solve_by(faulty, *given, *options), *given, *options)
