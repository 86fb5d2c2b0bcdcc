"""Unbalanced optimal transport: B representations to B uniform samples of the sphere, value and gradient in the cost.

Cost 1 - cos in d = 512, a = b = 1, tau = 0.8. Ours is solved to a certified relative gap of 1e-4. The value is the
objective at the plan found; its error is the excess over the optimum (solved to a gap of 1e-9, in float64), which
says how far each peer has come. The gradient is the plan, by the envelope theorem; POT's plan serves in the same way.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, value_and_gradients
from fedkernels import unbalanced_ot

TAU = 0.8
STIFF_TAU = 1e4
MM = "POT mm_unbalanced, numpy float64"
MM_FLUSHED = "POT mm_unbalanced, numpy float32"
MM_BACKWARD = "POT mm_unbalanced, torch float64, backward through it"
MM_TORCH = "POT mm_unbalanced, torch float64"
ITERATIONS = 1000  # POT's default; reaches an error of 3e-5 to 4e-5 at these sizes


def cases(quick: bool) -> tuple[Case, ...]:
    uniformity = tuple(_case(rows, 64 if quick else 512) for rows in ((24,) if quick else (128, 256, 512)))
    return uniformity + tuple(_stiff_case(rows) for rows in ((24,) if quick else (100, 512)))


CURVE = "rows and columns of the cost"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of rows, of which there are as many as columns."""
    return {rows: _case(rows, 64 if quick else 512) for rows in ((12, 24) if quick else (128, 256, 512))}


def _case(rows: int, width: int) -> Case:
    peers = [
        Implementation(MM, _mm, package="POT", note=f"div='l2', {ITERATIONS} iterations"),
        Implementation(MM_FLUSHED, _mm_flushed, package="POT", note="the same, denormal numbers flushed to 0"),
        Implementation(MM_BACKWARD, _mm_backward, package="POT", note="the same, in torch with autograd"),
    ]
    if rows <= 128:  # takes several seconds at larger sizes
        note = "reg=0, 300 iterations of scipy's L-BFGS-B"
        peers.append(Implementation("POT lbfgsb_unbalanced, numpy float64", _lbfgsb, package="POT", note=note))
    return Case(
        size=f"B = {rows}, d = {width}, to a gap of 1e-4",
        inputs=partial(_inputs, rows, width),
        tiny=partial(_inputs, 16, 32),
        implementations=(Implementation("fedkernels.unbalanced_ot", _ours), *peers),
        truth=_optimum,
        floor=Floor("one read of the cost and one write of the gradient (a copy of B x B)", _floor),
        bars=(Bar(faster_than=(MM, MM_FLUSHED), times=30.0), Bar(faster_than=(MM_BACKWARD,), times=100.0)),
    )


def _inputs(rows: int, width: int, device: torch.device) -> Inputs:
    return _costs((rows, width), device)


def _costs(shape: tuple[int, ...], device: torch.device) -> Inputs:
    draw = partial(torch.randn, *shape, generator=torch.Generator(device).manual_seed(0), device=device)
    z, samples = (F.normalize(draw(), dim=-1) for _ in range(2))
    return {"cost": (1 - z @ samples.mT).requires_grad_()}


def _ours(inputs: Inputs) -> Outputs:
    return value_and_gradients(unbalanced_ot(inputs["cost"], 1.0, 1.0, TAU, TAU, tol=1e-4), inputs)


def _optimum(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].detach().double().requires_grad_()
    value = unbalanced_ot(cost, 1.0, 1.0, TAU, TAU, tol=1e-9, max_iterations=10_000_000)
    return value_and_gradients(value, {"cost": cost})


def _objective(cost: Any, plan: Any) -> Any:
    """For torch's and numpy's arrays alike."""
    penalties = ((plan.sum(1) - 1) ** 2).sum() + ((plan.sum(0) - 1) ** 2).sum()
    return (cost * plan).sum() + TAU / 2 * penalties


def _from_numpy(cost: Any, plan: Any) -> Outputs:
    value = _objective(cost.astype("float64"), plan.astype("float64"))
    return {"value": torch.tensor(float(value), dtype=torch.float64), "gradient in cost": torch.from_numpy(plan)}


def _solve_mm(inputs: Inputs, dtype: str) -> Outputs:
    cost = inputs["cost"].detach().numpy().astype(dtype)
    ones = torch.ones(len(cost), dtype=getattr(torch, dtype)).numpy()
    plan = importlib.import_module("ot").unbalanced.mm_unbalanced(
        ones, ones, cost, TAU, div="l2", numItermax=ITERATIONS
    )
    return _from_numpy(cost, plan)


def _mm(inputs: Inputs) -> Outputs:
    return _solve_mm(inputs, "float64")


def _mm_flushed(inputs: Inputs) -> Outputs:
    # The entries that leave the plan shrink towards 0 and spend most of the time as denormal numbers.
    torch.set_flush_denormal(True)
    try:
        return _solve_mm(inputs, "float32")
    finally:
        torch.set_flush_denormal(False)


def _mm_backward(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].double()
    ones = torch.ones(len(cost), dtype=torch.float64)
    plan = importlib.import_module("ot").unbalanced.mm_unbalanced(
        ones, ones, cost, TAU, div="l2", numItermax=ITERATIONS
    )
    return value_and_gradients(_objective(cost, plan), inputs)


def _lbfgsb(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].detach().double().numpy()
    ones = torch.ones(len(cost), dtype=torch.float64).numpy()
    plan = importlib.import_module("ot").unbalanced.lbfgsb_unbalanced(
        ones, ones, cost, reg=0, reg_m=TAU, reg_div="l2", regm_div="l2", numItermax=300, stopThr=1e-12
    )
    return _from_numpy(cost, plan)


# Stiff problems: close to balanced transport


def _stiff_case(rows: int) -> Case:
    return Case(
        size=f"{rows} x {rows} points of the square, tau = 10,000, to a gap of 1e-6",
        inputs=partial(_points, rows),
        tiny=partial(_points, 16),
        implementations=(
            Implementation("fedkernels.unbalanced_ot", _ours_stiff, note='method="interior_point"'),
            Implementation("fedkernels.unbalanced_ot, default method", _ours_stiff_by_default),
            Implementation(
                MM,
                _mm_stiff,
                package="POT",
                note=f"div='l2', {ITERATIONS} iterations: ten times the optimum",
                same_result=False,
            ),
        ),
        truth=_stiff_optimum,
        bars=(Bar(faster_than=(MM,), times=1.0), Bar(error=2e-6)),
    )


def _points(rows: int, device: torch.device) -> Inputs:
    """Squared distances between uniform points of the unit square, divided by the largest; each mass is 1 / rows."""
    draw = partial(torch.rand, rows, 2, generator=torch.Generator(device).manual_seed(0), device=device)
    x, y = draw(dtype=torch.float64), draw(dtype=torch.float64)
    cost = (x[:, None] - y).square().sum(-1)
    return {"cost": (cost / cost.max()).requires_grad_()}


def _solve_stiff(inputs: Inputs, tol: float, method: str) -> Outputs:
    mass = 1 / len(inputs["cost"])
    value = unbalanced_ot(inputs["cost"], mass, mass, STIFF_TAU, STIFF_TAU, tol=tol, method=method)
    return {"value": value.detach()}


def _ours_stiff(inputs: Inputs) -> Outputs:
    return _solve_stiff(inputs, 1e-6, "interior_point")


def _ours_stiff_by_default(inputs: Inputs) -> Outputs:
    return _solve_stiff(inputs, 1e-6, "accelerated")


def _stiff_optimum(inputs: Inputs) -> Outputs:
    return _solve_stiff(inputs, 1e-10, "interior_point")


def _mm_stiff(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].detach().numpy()
    masses = torch.full((len(cost),), 1 / len(cost), dtype=torch.float64).numpy()
    plan = importlib.import_module("ot").unbalanced.mm_unbalanced(
        masses, masses, cost, STIFF_TAU, div="l2", numItermax=ITERATIONS
    )
    penalties = ((plan.sum(1) - masses) ** 2).sum() + ((plan.sum(0) - masses) ** 2).sum()
    return {"value": torch.tensor((cost * plan).sum() + STIFF_TAU / 2 * penalties, dtype=torch.float64)}


# Batches on a GPU


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    problems, rows, width = (2, 12, 8) if quick else (132, 128, 512)
    note = f"one problem of the batch, times their number; float64, div='l2', {ITERATIONS} iterations"
    return (
        Case(
            size=f"float32, {problems} problems, B = {rows}, d = {width}, to a gap of 1e-4",
            inputs=partial(_costs, (problems, rows, width)),
            implementations=(
                Implementation("fedkernels.unbalanced_ot", _ours_of_batch),
                Implementation(
                    MM_TORCH, _mm_of_first, package="POT", note=note, scale=lambda inputs: len(inputs["cost"])
                ),
            ),
            truth=_optimum_of_batch,
            bars=(Bar(milliseconds=2.0), Bar(faster_than=(MM_TORCH,), times=100.0)),
        ),
    )


def _ours_of_batch(inputs: Inputs) -> Outputs:
    value = unbalanced_ot(inputs["cost"], 1.0, 1.0, TAU, TAU, tol=1e-4)
    gradient = value_and_gradients(value.sum(), inputs)
    return gradient | {"value": value.detach(), "value of the first": value[0].detach()}


def _mm_of_first(inputs: Inputs) -> Outputs:
    cost = inputs["cost"][0].detach().double()
    ones = torch.ones(len(cost), dtype=torch.float64, device=cost.device)
    plan = importlib.import_module("ot").unbalanced.mm_unbalanced(
        ones, ones, cost, TAU, div="l2", numItermax=ITERATIONS
    )
    return {"value of the first": _objective(cost, plan)}


def _optimum_of_batch(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].detach().cpu().double()
    value = unbalanced_ot(cost, 1.0, 1.0, TAU, TAU, tol=1e-9, max_iterations=10_000_000)
    return {"value": value, "value of the first": value[0]}


def _floor(inputs: Inputs) -> Callable[[], None]:
    cost: Tensor = inputs["cost"].detach()
    plan = torch.empty_like(cost)

    def read_and_write() -> None:
        plan.copy_(cost)

    return read_and_write
