"""Losses beside their definitions, written with a loop for each sum, and beside lightly's: values and gradients."""

import pytest
import torch
from torch import nn

from fedssl.models.model import Model
from fedssl.objectives.barlow_twins import BarlowTwins
from fedssl.objectives.dino import distillation_loss
from fedssl.objectives.vicreg import VICReg

ROWS, FEATURES = 7, 4
CENTRE = torch.tensor([0.02, -0.01, 0.03, 0.0], dtype=torch.float64)


def step_loss(part):
    """The loss of a step whose projections are the two views."""
    model = Model({"encoder": nn.Identity(), "projector": nn.Identity()})
    return lambda *views: part.step(model, views, torch.zeros(ROWS)).loss


def vicreg(*views):
    total = 25 * ((views[0] - views[1]) ** 2).sum() / (ROWS * FEATURES)
    for covariance in (torch.cov(view.T) for view in views):
        for j in range(FEATURES):
            total = total + 25 / 2 * (1 - (covariance[j, j] + 1e-4).sqrt()).clamp(min=0) / FEATURES
            total = total + sum(covariance[j, k] ** 2 for k in range(FEATURES) if k != j) / FEATURES
    return total


def barlow_twins(*views):
    a, b = ((z - z.mean(dim=0)) / (((z - z.mean(dim=0)) ** 2).mean(dim=0) + 1e-5).sqrt() for z in views)
    total = 0
    for j in range(FEATURES):
        for k in range(FEATURES):
            correlation = sum(a[i, j] * b[i, k] for i in range(ROWS)) / ROWS
            total = total + ((1 - correlation) ** 2 if j == k else 5e-3 * correlation**2)
    return total


def dino(*views):
    """Of three views of the student's, and the teacher's of the first two."""
    total = 0
    for t in range(2):
        target = torch.softmax((views[3 + t] - CENTRE.to(views[0])) * 32, dim=1)
        for s in {0, 1, 2} - {t}:
            predicted = torch.softmax(views[s] * 10, dim=1)
            total = total - sum((target[i] * predicted[i].log()).sum() for i in range(ROWS))
    return total / (ROWS * 4)


def our_dino(*views):
    return distillation_loss(torch.stack(views[:3]), torch.stack(views[3:]), CENTRE.to(views[0]), 0.1, 1 / 32)


def lightlys_dino(losses):
    def loss(*views):
        part = losses.DINOLoss(FEATURES, student_temp=0.1)
        part.center = CENTRE.to(views[0]).expand(1, 1, FEATURES)
        return part(list(views[3:]), list(views[:3]), teacher_temp=1 / 32)

    return loss


#: ours, the definition, lightly's by its module, and how many tensors [ROWS, FEATURES] they take
LOSSES = {
    "vicreg": (step_loss(VICReg()), vicreg, lambda losses: losses.VICRegLoss(), 2),
    "barlow_twins": (step_loss(BarlowTwins()), barlow_twins, lambda losses: losses.BarlowTwinsLoss(), 2),
    "dino": (our_dino, dino, lightlys_dino, 5),
}


@pytest.mark.parametrize("beside", ["definition", "lightly"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_values_and_gradients_are_the_same(name, beside, dtype, error):
    ours, other, lightlys, count = LOSSES[name]
    if beside == "lightly":
        other = lightlys(pytest.importorskip("lightly.loss", reason="lightly is not installed"))
    generator = torch.Generator().manual_seed(0)
    # a spread near 1, at which VICReg's variance term begins, and a mean that is not 0
    given = [torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64) + 0.3 for _ in range(count)]
    results = []
    for loss in (ours, other):
        leaves = [one.to(dtype).requires_grad_() for one in given]
        value = loss(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=error, atol=error * float(expected.abs().max()))
