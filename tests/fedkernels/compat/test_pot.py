"""fedkernels.compat.pot against POT's functions of the same names and arguments."""

import functools
import inspect
import warnings

import numpy as np
import ot
import pytest
import torch

from fedkernels.compat import pot
from tests.fedkernels.refusals import refusals


def problem(rows=6, columns=5):
    """Of a size at which POT's iteration converges."""
    generator = np.random.default_rng(0)
    return generator.uniform(0.2, 1, rows), generator.uniform(0.2, 1, columns), generator.uniform(0, 2, (rows, columns))


@pytest.mark.parametrize("name", ["mm_unbalanced", "mm_unbalanced2"])
def test_the_signature_is_pots(name):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (pot, ot.unbalanced))
    assert {key: value.default for key, value in ours.items()} == {key: value.default for key, value in theirs.items()}
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("reg_m", [0.8, (0.8, 1.3), [2.0]])
def test_equals_pot(reg_m):
    a, b, cost = problem()
    with torch.device("meta"):  # by default, which arrays and lists do not follow
        plan, log = pot.mm_unbalanced(a, b.tolist(), cost, reg_m, div="l2", log=True)
    truth, pot_log = ot.unbalanced.mm_unbalanced(a, b, cost, reg_m, div="l2", log=True)
    assert isinstance(plan, np.ndarray)
    assert plan.dtype == np.float64
    np.testing.assert_allclose(plan, truth, atol=1e-5)
    assert log["total_cost"] == pytest.approx(pot_log["total_cost"], rel=1e-6)
    assert log["total_cost"] <= pot_log["total_cost"] * (1 + 1e-9)
    assert log["cost"] == pytest.approx(pot_log["cost"], rel=1e-5)
    for kind in ("linear", "total"):
        ours, theirs = (
            module.mm_unbalanced2(a, b, cost, reg_m, div="l2", returnCost=kind) for module in (pot, ot.unbalanced)
        )
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("returned", ["linear", "total", "plan"])
@pytest.mark.parametrize("reg_m", [(0.8, 1.3), 50.0])
def test_gradients_are_pots_and_finite_differences(returned, reg_m):
    """POT differentiates through its iterations. A sum of random multiples of its entries is the plan's value."""
    inputs = [torch.from_numpy(each).requires_grad_() for each in problem()]
    multiples = torch.from_numpy(np.random.default_rng(1).normal(size=(6, 5)))

    def value(module, *inputs):
        if returned == "plan":
            return (multiples * module.mm_unbalanced(*inputs, reg_m, div="l2")).sum()
        return module.mm_unbalanced2(*inputs, reg_m, div="l2", returnCost=returned)

    limits = {"eps": 1e-5, "rtol": 1e-3, "atol": 1e-9, "fast_mode": True}
    assert torch.autograd.gradcheck(functools.partial(value, pot), inputs, **limits)
    if reg_m == 50.0:
        return  # POT's iteration does not converge in time
    ours, theirs = (torch.autograd.grad(value(module, *inputs), inputs) for module in (pot, ot.unbalanced))
    for grad, pot_grad in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, pot_grad, rtol=0, atol=2e-3 * grad.abs().max().item())


def test_each_value_of_the_log_has_its_gradient():
    a, b, cost = (torch.from_numpy(each).requires_grad_() for each in problem())
    cost.data[2, 3] = torch.inf  # a forbidden pair
    plan, log = pot.mm_unbalanced(a, b, cost, 0.8, div="l2", log=True)
    for name, returned in (("cost", "linear"), ("total_cost", "total")):
        value, again = pot.mm_unbalanced2(a, b, cost, 0.8, div="l2", returnCost=returned, log=True)
        expected = torch.autograd.grad(value, [a, b, cost], retain_graph=True)
        assert all(grad.isfinite().all() and grad.any() for grad in expected)
        for each in (log[name], again[name]):
            torch.testing.assert_close(torch.autograd.grad(each, [a, b, cost], retain_graph=True), expected)
    assert torch.equal(log["G"][-1], plan)


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("dtypes", ["ddd", "fff", "fdf", "dff"])
def test_types_and_keys_of_what_is_returned_are_pots(of, dtypes):
    """`dtypes` are numpy's characters for a, b and M."""
    inputs = [of(each.astype(dtype)) for each, dtype in zip(problem(), dtypes, strict=True)]
    options = {"c": np.ones((6, 5)), "reg": 0, "G0": None, "stopThr": 0, "log": True}  # c counts only with reg
    for name in ("mm_unbalanced", "mm_unbalanced2"):
        (ours, log), (theirs, pot_log) = (
            getattr(module, name)(*inputs, 0.8, div="l2", **options) for module in (pot, ot.unbalanced)
        )
        assert (type(ours), ours.dtype, ours.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert set(log) == {*pot_log, "iterations", "gap"}
        for key, value in pot_log.items():
            assert type(log[key]) is type(value)
        assert log["G"][-1].shape == pot_log["G"][-1].shape


def test_lists_tensors_and_empty_masses():
    assert np.round(pot.mm_unbalanced([0.5, 0.5], [0.5, 0.5], [[1.0, 36.0], [9.0, 4.0]], 5, div="l2"), 2).tolist() == [
        [0.4, 0.0],
        [0.0, 0.1],
    ]
    a, _, cost = problem(4, 3)
    plan = pot.mm_unbalanced(a, [], torch.from_numpy(cost), 0.8, div="L2")
    np.testing.assert_allclose(plan.numpy(), pot.mm_unbalanced(a, np.full(3, 1 / 3), cost, 0.8, div="l2"), atol=1e-6)
    assert pot.mm_unbalanced([1.0, 1.0], torch.ones(2), [[1.0, 0.0], [0.0, 1.0]], 0.8, div="l2").dtype == torch.float64


def test_arrays_of_any_layout():
    a, b, cost = problem()
    expected = pot.mm_unbalanced(a, b, cost, 0.8, div="l2")
    cost.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reversed_plan = pot.mm_unbalanced(a[::-1], b[::-1], cost[::-1, ::-1], 0.8, div="l2")
        transposed_plan = pot.mm_unbalanced(b, a, cost.T, np.float32(0.8), div="l2", stopThr=np.float64(1e-12))
    np.testing.assert_allclose(reversed_plan[::-1, ::-1], expected, atol=1e-8)
    np.testing.assert_allclose(transposed_plan.T, expected, atol=1e-6)


def solved(**options):
    given = {"a": [0.5, 0.5], "b": [0.5, 0.5], "M": [[1.0, 2.0], [3.0, 4.0]], "reg_m": 1.0, "div": "l2"}
    return pot.mm_unbalanced(**given | options)


test_what_is_not_solved_is_named = refusals(
    (lambda: solved(div="kl"), NotImplementedError, "pass div='l2'"),
    (lambda: solved(div="tv"), ValueError, "div must be 'l2', got 'tv'"),
    (lambda: solved(reg=0.1), NotImplementedError, "without regularisation"),
    (lambda: solved(reg_m=(1.0, 2.0, 3.0)), ValueError, "reg_m must be a number or a pair of numbers, got 3"),
    (lambda: solved(reg_m=0), ValueError, "reg_m must be positive"),
    (lambda: solved(reg_m=[1.0, torch.ones((), requires_grad=True)]), ValueError, "reg_m gets no gradient here"),
    (lambda: solved(stopThr=-1.0), ValueError, "stopThr must be positive"),
    (lambda: solved(a=[1.0]), ValueError, r"a must have shape \[2\] or be empty, got \[1\]"),
    (lambda: solved(a=None), TypeError, "a must be a list, an array or a tensor of numbers, got NoneType"),
    (lambda: solved(M=[[1.0], [2.0, 3.0]]), TypeError, "M must be a list, .*, got list"),
    (lambda: solved(a=[], M=np.ones((0, 4))), ValueError, "M must not be empty in M or N"),
    (lambda: solved(M=[1.0, 2.0]), ValueError, r"M must have shape \[M, N\]"),
)
