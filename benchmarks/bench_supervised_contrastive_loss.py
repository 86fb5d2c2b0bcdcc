"""SupCon, forward and backward with the rows' normalisation; temperature 0.1, float32 on the CPU.

Normalisation is part of every call, because the peer holds it.
"""

import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, in_float64, value_and_gradients
from fedkernels import supervised_contrastive_loss

TEMPERATURE, CLASSES = 0.1, 100
OURS = "fedkernels.supervised_contrastive_loss"
NAIVE = "naive masks"
NAIVE_NOTE = "log_softmax of all logits, masked by equal labels"
METRIC_LEARNING = "pytorch-metric-learning SupConLoss"


def cases(quick: bool) -> tuple[Case, ...]:
    # An odd number of rows takes another way on the CPU.
    sizes = ((64, 16), (65, 16)) if quick else ((4096, 128), (4095, 128))
    return tuple(_case(rows, width) for rows, width in sizes)


CURVE = "rows"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of rows, which is even."""
    width, sizes = (16, (32, 64)) if quick else (128, (256, 1024, 4096))
    return {rows: _case(rows, width) for rows in sizes}


def _case(rows: int, width: int) -> Case:
    even = rows % 2 == 0
    return Case(
        size=f"B = {rows}, d = {width}, {CLASSES} labels",
        inputs=partial(_inputs, rows, width),
        tiny=partial(_inputs, 32, 16),
        implementations=(
            Implementation(OURS, _ours),
            Implementation(NAIVE, _naive, note=NAIVE_NOTE),
            Implementation(METRIC_LEARNING, _pytorch_metric_learning, package="pytorch-metric-learning"),
        ),
        truth=lambda inputs: _naive(in_float64(inputs)),
        floor=Floor("torch.mm of B/2 x B x d (half of the symmetric logits) and of B x B x d (gradient)", _floor),
        bars=(Bar(faster_than=(METRIC_LEARNING,), times=3.0), *((Bar(extra_mib=32.0),) if even else ())),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (32, 16) if quick else (8192, 128)
    return (
        Case(
            size=f"bfloat16, B = {rows}, d = {width}, {CLASSES} labels",
            inputs=partial(_inputs, rows, width, dtype=torch.bfloat16),
            implementations=(
                Implementation(OURS, _ours, note="the rows in 16 bits"),
                Implementation(NAIVE, _naive, note=NAIVE_NOTE),
                Implementation(METRIC_LEARNING, _pytorch_metric_learning, package="pytorch-metric-learning"),
            ),
            truth=lambda inputs: _naive(in_float64(inputs)),
            work=Work(2 * 2.0 * rows * rows * width, "bf16", "2 products of B x B x d"),
        ),
    )


def _inputs(rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(CLASSES, (rows,), generator=generator, device=device)
    centers = torch.randn(CLASSES, width, generator=generator, device=device)
    features = centers[labels] + torch.randn(rows, width, generator=generator, device=device)
    return {"features": features.to(dtype).requires_grad_(), "labels": labels}


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"features": inputs["features"]})


def _ours(inputs: Inputs) -> Outputs:
    features = F.normalize(inputs["features"].float(), dim=1)  # as autocast does, which leaves norms in float32
    return _gradients(supervised_contrastive_loss(features, inputs["labels"], TEMPERATURE), inputs)


def _naive(inputs: Inputs) -> Outputs:
    features, labels = F.normalize(inputs["features"], dim=1), inputs["labels"]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = (labels[:, None] == labels) & ~itself
    log_p = (features @ features.T / TEMPERATURE).masked_fill(itself, -1e30).log_softmax(dim=1)
    count = positive.sum(dim=1)
    losses = -(log_p * positive).sum(dim=1) / count.clamp(min=1)
    return _gradients(losses.sum() / (count > 0).sum().clamp(min=1), inputs)


def _pytorch_metric_learning(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("pytorch_metric_learning.losses").SupConLoss(temperature=TEMPERATURE)
    return _gradients(loss(inputs["features"], inputs["labels"]), inputs)


def _floor(inputs: Inputs) -> Callable[[], None]:
    z = inputs["features"].detach()
    half, rows = len(z) // 2, len(z)
    logits, gradient = torch.zeros(rows, rows), torch.empty_like(z)

    def products() -> None:
        torch.mm(z[:half], z.T, out=logits[:half])
        torch.mm(logits, z, out=gradient)

    return products
