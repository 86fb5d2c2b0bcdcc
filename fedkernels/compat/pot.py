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
        c: must be None.
        reg: must be 0: there is no regularised form.
        div: must be "l2". POT's default "kl" is another problem, which is not solved here.
        G0: has no influence; POT starts there.
        numItermax: has no influence, because the number of steps is between 7 and 30.
        stopThr: duality gap at which the solver stops, relative to the value. Below 1e-10 it counts as 1e-10.
        verbose: prints the number of steps and the gap.
        log: returns the plan and a dictionary.

    Returns:
        The plan [M, N], a tensor where M is one, else a numpy array; float64 where M, a or b is float64, else float32.
        With ``log``, also a dictionary with "cost" (``<M, plan>``) and "total_cost" (the objective), as POT names them,
        and "iterations" and "gap". A plan has no gradient: ``fedkernels.unbalanced_ot`` has.

    Raises:
        NotImplementedError: div is "kl", or reg is not 0.
        TypeError, ValueError: as ``unbalanced_ot``.
    """
    _check_form(c, reg, div)
    cost = _floating(M, torch.float64)
    checks.floating("M", cost, ndim=2, layout="[M, N]")
    rows = _masses("a", a, cost, 0)
    columns = _masses("b", b, cost, 1)
    price_a, price_b = _prices(reg_m)
    with warnings.catch_warnings():
        # POT returns a plan of zeros in silence.
        warnings.filterwarnings("ignore", message="the optimum transports nothing")
        plan, info = unbalanced_ot_plan(
            cost.detach(),
            rows.detach(),
            columns.detach(),
            price_a,
            price_b,
            tol=max(checks.positive("stopThr", stopThr), _TIGHTEST),
            method="interior_point",
        )
    if verbose:
        print(f"{int(info.iterations)} steps to a relative gap of {float(info.gap):.1e}")
    result: Any = plan if isinstance(M, Tensor) else plan.numpy()
    if not log:
        return result
    linear = (cost * plan).nan_to_num(0, posinf=0).sum()  # a forbidden entry has cost inf and mass 0
    total = (
        linear
        + price_a / 2 * (plan.sum(1) - rows).square().sum()
        + price_b / 2 * (plan.sum(0) - columns).square().sum()
    )
    facts: dict[str, Any] = {"cost": linear, "total_cost": total}
    if not isinstance(M, Tensor):
        facts = {name: value.item() for name, value in facts.items()}
    return result, {**facts, "iterations": int(info.iterations), "gap": float(info.gap)}


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
        A number, or a tensor of shape [] where M is a tensor. With ``log``, also ``mm_unbalanced``'s dictionary, which
        then holds the plan as "G".
    """
    checks.one_of("returnCost", returnCost, ("linear", "total"))
    plan, facts = mm_unbalanced(a, b, M, reg_m, c, reg, div, G0, numItermax, stopThr, verbose, log=True)
    value = facts["cost" if returnCost == "linear" else "total_cost"]
    return (value, {**facts, "G": plan}) if log else value


def _check_form(c: Any, reg: float, div: str) -> None:
    if not isinstance(div, str) or div.lower() not in ("kl", "l2"):
        raise ValueError(f"div must be 'l2', got {checks.short(div)}")
    if div.lower() == "kl":
        raise NotImplementedError("div='kl' is not solved here, only the half-squared divergence: pass div='l2'")
    if reg != 0 or c is not None:
        raise NotImplementedError("only the problem without regularisation is solved here: leave reg = 0 and c = None")


def _floating(values: Any, dtype: torch.dtype) -> Tensor:
    """The values as a tensor, in `dtype` where they are a list or integers."""
    tensor = torch.as_tensor(values, dtype=dtype) if isinstance(values, (list, tuple)) else torch.as_tensor(values)
    return tensor if tensor.is_floating_point() else tensor.to(dtype)


def _masses(name: str, masses: Any, cost: Tensor, dim: int) -> Tensor:
    masses = _floating(masses, cost.dtype).to(cost.device)
    if masses.numel() == 0:
        return cost.new_full((cost.shape[dim],), 1 / cost.shape[dim])
    if list(masses.shape) != [cost.shape[dim]]:
        raise ValueError(f"{name} must have shape [{cost.shape[dim]}] or be empty, got {list(masses.shape)}")
    return masses


def _prices(reg_m: Any) -> tuple[float, float]:
    prices = torch.as_tensor(reg_m, dtype=torch.float64).flatten().tolist()
    if len(prices) not in (1, 2):
        raise ValueError(f"reg_m must be a number or a pair of numbers, got {len(prices)} numbers")
    first, last = prices[0], prices[-1]
    return checks.positive("reg_m", first), checks.positive("reg_m", last)
