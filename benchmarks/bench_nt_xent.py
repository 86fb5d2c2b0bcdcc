"""NT-Xent, forward and backward with the rows' normalisation: 2 x B rows, temperature 0.5; float32 on the CPU.

Normalisation is part of every call, because the peers hold it. On a GPU the views are normalised before the call.
"""

import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, in_float64, value_and_gradients
from fedkernels import nt_xent

TEMPERATURE = 0.5
NAIVE = "naive cross-entropy"
NAIVE_NOTE = "cat, mm, masked_fill, F.cross_entropy"
LIGHTLY = "lightly NTXentLoss"


def cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (64, 16) if quick else (4096, 256)
    bars = (Bar(faster_than=(NAIVE,), times=2.5), Bar(faster_than=(LIGHTLY,), times=5.0), Bar(extra_mib=32.0))
    return (_case(rows, width, bars),)


CURVE = "images, each with two views"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of images."""
    width, sizes = (16, (32, 64)) if quick else (256, (128, 1024, 4096))
    return {rows: _case(rows, width, ()) for rows in sizes}


def _case(rows: int, width: int, bars: tuple[Bar, ...]) -> Case:
    return Case(
        size=f"2 x {rows}, d = {width}",
        inputs=partial(_inputs, rows, width),
        tiny=partial(_inputs, 32, 16),
        implementations=(
            Implementation("fedkernels.nt_xent", _ours),
            Implementation(NAIVE, _naive, note=NAIVE_NOTE),
            Implementation(LIGHTLY, _lightly, package="lightly"),
            Implementation(
                "pytorch-metric-learning NTXentLoss",
                _pytorch_metric_learning,
                package="pytorch-metric-learning",
                note="in SelfSupervisedLoss; enumerates all pairs",
            ),
        ),
        truth=lambda inputs: _naive(in_float64(inputs)),
        floor=Floor("torch.mm of B x 2B x d (half of the symmetric logits) and of 2B x 2B x d (gradient)", _floor),
        bars=bars,
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (32, 16) if quick else (4096, 256)
    return (
        Case(
            size=f"bfloat16, 2 x {rows}, d = {width}, normalised before",
            inputs=partial(_normalized_inputs, rows, width),
            implementations=(
                Implementation("fedkernels.nt_xent", partial(_ours, normalize=_as_it_is)),
                Implementation(
                    NAIVE, partial(_naive, normalize=_as_it_is), note="cat, mm, masked_fill, F.cross_entropy"
                ),
            ),
            truth=lambda inputs: _naive(in_float64(inputs), normalize=_as_it_is),
            work=Work(2 * 2.0 * (2 * rows) ** 2 * width, "bf16", "2 products of 2B x 2B x d"),
        ),
    )


def _inputs(rows: int, width: int, device: torch.device) -> Inputs:
    draw = partial(torch.randn, rows, width, generator=torch.Generator(device).manual_seed(0), device=device)
    image = draw()  # what two views of it share
    view1, view2 = (image + draw() for _ in range(2))
    return {"view1": view1.requires_grad_(), "view2": view2.requires_grad_()}


def _normalized_inputs(rows: int, width: int, device: torch.device) -> Inputs:
    views = _inputs(rows, width, device)
    return {name: _rows_of_norm_1(view.detach()).bfloat16().requires_grad_() for name, view in views.items()}


def _rows_of_norm_1(z: Tensor) -> Tensor:
    return F.normalize(z, dim=1)


def _as_it_is(z: Tensor) -> Tensor:
    return z


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"view1": inputs["view1"], "view2": inputs["view2"]})


def _ours(inputs: Inputs, normalize: Callable[[Tensor], Tensor] = _rows_of_norm_1) -> Outputs:
    view1, view2 = (normalize(inputs[name]) for name in ("view1", "view2"))
    return _gradients(nt_xent(view1, view2, TEMPERATURE), inputs)


def _naive(inputs: Inputs, normalize: Callable[[Tensor], Tensor] = _rows_of_norm_1) -> Outputs:
    rows, device = len(inputs["view1"]), inputs["view1"].device
    z = normalize(torch.cat([inputs["view1"], inputs["view2"]]))
    logits = z @ z.T / TEMPERATURE
    logits = logits.masked_fill(torch.eye(2 * rows, dtype=torch.bool, device=device), -torch.inf)
    return _gradients(F.cross_entropy(logits, torch.arange(2 * rows, device=device).roll(rows)), inputs)


def _lightly(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("lightly.loss").NTXentLoss(temperature=TEMPERATURE)
    return _gradients(loss(inputs["view1"], inputs["view2"]), inputs)


def _pytorch_metric_learning(inputs: Inputs) -> Outputs:
    losses = importlib.import_module("pytorch_metric_learning.losses")
    loss = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=TEMPERATURE))
    return _gradients(loss(inputs["view1"], inputs["view2"]), inputs)


def _floor(inputs: Inputs) -> Callable[[], None]:
    z = torch.cat([inputs["view1"], inputs["view2"]]).detach()
    half, rows = len(z) // 2, len(z)
    logits, gradient = torch.zeros(rows, rows), torch.empty_like(z)

    def products() -> None:
        torch.mm(z[:half], z.T, out=logits[:half])
        torch.mm(logits, z, out=gradient)

    return products
