"""Debiased CKA of two representations, forward and backward, and of all pairs of layers.

float32. The representations are those of bench_linear_cka. torch_cka has no gradient, so that it is compared with a
forward call alone where its work is of the same order.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.bench_linear_cka import _compare, _gradients, _layers, _two_inputs
from benchmarks.case import Bar, Case, Implementation, Inputs, Outputs, in_float64
from fedkernels import debiased_cka, debiased_cka_pairwise

EAGER = "eager, feature space"
GRAM = "eager, Gram matrices"
TORCH_CKA = "torch_cka"


def cases(quick: bool) -> tuple[Case, ...]:
    samples, width = (64, 16) if quick else (5000, 512)
    widths, layer_samples = ([4, 8, 16], 64) if quick else (4 * [64] + 4 * [128] + 4 * [256], 2000)
    return (
        _two(samples, width),
        _two(*((16, 64) if quick else (512, 2048))),
        _forward(*((16, 64) if quick else (512, 2048))),
        _pairwise(widths, layer_samples),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    return (replace(_two(*((64, 16) if quick else (5000, 512))), bars=()),)  # by its reference in plain PyTorch


def _two(samples: int, width: int) -> Case:
    return Case(
        size=f"L = {samples}, d = {width}, both gradients",
        inputs=partial(_two_inputs, samples, width),
        tiny=partial(_two_inputs, 64, 32),
        implementations=(
            Implementation("fedkernels.debiased_cka", _ours),
            Implementation(EAGER, _eager, note="|y'x|^2 less its corrections by the squared norms of the rows"),
            Implementation(GRAM, _gram, note="Song et al. 2007, Eq. 5"),
            *(
                [_torch_cka("CKA.compare on stored features: the same estimate, forward alone")]
                if samples > width
                else []
            ),
        ),
        truth=lambda inputs: _gram(in_float64(inputs)),
        bars=(Bar(faster_than=(EAGER,), times=1.1), Bar(faster_than=(GRAM, TORCH_CKA), times=10.0))
        if samples > width
        else (Bar(faster_than=(EAGER, GRAM), times=1.1),),
    )


def _forward(samples: int, width: int) -> Case:
    return Case(
        size=f"L = {samples}, d = {width}, forward",
        inputs=lambda device: {name: z.detach() for name, z in _two_inputs(samples, width, device).items()},
        tiny=lambda device: {name: z.detach() for name, z in _two_inputs(64, 32, device).items()},
        implementations=(
            Implementation("fedkernels.debiased_cka", _value),
            Implementation(GRAM, _gram_value, note="Song et al. 2007, Eq. 5"),
            _torch_cka("CKA.compare on stored features: the same estimate"),
        ),
        truth=lambda inputs: _gram_value(in_float64(inputs)),
        bars=(Bar(faster_than=(GRAM, TORCH_CKA), times=1.1),),
    )


def _torch_cka(note: str) -> Implementation:
    return Implementation(
        TORCH_CKA,
        lambda inputs: _compare([inputs["x"]], [inputs["y"]]),
        package="torch_cka",
        note=note,
        same_result=False,
    )


def _value(inputs: Inputs) -> Outputs:
    return {"value": debiased_cka(inputs["x"], inputs["y"])}


def _gram_value(inputs: Inputs) -> Outputs:
    return {"value": _of_grams(inputs)}


def _ours(inputs: Inputs) -> Outputs:
    return _gradients(debiased_cka(inputs["x"], inputs["y"]), inputs)


def _eager(inputs: Inputs) -> Outputs:
    x, y = (z - z.mean(dim=0) for z in (inputs["x"], inputs["y"]))
    n = len(x)
    a, b = x.square().sum(dim=1), y.square().sum(dim=1)

    def hsic(u: Tensor, v: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return (v.T @ u).square().sum() - n / (n - 2) * p @ q + p.sum() * q.sum() / ((n - 1) * (n - 2))

    return _gradients(hsic(x, y, a, b) / (hsic(x, x, a, a) * hsic(y, y, b, b)).sqrt(), inputs)


def _gram(inputs: Inputs) -> Outputs:
    return _gradients(_of_grams(inputs), inputs)


def _of_grams(inputs: Inputs) -> Tensor:
    n = len(inputs["x"])
    diagonal = torch.eye(n, dtype=torch.bool, device=inputs["x"].device)
    k, l = ((z @ z.T).masked_fill(diagonal, 0) for z in (inputs["x"], inputs["y"]))

    def hsic(k: Tensor, l: Tensor) -> Tensor:
        sums = k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * k.sum(dim=0) @ l.sum(dim=0)
        return (k * l).sum() + sums

    return hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()


def _pairwise(widths: list[int], samples: int) -> Case:
    return Case(
        size=f"{len(widths)} x {len(widths)} layers, L = {samples}, forward",
        inputs=partial(_layers, widths, samples),
        tiny=partial(_layers, [16, 32], 64),
        implementations=(
            Implementation("fedkernels.debiased_cka_pairwise", _ours_pairwise),
            Implementation(
                TORCH_CKA,
                lambda inputs: _compare(inputs["xs"][:1], inputs["ys"]),
                package="torch_cka",
                note="CKA.compare on stored features, one layer against all, times the number of layers",
                same_result=False,
                scale=lambda inputs: len(inputs["xs"]),
            ),
            Implementation("debiased_cka in a loop", _pairwise_loop),
        ),
        truth=lambda inputs: _pairwise_loop({name: [z.double() for z in zs] for name, zs in inputs.items()}),
        bars=(Bar(faster_than=(TORCH_CKA,), times=50.0),),
    )


def _ours_pairwise(inputs: Inputs) -> Outputs:
    return {"value": debiased_cka_pairwise(inputs["xs"], inputs["ys"])}


def _pairwise_loop(inputs: Inputs) -> Outputs:
    xs, ys = inputs["xs"], inputs["ys"]
    return {"value": torch.stack([debiased_cka(x, y) for x in xs for y in ys]).view(len(xs), len(ys))}
