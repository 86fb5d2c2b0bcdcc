"""The server's step along the clients' weighted updates, in place: 10 clients of a ResNet-18, float32 parameters."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.case import Case, Floor, Implementation, Inputs, Outputs, Work
from benchmarks.parameters import CLIENTS, count, model_shapes, parameters, size_of
from fedkernels import apply_deltas

WEIGHTS = [2 * (k + 1) / (CLIENTS * (CLIENTS + 1)) for k in range(CLIENTS)]  # sum 1
OURS = "fedkernels.apply_deltas"


def cases(quick: bool) -> tuple[Case, ...]:
    shapes = model_shapes(quick)
    return (
        Case(
            size=size_of(shapes),
            inputs=partial(_inputs, shapes),
            tiny=partial(_inputs, model_shapes(quick=True)),
            implementations=(
                Implementation(OURS, _ours),
                Implementation("eager loop of p.add_", _loop, note="p.mul_(1 - sum w), then p.add_(client, alpha=w)"),
                Implementation("torch._foreach_add_", _foreach, note="the same over lists, client by client"),
            ),
            truth=_truth,
            floor=Floor(
                "one read of K models (torch.sum of as many float32 in one tensor) and one copy of a model", _floor
            ),
            reset=_reset,
        ),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    shapes = model_shapes(quick)
    return (
        Case(
            size=f"float32, {size_of(shapes)}",
            inputs=partial(_inputs, shapes),
            implementations=(
                Implementation(OURS, _ours),
                Implementation("torch._foreach_add_", _foreach, note="p *= 1 - sum w, then p += w client, over lists"),
            ),
            truth=_truth,
            work=Work(4.0 * (CLIENTS + 2) * count(shapes), "copy", "one read of K + 1 models and one write of one"),
            reset=_reset,
        ),
    )


def _inputs(shapes: list[torch.Size], device: torch.device) -> Inputs:
    inputs = parameters(shapes, CLIENTS, device)
    return {**inputs, "first": [p.clone() for p in inputs["global"]]}


def _reset(inputs: Inputs) -> None:
    torch._foreach_copy_(inputs["global"], inputs["first"])


def _result(inputs: Inputs) -> Outputs:
    return {f"value {index}": p for index, p in enumerate(inputs["global"])}


def _ours(inputs: Inputs) -> Outputs:
    apply_deltas(inputs["global"], inputs["clients"], WEIGHTS)
    return _result(inputs)


def _loop(inputs: Inputs) -> Outputs:
    for p, *clients in zip(inputs["global"], *inputs["clients"], strict=True):
        p.mul_(1 - sum(WEIGHTS))
        for client, weight in zip(clients, WEIGHTS, strict=True):
            p.add_(client, alpha=weight)
    return _result(inputs)


def _foreach(inputs: Inputs) -> Outputs:
    torch._foreach_mul_(inputs["global"], 1 - sum(WEIGHTS))
    for client, weight in zip(inputs["clients"], WEIGHTS, strict=True):
        torch._foreach_add_(inputs["global"], client, alpha=weight)
    return _result(inputs)


def _truth(inputs: Inputs) -> Outputs:
    wide = {
        "global": [p.double() for p in inputs["global"]],
        "clients": [[p.double() for p in client] for client in inputs["clients"]],
    }
    return _loop(wide)


def _floor(inputs: Inputs) -> Callable[[], None]:
    model = sum(p.numel() for p in inputs["global"])
    read, source, target = torch.ones(len(inputs["clients"]) * model), torch.ones(model), torch.empty(model)

    def once() -> None:
        read.sum()
        target.copy_(source)

    return once
