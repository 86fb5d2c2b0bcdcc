"""Terms that compare the model with the received or the previous one, on numbers small enough to compute by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.regularizers.distance_to_global import DistanceToGlobal
from fedssl.regularizers.proximal import Proximal
from fedssl.regularizers.representation_alignment import RepresentationAlignment, model_contrast
from tests.fedssl.models.test_model import images, staged
from tests.fedssl.small_models import E1, E2, THREE, Scale, local_round

IDENTITY, SWAPPED, TURNED = ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, -1.0], [1.0, 0.0]])


def projecting(rows) -> Model:
    """The encoder flattens two pixels, the projector multiplies them by the rows."""
    return Model({"encoder": nn.Flatten(), "projector": Scale(rows)})


def encoding(rows) -> Model:
    """The encoder multiplies two pixels by the rows; there are no heads."""
    return Model({"encoder": Scale(rows)})


def weights(rows, part="encoder") -> Message:
    return Message({f"online.{part}.weight": torch.tensor(rows)})


def step_at(model: Model, *views: torch.Tensor) -> Step:
    representations = tuple(model.encoder(view) for view in views)
    heads = model.online["projector"] if "projector" in model.online else nn.Identity()
    return Step(torch.zeros(()), representations, tuple(map(heads, representations)), views=views)


def pixels(*pairs) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float32).reshape(-1, 1, 1, 2)


# Distances of weights


def test_the_proximal_term_by_hand():
    """Two of four weights move, by 0.3 and -0.4: mu / 2 * (0.09 + 0.16) = 0.025 for mu = 0.2, gradient mu (w - w_t)."""
    model = encoding([[1.0, 2.0], [3.0, 4.0]])
    local = local_round(model)
    term = Proximal(weight=0.2).start_round(local)
    step = step_at(model, pixels((0, 0)))
    assert float(term(step).detach()) == 0
    with torch.no_grad():
        model.encoder.weight += torch.tensor([[0.3, 0.0], [0.0, -0.4]])
    value = term(step)
    assert float(value.detach()) == pytest.approx(0.025)
    value.backward()
    torch.testing.assert_close(model.encoder.weight.grad, torch.tensor([[0.06, 0.0], [0.0, -0.08]]))
    assert local.logged()["proximal_distance"] == pytest.approx(0.25)  # the mean of 0 and 0.5


def test_the_distance_of_weights_to_the_global_ones_by_hand():
    """The same numbers: lambda / 2 (0.09 + 0.16) = 0.025 for 0.2, gradient lambda (v - w)."""
    model = encoding([[1.3, 2.0], [3.0, 3.6]])
    local = local_round(model, weights([[1.0, 2.0], [3.0, 4.0]]))
    value = DistanceToGlobal(of="weights", weight=0.2).start_round(local)(step_at(model, pixels((1, 1))))
    assert float(value.detach()) == pytest.approx(0.025)
    value.backward()
    torch.testing.assert_close(model.encoder.weight.grad, torch.tensor([[0.06, 0.0], [0.0, -0.08]]))


def test_frozen_and_absent_layers_have_no_proximal_distance():
    encoder = staged("small_resnet10")
    encoder.use(active=[1], frozen=[0])
    model = Model({"encoder": encoder, "projector": Scale(IDENTITY)})
    term = Proximal(weight=2.0).start_round(local_round(model))
    step = Step(torch.zeros(()), ())
    with torch.no_grad():
        for layer in (0, 2, 3):
            for parameter in encoder.switches(layer)[0].parameters():
                parameter += 1.0
    assert float(term(step)) == 0
    with torch.no_grad():
        next(encoder.switches(1)[0].parameters()).flatten()[0] += 3.0
    assert float(term(step)) == pytest.approx(9.0, rel=1e-5)


# The distance of representations from those of the received model


def test_the_distance_of_representations_by_hand():
    """The own model is the identity, the global one swaps its two outputs.

    View 1 has the images (1, 0) and (3, 3): at distances |(1, 0) - (0, 1)|^2 = 2 and 0, so the mean is 1.
    View 2 has (0, 2) and (5, 0): both at distance 2 whatever their length. The mean over the views is 1.5.
    """
    part, model = DistanceToGlobal(weight=0.4), encoding(IDENTITY)
    local = local_round(model, weights(SWAPPED))
    value = part.start_round(local)(step_at(model, pixels((1, 0), (3, 3)), pixels((0, 2), (5, 0))))
    assert float(value.detach()) == pytest.approx(0.4 / 2 * 1.5)
    assert local.logged()["global_distance"] == pytest.approx(1.5)
    # Along the representation itself nothing pulls, as only directions count: for (1, 0) only row 1 has a gradient.
    part.start_round(local)(step_at(model, pixels((1, 0)))).backward()
    torch.testing.assert_close(model.encoder.weight.grad, torch.tensor([[0.0, 0.0], [-0.4, 0.0]]))


@pytest.mark.parametrize("of", ["representations", "weights"])
def test_equal_weights_have_distance_0_in_training_and_no_statistics_change(of, tiny):
    model = build_federation(tiny()).new_model(0).train()
    local = local_round(model, Message(model.online_state()).copy())
    term = DistanceToGlobal(of=of).start_round(local)
    views = torch.randn(2, 6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    step = Step(torch.zeros(()), tuple(map(model.encoder, views)), views=tuple(views))
    after_forward = {name: t.clone() for name, t in model.state_dict().items()}
    assert float(term(step).detach()) == pytest.approx(0.0, abs=1e-9)
    assert all(torch.equal(t, after_forward[name]) for name, t in model.state_dict().items())


# Towards the received model and away from the previous one


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
    model, memory = projecting(IDENTITY), Message()
    received, previous = weights(TURNED, "projector"), weights(IDENTITY, "projector").tensors
    part = RepresentationAlignment(weight=2.0, temperature=THREE)
    step = step_at(model, pixels((1, 0)), pixels((0, 1)))
    first = part.start_round(local_round(model, received, memory=memory, previous=previous))
    assert float(first(step)) == 0  # nothing is known of a previous round
    local = local_round(model, received, memory=memory, previous=previous)
    value = part.start_round(local)(step)
    assert float(value.detach()) == pytest.approx(2 * math.log(4), rel=1e-6)
    assert local.logged()["alignment_loss"] == pytest.approx(math.log(4), rel=1e-6)
    value.backward()
    gradient = model.online["projector"].weight.grad
    # pulling e1 to e2 and e2 to -e1 turns by 90 degrees; along the rows nothing changes the cosine
    assert gradient[1, 0] < 0 < gradient[0, 1]
    assert gradient[0, 0] == pytest.approx(0, abs=1e-6)


def test_the_alignment_begins_anew_with_every_stage_and_passes_frozen_layers_once():
    part = RepresentationAlignment()
    encoder, memory, view = staged("small_resnet10"), Message(), images()
    model = Model({"encoder": encoder, "projector": nn.Linear(128, 8)})
    calls: list[int] = []
    for layer in (0, 1):
        encoder.switches(layer)[0].module.register_forward_hook(lambda m, i, o, layer=layer: calls.append(layer))
    values = []
    for active, frozen in ([[0], []], [[1], [0]], [[1], [0]]):
        encoder.use(active, frozen)
        term = part.start_round(local_round(model, memory=memory, previous=model.online_state()))
        calls.clear()
        values.append(float(term(step_at(model, view)).detach()))
    assert values[:2] == [0, 0]
    assert values[2] == pytest.approx(math.log(2), rel=0.1)  # all three models have the same weights
    assert calls == [0, 1, 1, 1]
