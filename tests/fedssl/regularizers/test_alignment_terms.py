"""The proximal term and the representation alignment, on numbers small enough to compute by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedssl.augmentations.random_views import RandomViews
from fedssl.client import Client, LocalRound
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.objectives.byol import BYOL
from fedssl.regularizers.proximal import Proximal
from fedssl.regularizers.representation_alignment import RepresentationAlignment, model_contrast
from tests.fedssl.models.test_stages import images, staged

#: a temperature at which a cosine of 1 weighs exp(1 / t) = 3, one of 0 weighs 1 and one of -1 weighs 1/3
THREE = 1 / math.log(3)
E1, E2 = torch.eye(2)


def linear(rows) -> nn.Linear:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return layer


def plain_model(rows) -> Model:
    """The encoder flattens two pixels, the projector multiplies them by the rows."""
    return Model({"encoder": nn.Flatten(), "projector": linear(rows)})


def local_round(model: Model, received=None, previous=None, memory=None) -> LocalRound:
    client = Client(0, torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), None, model, memory or Message())
    return LocalRound(client, received or Message(), 2, 0, BYOL(), RandomViews(), previous)


def step_at(model: Model, *views: torch.Tensor) -> Step:
    representations = tuple(model.encoder(view) for view in views)
    projections = tuple(model.online["projector"](r) for r in representations)
    return Step(torch.zeros(()), representations, projections, views=views)


# PA


def test_the_proximal_term_by_hand():
    """Two of four weights move, by 0.3 and -0.4: mu / 2 * (0.09 + 0.16) = 0.025 for mu = 0.2, gradient mu (w - w_t)."""
    model = plain_model([[1.0, 2.0], [3.0, 4.0]])
    local = local_round(model)
    term = Proximal(name="proximal", weight=0.2).start_round(local)
    step = step_at(model, torch.zeros(1, 1, 1, 2))
    assert float(term(step).detach()) == 0
    weight = model.online["projector"].weight
    with torch.no_grad():
        weight += torch.tensor([[0.3, 0.0], [0.0, -0.4]])
    value = term(step)
    assert float(value.detach()) == pytest.approx(0.025)
    value.backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[0.06, 0.0], [0.0, -0.08]]))
    assert local.logged()["proximal_distance"] == pytest.approx(0.25)  # the mean of 0 and 0.5


def test_frozen_and_absent_layers_have_no_distance():
    encoder = staged("small_resnet10")
    encoder.use(active=[1], frozen=[0])
    model = Model({"encoder": encoder, "projector": linear([[1.0, 0.0], [0.0, 1.0]])})
    term = Proximal(name="proximal", weight=2.0).start_round(local_round(model))
    step = Step(torch.zeros(()), ())
    with torch.no_grad():
        for layer in (0, 2, 3):
            for parameter in encoder.switches(layer)[0].parameters():
                parameter += 1.0
    assert float(term(step)) == 0
    with torch.no_grad():
        active = list(encoder.switches(1)[0].parameters())
        active[0].flatten()[0] += 3.0
    assert float(term(step)) == pytest.approx(9.0, rel=1e-5)


# RA


@pytest.mark.parametrize(
    ("now", "towards", "away", "expected"),
    [
        (E1, 5 * E1, E2, math.log(4 / 3)),  # -log(3 / (3 + 1))
        (E1, E2, E1, math.log(4)),  # -log(1 / (1 + 3))
        (2 * E1, E1, -E1, math.log(10 / 9)),  # -log(3 / (3 + 1/3))
        (E1, E2, -E2, math.log(2)),
    ],
)
def test_model_contrast_by_hand(now, towards, away, expected):
    one = model_contrast(now[None], towards[None], away[None], THREE)
    assert float(one) == pytest.approx(expected, rel=1e-6)
    rows = model_contrast(torch.stack([now, E1]), torch.stack([towards, E1]), torch.stack([away, E2]), THREE)
    assert float(rows) == pytest.approx((expected + math.log(4 / 3)) / 2, rel=1e-6)


def test_the_alignment_is_towards_what_arrived_and_away_from_the_clients_previous_model():
    """The views are e1 and e2, the model passes them on. The global model turns both by 90 degrees, the previous one
    does nothing: both rows are at right angles to their goal, -log(1 / (1 + 3)) = log 4, and 2 log 4 for weight 2.
    """
    model = plain_model([[1.0, 0.0], [0.0, 1.0]])
    name = "online.projector.weight"
    received = Message({name: torch.tensor([[0.0, -1.0], [1.0, 0.0]])})
    previous = {name: torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    part = RepresentationAlignment(name="representation_alignment", weight=2.0, temperature=THREE)
    memory = Message()
    first = part.start_round(local_round(model, received, previous, memory))
    views = (E1.view(1, 1, 1, 2), E2.view(1, 1, 1, 2))
    assert float(first(step_at(model, *views))) == 0  # nothing is known of a previous round
    local = local_round(model, received, previous, memory)
    term = part.start_round(local)
    value = term(step_at(model, *views))
    assert float(value.detach()) == pytest.approx(2 * math.log(4), rel=1e-6)
    assert local.logged()["alignment_loss"] == pytest.approx(math.log(4), rel=1e-6)
    value.backward()
    gradient = model.online["projector"].weight.grad
    # pulling e1 to e2 and e2 to -e1 turns by 90 degrees; along the rows nothing changes the cosine
    assert gradient[1, 0] < 0 < gradient[0, 1]
    assert gradient[0, 0] == pytest.approx(0, abs=1e-6)


def test_the_alignment_begins_anew_with_every_stage_and_passes_frozen_layers_once():
    part = RepresentationAlignment(name="representation_alignment")
    encoder, memory, view = staged("small_resnet10"), Message(), images()
    model = Model({"encoder": encoder, "projector": nn.Linear(128, 8)})
    calls: list[int] = []
    for layer in (0, 1):
        encoder.switches(layer)[0].module.register_forward_hook(lambda m, i, o, layer=layer: calls.append(layer))
    values = []
    for active, frozen in ([[0], []], [[1], [0]], [[1], [0]]):
        encoder.use(active, frozen)
        term = part.start_round(local_round(model, Message(), model.online_state(), memory))
        calls.clear()
        values.append(float(term(step_at(model, view)).detach()))
    assert values[:2] == [0, 0]
    assert values[2] == pytest.approx(math.log(2), rel=0.1)  # all three models have the same weights
    assert calls == [0, 1, 1, 1]
