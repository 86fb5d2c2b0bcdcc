"""FedX's local relational loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedssl.objectives.base import Step
from fedssl.objectives.fedx import FedX
from fedssl.regularizers.relational_distillation import RelationalDistillation, relational_loss
from tests.fedssl.small_models import E1, E2, FIRST_TWO, THREE, flat_model, local_round


def test_relational_loss_of_two_clients():
    """At THREE, e1 over the others (e1, e2) gives (3, 1) / 4, e2 gives (1, 3) / 4; their mixture is (1, 1) / 2.

    Client a's views are e1 and e2: 3/4 ln(3/2) + 1/4 ln(1/2). Client b's agree: 0.
    """
    others = torch.stack([5 * E1, E2])  # lengths do not matter
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(relational_loss(E1[None], 2 * E2[None], others, THREE)) == pytest.approx(expected)
    assert float(relational_loss(E1[None], 3 * E1[None], others, THREE)) == pytest.approx(0.0, abs=1e-7)
    both = relational_loss(torch.stack([E1, E1]), torch.stack([E2, E1]), others, THREE)
    assert float(both) == pytest.approx(expected / 2)


def test_relational_distillation_trains_the_network():
    model = flat_model(FIRST_TWO)
    images = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    local = local_round(model, images=images, objective=FedX())
    term = RelationalDistillation(name="relational_distillation", batch_size=4).start_round(local)
    projections = tuple(model.online["projector"](v) for v in torch.rand(2, 3, 1, 2, 2))
    loss = term(Step(torch.tensor(0.0), (), projections))
    loss.backward()
    assert local.logged()["local_relational_loss"] == pytest.approx(float(loss.detach()))
    assert model.online["projector"].weight.grad.abs().sum() > 0
