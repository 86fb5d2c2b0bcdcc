"""CKA of all samples from batches.

float32. The representations are those of bench_linear_cka.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.bench_linear_cka import _compare, _two_inputs
from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, in_float64
from fedkernels import CKAAccumulator

EAGER = "eager, feature space"
TORCH_CKA = "torch_cka"
BATCH = 250


def cases(quick: bool) -> tuple[Case, ...]:
    return (_batches(*((500, 16) if quick else (5000, 512))),)


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    return tuple(replace(case, bars=()) for case in cases(quick))


def _batches(samples: int, width: int) -> Case:
    """The exact value of all samples; torch_cka has only the mean over batches."""
    return Case(
        size=f"batches of {BATCH}, L = {samples}, d = {width}, forward",
        inputs=lambda device: {name: z.detach() for name, z in _two_inputs(samples, width, device).items()},
        tiny=lambda device: {name: z.detach() for name, z in _two_inputs(64, 32, device).items()},
        implementations=(
            Implementation("fedkernels.accumulate_cka.CKAAccumulator", _accumulated),
            Implementation(EAGER, _eager_sums, note="x'x, y'y, y'x and the sums of x and y added up in float64"),
            Implementation(
                TORCH_CKA,
                _torch_cka_batches,
                package="torch_cka",
                note="CKA.compare on stored features, batch by batch: the mean over batches",
                same_result=False,
            ),
        ),
        truth=lambda inputs: _accumulated(in_float64(inputs)),
        floor=Floor("x'x and y'y at half, and y'x, of all samples at once", _products),
        bars=(Bar(faster_than=(TORCH_CKA,), times=1.0),),
    )


def _accumulated(inputs: Inputs) -> Outputs:
    accumulator = CKAAccumulator()
    for x, y in zip(inputs["x"].split(BATCH), inputs["y"].split(BATCH), strict=True):
        accumulator.update(x, y)
    return {"value": accumulator.compute()}


def _eager_sums(inputs: Inputs) -> Outputs:
    n, columns = inputs["x"].shape
    xx, yy, yx = (inputs["x"].new_zeros(columns, columns, dtype=torch.float64) for _ in range(3))
    x_sum, y_sum = (inputs["x"].new_zeros(columns, dtype=torch.float64) for _ in range(2))
    for x, y in zip(inputs["x"].split(BATCH), inputs["y"].split(BATCH), strict=True):
        xx += x.T @ x
        yy += y.T @ y
        yx += y.T @ x
        x_sum += x.sum(dim=0, dtype=torch.float64)
        y_sum += y.sum(dim=0, dtype=torch.float64)
    pairs = (xx, x_sum, x_sum), (yy, y_sum, y_sum), (yx, x_sum, y_sum)
    own_x, own_y, cross = ((product - torch.outer(v, u) / n).norm() for product, u, v in pairs)
    return {"value": cross.square() / (own_x * own_y)}


def _torch_cka_batches(inputs: Inputs) -> Outputs:
    estimates = [
        _compare([x], [y])["unbiased estimate"]
        for x, y in zip(inputs["x"].split(BATCH), inputs["y"].split(BATCH), strict=True)
    ]
    return {"unbiased estimate": torch.stack(estimates).mean(dim=0)}


def _products(inputs: Inputs) -> Callable[[], None]:
    x, y = inputs["x"], inputs["y"]
    half, product = len(x) // 2, torch.empty(x.shape[1], y.shape[1])

    def products() -> None:
        torch.mm(y.T, x, out=product)
        for z in (x[:half], y[:half]):
            torch.mm(z.T, z)

    return products
