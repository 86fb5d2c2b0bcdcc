"""The Gram matrix of the clients' updates: 10 clients of a ResNet-18, float32 parameters."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work
from benchmarks.parameters import CLIENTS, count, model_shapes, parameters, size_of
from fedkernels import delta_gram

STACKED = "stacked mm"


def cases(quick: bool) -> tuple[Case, ...]:
    bars = (Bar(faster_than=(STACKED,), times=3.0), Bar(error=1e-6), Bar(floor=2.0))
    return (_case(model_shapes(quick), CLIENTS, bars),)


CURVE = "clients"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of clients, each with a ResNet-18."""
    shapes = model_shapes(quick)
    return {clients: _case(shapes, clients, ()) for clients in ((2, 4) if quick else (5, 10, 20))}


def _case(shapes: list[torch.Size], clients: int, bars: tuple[Bar, ...]) -> Case:
    return Case(
        size=size_of(shapes, clients),
        inputs=partial(parameters, shapes, clients),
        tiny=partial(parameters, model_shapes(quick=True), clients),
        implementations=(
            Implementation("fedkernels.delta_gram", _ours),
            Implementation(STACKED, _stacked, note="deltas flattened into K x P, then D @ D.T"),
            Implementation("pairwise dots", _dots, note="deltas flattened, torch.dot of each pair"),
            Implementation("mm tensor by tensor", _by_tensor, note="K x p deltas of one tensor, G += D @ D.T"),
        ),
        truth=_truth,
        floor=Floor("one read of all K + 1 models: torch.sum of as many float32 in one tensor", _floor),
        bars=bars,
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    shapes = model_shapes(quick)
    return tuple(
        Case(
            size=f"float32, {size_of(shapes, clients)}",
            inputs=partial(parameters, shapes, clients),
            implementations=(
                Implementation("fedkernels.delta_gram", _ours),
                Implementation(STACKED, _stacked, note="deltas flattened into K x P, then D @ D.T"),
            ),
            truth=_truth,
            work=Work(4.0 * (clients + 1) * count(shapes), "copy", "one read of K + 1 models"),
            bars=(Bar(error=1e-12),),
        )
        for clients in ((3,) if quick else (10, 100))
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
    clients, device = len(inputs["clients"]), inputs["global"][0].device
    gram = torch.zeros(clients, clients, dtype=dtype, device=device)
    for p, *versions in zip(inputs["global"], *inputs["clients"], strict=True):
        deltas = (p.to(dtype) - torch.stack(versions).to(dtype)).flatten(1)
        gram += deltas @ deltas.T
    return {"value": gram}


def _truth(inputs: Inputs) -> Outputs:
    return _by_tensor(inputs, torch.float64)


def _floor(inputs: Inputs) -> Callable[[], object]:
    return torch.ones((len(inputs["clients"]) + 1) * sum(p.numel() for p in inputs["global"])).sum
