"""POT's mm_unbalanced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkernels.drop_in._only import only_default
from fedkernels.unbalanced_ot import unbalanced_ot, unbalanced_ot_plan


def mm_unbalanced(
    a: Any,
    b: Any,
    M: Any,
    reg_m: Any,
    c: Any = None,
    reg: float = 0,
    div: str = "kl",
    G0: Any = None,
    numItermax: int | None = None,
    stopThr: float = 1e-10,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """``ot.unbalanced.mm_unbalanced`` with ``div="l2"`` and no regularisation, solved to a certified duality gap.

    The original's majorisation-minimisation stops at `numItermax` steps wherever it is. Here `stopThr` is the relative
    duality gap, `numItermax` limits the steps (None: 100,000), and a warning tells if they did not suffice.
    ``log["total_cost"]`` carries the gradient by the envelope theorem; the plan carries none.

    Args:
        a: [M] masses, or an empty list for equal ones of sum 1: NumPy array, list or tensor, as are b and M.
        b: [N] masses, likewise.
        M: [M, N] costs.
        reg_m: one price of the deviation from a and b, or a pair.
        c: must be None.
        reg: must be 0.
        div: must be "l2".
        G0: ignored: the solution does not depend on where the solver starts.
        numItermax: most steps.
        stopThr: relative duality gap.
        verbose: must be False.
        log: also return a dictionary with ``cost``, ``total_cost``, ``gap`` and ``iterations``.

    Returns:
        The plan [M, N], a NumPy array unless M is a tensor.

    Raises:
        ValueError: an option that only the original has, or what ``fedkernels.unbalanced_ot`` raises.
    """
    original = "ot.unbalanced.mm_unbalanced"
    only_default(original, reg=(reg, 0), div=(div.lower(), "l2"), verbose=(verbose, False))
    if c is not None:
        raise ValueError(f"c must be None, which alone is supported here: use {original} for others")
    costs = M if isinstance(M, Tensor) else torch.as_tensor(M, dtype=torch.float64)
    of_rows, of_columns = (_masses(masses, costs, size) for masses, size in zip((a, b), costs.shape, strict=True))
    prices = list(reg_m) if isinstance(reg_m, (Sequence, Tensor)) or hasattr(reg_m, "__len__") else [reg_m]
    tau_a, tau_b = float(prices[0]), float(prices[-1])
    options: dict[str, Any] = {"tol": stopThr, "max_iterations": numItermax}
    plan, info = unbalanced_ot_plan(costs, of_rows, of_columns, tau_a, tau_b, **options)
    result = plan if isinstance(M, Tensor) else plan.numpy()
    if not log:
        return result
    total = unbalanced_ot(costs, of_rows, of_columns, tau_a, tau_b, **options)
    facts: dict[str, Any] = {
        "cost": (plan * costs).sum().detach(),
        "total_cost": total,
        "gap": info.gap,
        "iterations": info.iterations,
    }
    if not isinstance(M, Tensor):
        facts = {name: value.item() for name, value in facts.items()}
    return result, facts


def _masses(masses: Any, costs: Tensor, size: int) -> Tensor:
    if len(masses) == 0:
        return costs.new_full((size,), 1 / size)
    return torch.as_tensor(masses, dtype=costs.dtype, device=costs.device)
