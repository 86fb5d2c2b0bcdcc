"""SimCLR's loss around a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedssl.objectives.simclr import SimCLR
from fedssl.objectives.simsiam import SimSiam

LABELS = torch.zeros(2)


class Flat(nn.Module):
    """An encoder that changes nothing, for images of two pixels."""

    num_features = 2

    def forward(self, images):
        return images.flatten(1)


def model_of(part):
    model = part.build(Flat(), 2)
    for name in model.online:
        model.online[name] = nn.Flatten()
    return model


def test_simclr_by_hand():
    """Two images, both views at (1, 0) and (0, 1) once normalised. Of each row's three others the positive has the
    similarity 1 and the rest 0: loss = log(exp(1 / t) + 2) - 1 / t, 0.2395448 for t = 0.5.
    """
    part = SimCLR(name="simclr")
    one, two = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    step = part.step(model_of(part), (one.view(2, 1, 1, 2), two.view(2, 1, 1, 2)), LABELS)
    assert float(step.loss) == pytest.approx(math.log(math.exp(2) + 2) - 2)
    assert float(step.loss) == pytest.approx(0.2395448, abs=1e-6)
    assert torch.equal(step.projections[0], one)
    assert torch.equal(step.representations[1], two)
    assert step.predictions == ()


def test_the_heads_have_the_papers_sizes():
    projector = SimCLR(name="simclr").build(Flat(), 2).online["projector"]
    sizes = [(layer.in_features, layer.out_features) for layer in projector if isinstance(layer, nn.Linear)]
    assert sizes == [(2, 2048), (2048, 128)]


def test_simsiam_without_stop_gradient_moves_the_targets_too():
    """Same loss; the gradient through the targets alone is there or not."""
    one, two = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[2.0, -1.0]]]])
    losses = {}
    for stop in (True, False):
        part = SimSiam(name="simsiam", stop_gradient=stop)
        model = model_of(part)
        # with predictions cut off from the graph, only the targets can carry a gradient
        model.online["predictor"] = Cut()
        views = (one.clone().requires_grad_(), two.clone().requires_grad_())
        losses[stop] = part.step(model, views, LABELS).loss
        assert losses[stop].requires_grad is not stop
    assert torch.equal(losses[True], losses[False])


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()
