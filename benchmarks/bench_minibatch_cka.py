"""The average of the unbiased HSIC over batches.

float32. The representations are those of bench_linear_cka.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.bench_linear_cka import _compare, _layers
from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs
from fedkernels import MinibatchCKA

TORCH_CKA = "torch_cka"
BATCH = 250


def cases(quick: bool) -> tuple[Case, ...]:
    return (_minibatches(*(([4, 8, 16], 500) if quick else (4 * [64] + 4 * [128] + 4 * [256], 2000))),)


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    return tuple(replace(case, bars=()) for case in cases(quick))


def _minibatches(widths: list[int], samples: int) -> Case:
    return Case(
        size=f"{len(widths)} x {len(widths)} layers in batches of {BATCH}, L = {samples}, forward",
        inputs=partial(_layers, widths, samples),
        tiny=partial(_layers, [16, 32], 64),
        implementations=(
            Implementation("fedkernels.minibatch_cka.MinibatchCKA", _minibatch),
            Implementation(
                TORCH_CKA,
                _torch_cka_layers,
                package="torch_cka",
                note="CKA.compare on stored features, batch by batch",
                same_result=False,
            ),
        ),
        truth=lambda inputs: _minibatch({name: [z.double() for z in zs] for name, zs in inputs.items()}),
        floor=Floor("the layers' Gram matrices at half, as products with half of the rows", _grams),
        bars=(Bar(faster_than=(TORCH_CKA,), times=10.0),),
    )


def _minibatch(inputs: Inputs) -> Outputs:
    estimate = MinibatchCKA()
    for xs, ys in _in_batches(inputs):
        estimate.update(xs, ys)
    return {"value": estimate.compute()}


def _torch_cka_layers(inputs: Inputs) -> Outputs:
    estimates = [_compare(xs, ys)["unbiased estimate"] for xs, ys in _in_batches(inputs)]
    return {"unbiased estimate": torch.stack(estimates).mean(dim=0)}


def _in_batches(inputs: Inputs) -> list[tuple[list[Tensor], list[Tensor]]]:
    samples = len(inputs["xs"][0])
    starts = range(0, samples - 3, BATCH)
    return [tuple([z[at : at + BATCH] for z in inputs[name]] for name in ("xs", "ys")) for at in starts]  # type: ignore[misc]


def _grams(inputs: Inputs) -> Callable[[], None]:
    batches = _in_batches(inputs)

    def products() -> None:
        for xs, ys in batches:
            for z in (*xs, *ys):
                torch.mm(z[: len(z) // 2], z.T)

    return products
