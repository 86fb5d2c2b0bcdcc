"""The Gram matrix of the clients' updates: 10 clients of a ResNet-18, float32 parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs
from benchmarks.parameters import model_shapes, parameters, size_of
from fedkernels import delta_gram

STACKED = "stacked mm"


def cases(quick: bool) -> tuple[Case, ...]:
    shapes = model_shapes(quick)
    return (
        Case(
            size=size_of(shapes),
            inputs=partial(parameters, shapes),
            tiny=partial(parameters, model_shapes(quick=True)),
            implementations=(
                Implementation("fedkernels.delta_gram", _ours),
                Implementation(STACKED, _stacked, note="deltas flattened into K x P, then D @ D.T"),
                Implementation("pairwise dots", _dots, note="deltas flattened, torch.dot of each pair"),
                Implementation("mm tensor by tensor", _by_tensor, note="K x p deltas of one tensor, G += D @ D.T"),
            ),
            truth=partial(_by_tensor, dtype=torch.float64),
            floor=Floor("one read of all K + 1 models: torch.sum of as many float32 in one tensor", _floor),
            bars=(Bar(faster_than=(STACKED,), times=3.0), Bar(error=1e-6), Bar(floor=2.0)),
        ),
    )


def _ours(inputs: Inputs) -> Outputs:
    return {"value": delta_gram(inputs["global"], inputs["clients"])}


def _flat_deltas(inputs: Inputs) -> list[Tensor]:
    return [
        torch.cat([(p - q).flatten() for p, q in zip(inputs["global"], client, strict=True)])
        for client in inputs["clients"]
    ]


def _stacked(inputs: Inputs) -> Outputs:
    deltas = torch.stack(_flat_deltas(inputs))
    return {"value": deltas @ deltas.T}


def _dots(inputs: Inputs) -> Outputs:
    deltas = _flat_deltas(inputs)
    gram = torch.empty(len(deltas), len(deltas))
    for i, one in enumerate(deltas):
        for j, other in enumerate(deltas[: i + 1]):
            gram[i, j] = gram[j, i] = torch.dot(one, other)
    return {"value": gram}


def _by_tensor(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    gram = torch.zeros(len(inputs["clients"]), len(inputs["clients"]), dtype=dtype)
    for p, *clients in zip(inputs["global"], *inputs["clients"], strict=True):
        deltas = (p.to(dtype) - torch.stack(clients).to(dtype)).flatten(1)
        gram += deltas @ deltas.T
    return {"value": gram}


def _floor(inputs: Inputs) -> Callable[[], object]:
    return torch.ones((len(inputs["clients"]) + 1) * sum(p.numel() for p in inputs["global"])).sum
