"""Client weights: argmin p'Gp over the simplex, for the Gram matrix of correlated clients, float64.

Each client's update is 3 times a common direction, plus 8 directions that all share with weights of their own, plus a
part of its own, in 2048 random coordinates: the clients' cosines are 0.5 to 0.6 on average. The error is the excess of
p'Gp, relative to the least: (p'Gp - f) / f with f at the best p known (ours to 1e-13, which its optimality
conditions certify). A peer's p is put on the simplex first (negative entries to 0, sum to 1).
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.case import Bar, Case, Errors, Floor, Implementation, Inputs, Outputs
from fedkernels import client_weights

QUADPROG = "quadprog"
NNLS = "scipy NNLS"
MGDA = "torchjd MGDA, defaults"
COORDINATES = 2048


def cases(quick: bool) -> tuple[Case, ...]:
    return tuple(_case(clients) for clients in ((8,) if quick else (10, 100, 1000)))


CURVE = "clients"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of clients."""
    return {clients: _case(clients) for clients in ((4, 8) if quick else (10, 100, 1000))}


def _case(clients: int) -> Case:
    return Case(
        size=f"K = {clients}, to 1e-8",
        inputs=partial(_inputs, clients),
        tiny=partial(_inputs, 5),
        implementations=(
            Implementation("fedkernels.client_weights", _ours),
            Implementation(QUADPROG, _quadprog, package="quadprog", note="solve_qp with its constraint matrix built"),
            Implementation(NNLS, _nnls, package="scipy", note="on G's Cholesky factor and a row of ones; then scaled"),
            Implementation(
                MGDA,
                partial(_mgda, epsilon=1e-3, max_iters=100),
                package="torchjd",
                note="epsilon 1e-3, 100 iterations",
                same_result=False,
            ),
            Implementation(
                "torchjd MGDA, longer",
                partial(_mgda, epsilon=1e-9, max_iters=1000),
                package="torchjd",
                note="epsilon 1e-9, 1000 iterations",
                same_result=False,
            ),
        ),
        truth=_best,
        errors=_excess,
        floor=Floor("one product Gp (torch.mv)", _floor),
        bars=(Bar(faster_than=(QUADPROG, NNLS, MGDA), times=1.0), Bar(error=1e-8)),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    return tuple(
        Case(
            size=f"float64, K = {clients}, to 1e-8",
            inputs=partial(_inputs, clients),
            implementations=(
                Implementation("fedkernels.client_weights", _ours),
                Implementation("the same on the CPU", _ours_on_cpu, note="with the copies to it and back"),
            ),
            truth=_best,
            errors=_excess,
        )
        for clients in ((5,) if quick else (10, 100))
    )


def _inputs(clients: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    common, shared = draw(COORDINATES), draw(8, COORDINATES)
    deltas = 3 * common + draw(clients, 8) @ shared + draw(clients, COORDINATES)
    return {"gram": (deltas @ deltas.T / COORDINATES).to(device)}


def _ours(inputs: Inputs) -> Outputs:
    return {"value": client_weights(inputs["gram"])}


def _ours_on_cpu(inputs: Inputs) -> Outputs:
    return {"value": client_weights(inputs["gram"].cpu()).to(inputs["gram"].device)}


def _weights(p: Any) -> Outputs:
    p = np.maximum(p, 0)
    return {"value": torch.from_numpy(p / p.sum())}


def _quadprog(inputs: Inputs) -> Outputs:
    gram = inputs["gram"].numpy()
    clients = len(gram)
    constraints = np.concatenate([np.ones((clients, 1)), np.eye(clients)], axis=1)
    bounds = np.concatenate([np.ones(1), np.zeros(clients)])
    solve = importlib.import_module("quadprog").solve_qp
    return _weights(solve(gram, np.zeros(clients), constraints, bounds, 1)[0])


def _nnls(inputs: Inputs) -> Outputs:
    # min over q >= 0 of q'Gq + (sum(q) - 1)^2 is reached at a multiple of the p that is sought.
    gram = inputs["gram"].numpy()
    clients = len(gram)
    factor = np.linalg.cholesky(gram * (clients / np.trace(gram))).T
    matrix = np.concatenate([factor, np.ones((1, clients))])
    target = np.concatenate([np.zeros(clients), np.ones(1)])
    return _weights(importlib.import_module("scipy.optimize").nnls(matrix, target)[0])


def _mgda(inputs: Inputs, epsilon: float, max_iters: int) -> Outputs:
    weighting = importlib.import_module("torchjd.aggregation").MGDAWeighting(epsilon=epsilon, max_iters=max_iters)
    return {"value": weighting(inputs["gram"])}


def _best(inputs: Inputs) -> Outputs:
    return {"value": client_weights(inputs["gram"].cpu(), tol=1e-13)}


def _excess(outputs: Outputs, truth: Outputs, inputs: Inputs) -> Errors:
    found, least = (float(p @ inputs["gram"] @ p) for p in (outputs["value"], truth["value"]))
    return {"value": (found - least) / least}


def _floor(inputs: Inputs) -> Callable[[], object]:
    p = torch.full((len(inputs["gram"]),), 1.0 / len(inputs["gram"]), dtype=torch.float64)
    return partial(torch.mv, inputs["gram"], p)
