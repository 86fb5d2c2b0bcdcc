"""FedX's two global losses, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.objectives.fedx import FedX
from fedssl.regularizers.global_distillation import GlobalDistillation
from tests.fedssl.small_models import E1, E2, FIRST_TWO, SWAPPED, THREE, flat_model, local_round


def test_global_distillation_compares_with_the_model_that_arrived():
    """Two images with predictions e1, e2 and, under the arrived projector, second views e1, e2: each row has its
    positive at cosine 1 and two others at 0, so the loss is ln(3 + 1 + 1) - ln 3. The second client received the
    swapped projector: positives at 0, one other at 1: ln(1 + 3 + 1) - ln 1. Neither client's own projector matters.
    """
    views = torch.eye(4)[:2].reshape(2, 1, 2, 2)
    predictions = torch.stack([E1, E2])
    images = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for arrived, expected in ((FIRST_TWO, math.log(5 / 3)), (SWAPPED, math.log(5))):
        model = flat_model(((9.0, 8.0, 7.0, 6.0), (5.0, 4.0, 3.0, 2.0)))
        received = Message({"online.projector.weight": torch.tensor(arrived)})
        local = local_round(model, received, images=images, objective=FedX())
        part = GlobalDistillation(name="global_distillation", weight=2.0, temperature=THREE, batch_size=4)
        term = part.start_round(local)
        step = Step(torch.tensor(0.0), (), (), (predictions, predictions), views=(views, views))
        total = float(term(step))
        logged = local.logged()
        assert logged["global_contrastive_loss"] == pytest.approx(expected, rel=1e-5)
        assert logged["global_relational_loss"] == pytest.approx(0.0, abs=1e-6)  # both predictions agree
        assert total == pytest.approx(2 * expected, rel=1e-5)
        assert model.online["projector"].weight[0, 0] == 9.0
