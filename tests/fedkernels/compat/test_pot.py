"""fedkernels.compat.pot against POT's functions of the same names and arguments."""

import inspect

import numpy as np
import ot
import pytest
import torch

from fedkernels.compat import pot


def problem(rows=12, columns=9, seed=0):
    generator = np.random.default_rng(seed)
    return generator.uniform(0.2, 1, rows), generator.uniform(0.2, 1, columns), generator.uniform(0, 2, (rows, columns))


@pytest.mark.parametrize("name", ["mm_unbalanced", "mm_unbalanced2"])
def test_the_signature_is_pots(name):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (pot, ot.unbalanced))
    assert {key: value.default for key, value in ours.items()} == {key: value.default for key, value in theirs.items()}
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("reg_m", [0.8, (0.8, 1.3), [2.0]])
def test_equals_pot(reg_m):
    a, b, cost = problem()
    plan, log = pot.mm_unbalanced(a, b, cost, reg_m, div="l2", log=True)
    truth, pot_log = ot.unbalanced.mm_unbalanced(a, b, cost, reg_m, div="l2", numItermax=200_000, log=True)
    assert isinstance(plan, np.ndarray)
    assert plan.dtype == np.float64
    np.testing.assert_allclose(plan, truth, atol=1e-4)
    assert log["total_cost"] == pytest.approx(pot_log["total_cost"], rel=1e-6)
    assert log["total_cost"] <= pot_log["total_cost"] * (1 + 1e-9)
    assert log["cost"] == pytest.approx(pot_log["cost"], rel=1e-3)
    for kind in ("linear", "total"):
        ours, theirs = (
            module.mm_unbalanced2(a, b, cost, reg_m, div="l2", returnCost=kind) for module in (pot, ot.unbalanced)
        )
        assert ours == pytest.approx(theirs, rel=2e-2)  # POT stops after 1000 iterations


def test_a_stiff_problem_of_which_pot_stops_at_a_larger_value():
    generator = np.random.default_rng(0)
    cost = ot.dist(generator.uniform(size=(100, 2)), generator.uniform(size=(100, 2)))
    a = np.full(100, 0.01)
    _, log = pot.mm_unbalanced(a, a, cost, 1e4, div="l2", log=True)
    _, pot_log = ot.unbalanced.mm_unbalanced(a, a, cost, 1e4, div="l2", log=True)
    assert log["gap"] <= 1e-10
    assert log["iterations"] <= 30
    assert log["total_cost"] < pot_log["total_cost"]


def test_lists_tensors_and_empty_masses():
    assert np.round(pot.mm_unbalanced([0.5, 0.5], [0.5, 0.5], [[1.0, 36.0], [9.0, 4.0]], 5, div="l2"), 2).tolist() == [
        [0.4, 0.0],
        [0.0, 0.1],
    ]
    a, b, cost = (torch.from_numpy(each) for each in problem(4, 3))
    plan = pot.mm_unbalanced(a.float(), [], cost.float(), 0.8, div="L2")
    assert plan.dtype == torch.float32
    expected = pot.mm_unbalanced(
        a.float().numpy(), np.full(3, 1 / 3, dtype="float32"), cost.float().numpy(), 0.8, div="l2"
    )
    np.testing.assert_allclose(plan.numpy(), expected, atol=1e-6)
    value, log = pot.mm_unbalanced2(a, b, cost, 0.8, div="l2", log=True)
    assert value.shape == ()
    assert log["G"].shape == (4, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, NotImplementedError, "pass div='l2'"),
        ({"div": "tv"}, ValueError, "div must be 'l2', got 'tv'"),
        ({"div": "l2", "reg": 0.1}, NotImplementedError, "without regularisation"),
        ({"div": "l2", "reg_m": (1.0, 2.0, 3.0)}, ValueError, "reg_m must be a number or a pair of numbers, got 3"),
        ({"div": "l2", "reg_m": 0}, ValueError, "reg_m must be positive"),
        ({"div": "l2", "a": [1.0]}, ValueError, r"a must have shape \[2\] or be empty, got \[1\]"),
        ({"div": "l2", "M": [1.0, 2.0]}, ValueError, r"M must have shape \[M, N\]"),
    ],
)
def test_what_is_not_solved_is_named(options, error, message):
    arguments = {"a": [0.5, 0.5], "b": [0.5, 0.5], "M": [[1.0, 2.0], [3.0, 4.0]], "reg_m": 1.0, **options}
    with pytest.raises(error, match=message):
        pot.mm_unbalanced(**arguments)
