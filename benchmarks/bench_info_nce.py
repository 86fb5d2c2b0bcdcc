"""InfoNCE, forward and backward: B queries against N = B keys, rows of norm 1, temperature 0.2, float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, in_float64, value_and_gradients
from fedkernels import info_nce

TEMPERATURE = 0.2
NAIVE = "naive cross-entropy"
CHUNKED = "F.linear_cross_entropy, chunked"
WHOLE = "F.linear_cross_entropy, whole"
MEMORY_BAR = 16 / 4096  # MiB beyond the outputs per query: 16 MiB at B = 4096


def cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (96, 16) if quick else (4096, 256)
    linear_cross_entropy = (CHUNKED, WHOLE)
    made = [
        _case(
            rows,
            width,
            keys_learn=False,
            bars=(
                Bar(faster_than=(NAIVE,), times=2.0),
                Bar(faster_than=(WHOLE,), times=1.5),
                Bar(faster_than=(CHUNKED,), times=1.5),
                Bar(floor=1.35),
            ),
        ),
        _case(
            rows,
            width,
            keys_learn=True,
            bars=(Bar(faster_than=(NAIVE,), times=1.4), Bar(faster_than=linear_cross_entropy, times=1.15)),
        ),
    ]
    for factor in (4, 16):
        for keys_learn in (False, True):
            made.append(_case(factor * rows, width, keys_learn=keys_learn, bars=(), memory_alone=True))
    return tuple(made)


def _case(rows: int, width: int, *, keys_learn: bool, bars: tuple[Bar, ...], memory_alone: bool = False) -> Case:
    gradients = "both gradients" if keys_learn else "keys without gradient"
    return Case(
        size=f"B = N = {rows}, d = {width}, {gradients}",
        inputs=partial(_inputs, rows, width, keys_learn),
        tiny=partial(_inputs, 64, 32, keys_learn),
        implementations=(
            Implementation("fedkernels.info_nce", _ours),
            Implementation(NAIVE, _naive, note="F.cross_entropy(q @ k.T / t, arange)"),
            Implementation(CHUNKED, _chunked, note="options=LinearCrossEntropyOptions(): chunks of its own choice"),
            Implementation(WHOLE, _whole, note="options=None"),
        ),
        truth=lambda inputs: _naive(in_float64(inputs)),
        floor=Floor(f"{'three' if keys_learn else 'two'} torch.mm of B x N x d", _floor),
        bars=(*bars, Bar(extra_mib=MEMORY_BAR * rows)),
        timed=not memory_alone,
        large=memory_alone,
    )


def _inputs(rows: int, width: int, keys_learn: bool) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(rows, width, generator=generator)  # what two views of it share
    query, key = (F.normalize(image + torch.randn(rows, width, generator=generator), dim=1) for _ in range(2))
    return {"query": query.requires_grad_(), "key": key.requires_grad_(keys_learn), "target": torch.arange(rows)}


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"query": inputs["query"], "key": inputs["key"]})


def _ours(inputs: Inputs) -> Outputs:
    return _gradients(info_nce(inputs["query"], inputs["key"], TEMPERATURE), inputs)


def _naive(inputs: Inputs) -> Outputs:
    logits = inputs["query"] @ inputs["key"].T / TEMPERATURE
    return _gradients(F.cross_entropy(logits, inputs["target"]), inputs)


def _chunked(inputs: Inputs) -> Outputs:
    # Fixed chunks of 64 to 2048 rows were no faster than its own choice.
    options = torch.nn.LinearCrossEntropyOptions()
    query = inputs["query"] / TEMPERATURE
    return _gradients(F.linear_cross_entropy(query, inputs["key"], inputs["target"], options=options), inputs)


def _whole(inputs: Inputs) -> Outputs:
    query = inputs["query"] / TEMPERATURE
    return _gradients(F.linear_cross_entropy(query, inputs["key"], inputs["target"]), inputs)


def _floor(inputs: Inputs) -> Callable[[], None]:
    query, key = inputs["query"].detach(), inputs["key"].detach()
    logits, gradient = torch.empty(len(query), len(key)), torch.empty_like(query)

    def products() -> None:
        torch.mm(query, key.T, out=logits)
        torch.mm(logits, key, out=gradient)
        if inputs["key"].requires_grad:
            torch.mm(logits.T, query, out=gradient)

    return products
