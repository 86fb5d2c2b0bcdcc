"""The terms of FedDecorr, FedCA and FedX, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedkernels import nt_xent
from fedssl.aggregators.dictionary import DICTIONARY
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.objectives.fedx import FedX
from fedssl.objectives.simclr import SimCLR
from fedssl.regularizers.decorrelation import Decorrelation, decorrelation_loss
from fedssl.regularizers.dictionary_contrast import DictionaryContrast, added_negatives
from fedssl.regularizers.global_distillation import GlobalDistillation
from fedssl.regularizers.relational_distillation import RelationalDistillation, relational_loss
from tests.fedssl.small_models import E1, E2, FIRST_TWO, SWAPPED, THREE, flat_model, local_round, scalar_model

SIX_IMAGES = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_decorrelation_of_two_clients():
    """Three images. Client a: both columns (-1, 0, 1), standard deviation 1, so z'z off the diagonal is 2: 2^2 / 3.
    Client b: (-1, 0, 1) and (1, -2, 1) are orthogonal: 0. r = 1 in a gives the logged mean square 1.
    """
    together = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    apart = torch.tensor([[-1.0, 1.0], [0.0, -2.0], [1.0, 1.0]])
    assert float(decorrelation_loss(together)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(5 * together + 7)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(apart)) == pytest.approx(0.0, abs=1e-6)
    assert float(decorrelation_loss(together[:, :1])) == 0
    local = local_round(scalar_model())
    term = Decorrelation(weight=0.1).start_round(local)
    assert float(term(Step(torch.tensor(0.0), (together, apart)))) == pytest.approx(0.1 * (4 / 3) / 2)
    assert local.logged()["mean_squared_correlation"] == pytest.approx(0.5)


def test_the_dictionary_adds_negatives():
    """One image, both views e1: its only other row is the positive, weight 3 at THREE. A dictionary (e1, e2) adds
    3 + 1: ln(3 + 4) - ln 3. With the objective, whose loss is 0 here, that is -ln(3 / 7).
    """
    dictionary = torch.stack([E1, E2])
    assert float(added_negatives(E1[None], E1[None], dictionary, THREE)) == pytest.approx(math.log(7 / 3))
    step = Step(torch.tensor(0.0), (), (E1[None], 4 * E1[None]))
    part, objective = DictionaryContrast(weight=0.5), SimCLR(temperature=THREE)
    term = part.start_round(local_round(scalar_model(), Message({DICTIONARY: dictionary}), objective=objective))
    assert float(term(step)) == pytest.approx(0.5 * math.log(7 / 3))
    assert float(part.start_round(local_round(scalar_model()))(step)) == 0  # the first round has no dictionary


def test_with_a_dictionary_the_sum_is_the_loss_with_all_negatives():
    torch.manual_seed(0)
    first, second, dictionary = (nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (4, 4, 7))
    rows = torch.cat([first, second])
    logits = torch.cat([rows @ rows.T, rows @ dictionary.T], dim=1) / 0.3
    logits[torch.arange(8), torch.arange(8)] = -torch.inf
    expected = nn.functional.cross_entropy(logits, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]))
    total = nt_xent(first, second, 0.3) + added_negatives(first, second, dictionary, 0.3)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("arrived", "expected"), [(FIRST_TWO, math.log(5 / 3)), (SWAPPED, math.log(5))])
def test_global_distillation_compares_with_the_model_that_arrived(arrived, expected):
    """Two images with predictions e1, e2 and, under the arrived projector, second views e1, e2: each row has its
    positive at cosine 1 and two others at 0, so the loss is ln(3 + 1 + 1) - ln 3. The second client received the
    swapped projector: positives at 0, one other at 1: ln(1 + 3 + 1) - ln 1. Neither client's own projector matters.
    """
    views, predictions = torch.eye(4)[:2].reshape(2, 1, 2, 2), torch.stack([E1, E2])
    model = flat_model(((9.0, 8.0, 7.0, 6.0), (5.0, 4.0, 3.0, 2.0)))
    received = Message({"online.projector.weight": torch.tensor(arrived)})
    local = local_round(model, received, images=SIX_IMAGES, objective=FedX())
    term = GlobalDistillation(weight=2.0, temperature=THREE, batch_size=4).start_round(local)
    total = float(term(Step(torch.tensor(0.0), (), (), (predictions, predictions), views=(views, views))))
    assert local.logged()["global_contrastive_loss"] == pytest.approx(expected, rel=1e-5)
    assert local.logged()["global_relational_loss"] == pytest.approx(0.0, abs=1e-6)  # both predictions agree
    assert total == pytest.approx(2 * expected, rel=1e-5)
    assert model.online["projector"].weight[0, 0] == 9.0


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
    local = local_round(model, images=SIX_IMAGES, objective=FedX())
    term = RelationalDistillation(batch_size=4).start_round(local)
    loss = term(Step(torch.tensor(0.0), (), tuple(model.online["projector"](v) for v in torch.rand(2, 3, 1, 2, 2))))
    loss.backward()
    assert local.logged()["local_relational_loss"] == pytest.approx(float(loss.detach()))
    assert model.online["projector"].weight.grad.abs().sum() > 0
