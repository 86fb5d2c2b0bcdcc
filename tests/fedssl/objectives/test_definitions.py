"""Losses beside their definitions, written with a loop for each sum, and beside lightly's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedssl.objectives.barlow_twins import BarlowTwins
from fedssl.objectives.base import Objective
from fedssl.objectives.dino import distillation_loss
from fedssl.objectives.vicreg import VICReg

ROWS, FEATURES = 7, 4


def step_loss(part: Objective) -> Callable[..., Tensor]:
    """The loss of a step whose projections are the two views."""

    def loss(*views: Tensor) -> Tensor:
        encoder = nn.Flatten()
        encoder.num_features = FEATURES
        model = part.build(encoder, 2)
        model.online["projector"] = nn.Identity()
        return part.step(model, views, torch.zeros(ROWS)).loss

    return loss


def vicreg(*views: Tensor) -> Tensor:
    n, d = views[0].shape
    total = 25 * sum((views[0][i, j] - views[1][i, j]) ** 2 for i in range(n) for j in range(d)) / (n * d)
    for z in views:
        mean = [sum(z[:, j]) / n for j in range(d)]
        covariance = [
            [sum((z[i, j] - mean[j]) * (z[i, k] - mean[k]) for i in range(n)) / (n - 1) for k in range(d)]
            for j in range(d)
        ]
        for j in range(d):
            total = total + 25 / 2 * (1 - (covariance[j][j] + 1e-4).sqrt()).clamp(min=0) / d
            total = total + sum(covariance[j][k] ** 2 for k in range(d) if k != j) / d
    return total


def barlow_twins(*views: Tensor) -> Tensor:
    n, d = views[0].shape
    a, b = ((z - z.mean(dim=0)) / (((z - z.mean(dim=0)) ** 2).mean(dim=0) + 1e-5).sqrt() for z in views)
    total = torch.zeros((), dtype=a.dtype)
    for j in range(d):
        for k in range(d):
            correlation = sum(a[i, j] * b[i, k] for i in range(n)) / n
            total = total + ((1 - correlation) ** 2 if j == k else 5e-3 * correlation**2)
    return total


CENTRE = torch.tensor([0.02, -0.01, 0.03, 0.0], dtype=torch.float64)


def dino(*views: Tensor) -> Tensor:
    student, teacher = views[:3], views[3:]
    total = torch.zeros((), dtype=views[0].dtype)
    for t in range(2):
        for s in {0, 1, 2} - {t}:
            for i in range(ROWS):
                target = ((teacher[t][i] - CENTRE.to(total)) * 32).exp()
                predicted = (student[s][i] / 0.1).exp()
                total = total - (target / target.sum() * (predicted / predicted.sum()).log()).sum()
    return total / (ROWS * 4)


def our_dino(*views: Tensor) -> Tensor:
    return distillation_loss(torch.stack(views[:3]), torch.stack(views[3:]), CENTRE.to(views[0]), 0.1, 1 / 32)


def lightlys_dino(losses: Any) -> Callable[..., Tensor]:
    def loss(*views: Tensor) -> Tensor:
        part = losses.DINOLoss(FEATURES, student_temp=0.1)
        part.center = CENTRE.to(views[0]).expand(1, 1, FEATURES)
        return part(list(views[3:]), list(views[:3]), teacher_temp=1 / 32)

    return loss


class Loss(NamedTuple):
    ours: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    lightly: Callable[[Any], Callable[..., Tensor]]  # from the module lightly.loss
    given: int = 2  # tensors [ROWS, FEATURES]


LOSSES = {
    "vicreg": Loss(step_loss(VICReg()), vicreg, lambda losses: losses.VICRegLoss()),
    "barlow_twins": Loss(step_loss(BarlowTwins()), barlow_twins, lambda losses: losses.BarlowTwinsLoss()),
    "dino": Loss(our_dino, dino, lightlys_dino, 5),
}


def value_and_gradients(function: Callable[..., Tensor], count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # about the spread at which VICReg's variance term begins, with a mean that is not 0
    given = [torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64) + 0.3 for _ in range(count)]
    leaves = [one.to(dtype).requires_grad_() for one in given]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("beside", ["definition", "lightly"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
def test_values_and_gradients_are_the_same(loss, beside, dtype, error):
    other = loss.definition
    if beside == "lightly":
        other = loss.lightly(pytest.importorskip("lightly.loss", reason="lightly is not installed"))
    for found, expected in zip(
        *(value_and_gradients(one, loss.given, dtype) for one in (loss.ours, other)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=error, atol=error * float(expected.abs().max()))
