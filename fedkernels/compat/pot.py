"""Functions with the names and arguments of POT's ``ot.unbalanced``, solved by ``fedkernels.unbalanced_ot``.

``from fedkernels.compat.pot import mm_unbalanced`` takes the place of ``from ot.unbalanced import mm_unbalanced`` for
the half-squared divergence. POT's iteration stops when the plan moves little, which may be far from the optimum. Here
``stopThr`` bounds the distance to the optimum.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import checks
from fedkernels.reference.unbalanced_ot import objective
from fedkernels.unbalanced_ot import unbalanced_ot_plan

__all__ = ["mm_unbalanced", "mm_unbalanced2"]

_TIGHTEST = 1e-10  # the relative gap that rounding leaves within reach


def mm_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg_m: Any,
    c: Any = None,
    reg: float = 0,
    div: str = "kl",
    G0: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-15,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """The plan of unbalanced optimal transport, as ``ot.unbalanced.mm_unbalanced`` returns it for ``div="l2"``.

    ``min over plan >= 0 of <M, plan> + reg_m1/2 |plan 1 - a|^2 + reg_m2/2 |plan' 1 - b|^2``

    Source: Chapel et al., "Unbalanced optimal transport through non-negative penalized linear regression" (2021), whose
    majorisation-minimisation POT runs. Here the same problem is solved by ``unbalanced_ot_plan`` with the method
    "interior_point".

    Args:
        a: [M] masses of the rows: a list, a numpy array or a tensor. An empty one stands for equal masses with sum 1.
        b: [N] masses of the columns, likewise.
        M: [M, N] costs, likewise.
        reg_m: positive price of a deviation from a and b, or a pair of prices.
        c: has no influence, as in POT where reg is 0.
        reg: must be 0: there is no regularised form.
        div: must be "l2". POT's default "kl" is another problem, which is not solved here.
        G0: has no influence. POT starts there and keeps its zeros; here an infinite cost forbids a pair.
        numItermax: has no influence, because the number of steps is between 7 and 30.
        stopThr: duality gap at which the solver stops, relative to the value. Below 1e-10 it counts as 1e-10, 0 too.
        verbose: prints the number of steps and the gap.
        log: returns the plan and a dictionary.

    Returns:
        The plan [M, N], a tensor where a, b or M is one, else a numpy array; float64 where one of them is float64, else
        float32. With ``log``, also a dictionary with POT's keys: "cost" (``<M, plan>``), "total_cost" (the objective),
        "G" and "err", lists of one entry as there is one iterate: the plan, and the gap. "iterations" and "gap" are
        numbers.

        Differentiable once in a, b and M where these are tensors, as ``unbalanced_ot_plan`` is: the plan, "cost" and
        "total_cost", which takes no solve of a system. POT differentiates through its iterations instead.

    Raises:
        NotImplementedError: div is "kl", or reg is not 0.
        TypeError, ValueError: as ``unbalanced_ot``; reg_m requires a gradient, which it does not get.
    """
    _check_form(reg, div)
    cost = _floating("M", M, torch.float64)
    checks.floating("M", cost, ndim=2, layout="[M, N]")
    checks.not_empty("M", cost, (0, 1), "M or N")
    rows = _masses("a", a, cost, 0)
    columns = _masses("b", b, cost, 1)
    price_a, price_b = _prices(reg_m)
    with warnings.catch_warnings():
        # POT returns a plan of zeros in silence.
        warnings.filterwarnings("ignore", message="the optimum transports nothing")
        tol = max(checks.positive("stopThr", stopThr or _TIGHTEST), _TIGHTEST)
        plan, info = unbalanced_ot_plan(cost, rows, columns, price_a, price_b, tol=tol, method="interior_point")
    gap = float(info.gap)
    if verbose:
        print(f"{int(info.iterations)} steps to a relative gap of {gap:.1e}")
    linear = (cost.where(plan > 0, 0) * plan).sum()  # a forbidden entry has cost inf and mass 0
    # By the envelope theorem the optimum's gradient is that with the plan held fixed.
    total = objective(cost, rows, columns, price_a, price_b, plan.detach())
    results: list[Any] = [plan, linear, total]
    if not any(isinstance(each, Tensor) for each in (a, b, M)):
        results = [each.numpy()[()] for each in results]  # numbers for arrays without dimensions
    plan, linear, total = results
    facts = {"cost": linear, "total_cost": total, "G": [plan], "err": [gap]}
    return (plan, {**facts, "iterations": int(info.iterations), "gap": gap}) if log else plan


def mm_unbalanced2(
    a: Any,
    b: Any,
    M: Any,
    reg_m: Any,
    c: Any = None,
    reg: float = 0,
    div: str = "kl",
    G0: Any = None,
    returnCost: str = "linear",
    numItermax: int = 1000,
    stopThr: float = 1e-15,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """The cost of ``mm_unbalanced``'s plan, as ``ot.unbalanced.mm_unbalanced2`` returns it for ``div="l2"``.

    Args:
        returnCost: "linear" for ``<M, plan>``, "total" for the objective. The others are ``mm_unbalanced``'s.

    Returns:
        A number, or a tensor of shape [] where a, b or M is one. With ``log``, also ``mm_unbalanced``'s dictionary.
        Differentiable as said there. For "linear" the backward pass solves a system of M + N equations.
    """
    checks.one_of("returnCost", returnCost, ("linear", "total"))
    _, facts = mm_unbalanced(a, b, M, reg_m, c, reg, div, G0, numItermax, stopThr, verbose, log=True)
    value = facts["cost" if returnCost == "linear" else "total_cost"]
    return (value, facts) if log else value


def _check_form(reg: float, div: str) -> None:
    if not isinstance(div, str) or div.lower() not in ("kl", "l2"):
        raise ValueError(f"div must be 'l2', got {checks.short(div)}")
    if div.lower() == "kl":
        raise NotImplementedError(
            "div='kl', POT's default, is another problem, which is not solved here: pass div='l2' for the half-squared "
            "divergence, or call ot.unbalanced"
        )
    if reg != 0:
        raise NotImplementedError("only the problem without regularisation is solved here: leave reg = 0")


def _floating(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    """The values as a tensor, in `dtype` where they are a list or integers; on the CPU unless they are a tensor."""
    wanted = dtype if isinstance(values, (list, tuple)) else None
    device = values.device if isinstance(values, Tensor) else "cpu"
    if hasattr(values, "copy"):  # an array: torch refuses a reversed one, and warns of one that is only to be read
        values = values.copy()
    try:
        tensor = torch.as_tensor(values, dtype=wanted, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(values).__name__
        raise TypeError(f"{name} must be a list, an array or a tensor of numbers, got {kind}: {error}") from None
    return tensor if tensor.is_floating_point() else tensor.to(dtype)


def _masses(name: str, masses: Any, cost: Tensor, dim: int) -> Tensor:
    masses = _floating(name, masses, cost.dtype).to(cost.device)
    if masses.numel() == 0:
        return cost.new_full((cost.shape[dim],), 1 / cost.shape[dim])
    if list(masses.shape) != [cost.shape[dim]]:
        raise ValueError(f"{name} must have shape [{cost.shape[dim]}] or be empty, got {list(masses.shape)}")
    return masses


def _prices(reg_m: Any) -> tuple[float, float]:
    parts = reg_m if isinstance(reg_m, (list, tuple)) else [reg_m]
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        raise ValueError("reg_m gets no gradient here: pass numbers, or reg_m.detach()")
    numbers = (torch.as_tensor(part, dtype=torch.float64, device="cpu").flatten() for part in parts)
    prices = [price for each in numbers for price in each.tolist()]
    if len(prices) not in (1, 2):
        raise ValueError(f"reg_m must be a number or a pair of numbers, got {len(prices)} numbers")
    first, last = prices[0], prices[-1]
    return checks.positive("reg_m", first), checks.positive("reg_m", last)
