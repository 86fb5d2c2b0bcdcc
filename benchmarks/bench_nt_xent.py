"""NT-Xent, forward and backward with the rows' normalisation: 2 x B rows, temperature 0.5, float32.

Normalisation is part of every call, because the peers hold it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, in_float64, value_and_gradients
from fedkernels import nt_xent

TEMPERATURE = 0.5
NAIVE = "naive cross-entropy"
LIGHTLY = "lightly NTXentLoss"


def cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (64, 16) if quick else (4096, 256)
    return (
        Case(
            size=f"2 x {rows}, d = {width}",
            inputs=partial(_inputs, rows, width),
            tiny=partial(_inputs, 32, 16),
            implementations=(
                Implementation("fedkernels.nt_xent", _ours),
                Implementation(NAIVE, _naive, note="cat, mm, masked_fill, F.cross_entropy"),
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
            bars=(
                Bar(faster_than=(NAIVE,), times=2.5),
                Bar(faster_than=(LIGHTLY,), times=5.0),
                Bar(extra_mib=32.0),
            ),
        ),
    )


def _inputs(rows: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(rows, width, generator=generator)  # what two views of it share
    view1, view2 = (image + torch.randn(rows, width, generator=generator) for _ in range(2))
    return {"view1": view1.requires_grad_(), "view2": view2.requires_grad_()}


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"view1": inputs["view1"], "view2": inputs["view2"]})


def _ours(inputs: Inputs) -> Outputs:
    view1, view2 = (F.normalize(inputs[name], dim=1) for name in ("view1", "view2"))
    return _gradients(nt_xent(view1, view2, TEMPERATURE), inputs)


def _naive(inputs: Inputs) -> Outputs:
    rows = len(inputs["view1"])
    z = F.normalize(torch.cat([inputs["view1"], inputs["view2"]]), dim=1)
    logits = z @ z.T / TEMPERATURE
    logits = logits.masked_fill(torch.eye(2 * rows, dtype=torch.bool), -torch.inf)
    return _gradients(F.cross_entropy(logits, torch.arange(2 * rows).roll(rows)), inputs)


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
