"""The distance from the received global model, by representations and by weights, on numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.regularizers.distance_to_global import DistanceToGlobal
from tests.fedssl.regularizers.test_alignment_terms import local_round


def linear_model(rows) -> Model:
    """The encoder multiplies two pixels by the rows; there are no heads."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows))
    return Model({"encoder": nn.Sequential(nn.Flatten(), layer)})


def received(rows) -> Message:
    return Message({"online.encoder.1.weight": torch.tensor(rows)})


def step_at(model: Model, *views: torch.Tensor) -> Step:
    return Step(torch.zeros(()), tuple(model.encoder(view) for view in views), views=views)


def pixels(*pairs) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float32).reshape(-1, 1, 1, 2)


def test_the_distance_of_representations_by_hand():
    """The own model is the identity, the global one swaps its two outputs.

    View 1 has the images (1, 0) and (3, 3): at distances |(1, 0) - (0, 1)|^2 = 2 and 0, so the mean is 1.
    View 2 has (0, 2) and (5, 0): both at distance 2 whatever their length. The mean over the views is 1.5.
    """
    model = linear_model([[1.0, 0.0], [0.0, 1.0]])
    local = local_round(model, received([[0.0, 1.0], [1.0, 0.0]]))
    term = DistanceToGlobal(name="distance_to_global", weight=0.4).start_round(local)
    value = term(step_at(model, pixels((1, 0), (3, 3)), pixels((0, 2), (5, 0))))
    assert float(value.detach()) == pytest.approx(0.4 / 2 * 1.5)
    assert local.logged()["global_distance"] == pytest.approx(1.5)
    value.backward()
    assert float(model.encoder[1].weight.grad.abs().sum()) > 0
    # Along the representation itself nothing pulls, as only directions count: for (1, 0) only row 1 has a gradient.
    alone = linear_model([[1.0, 0.0], [0.0, 1.0]])
    term = DistanceToGlobal(name="distance_to_global", weight=0.4).start_round(
        local_round(alone, received([[0.0, 1.0], [1.0, 0.0]]))
    )
    term(step_at(alone, pixels((1, 0)))).backward()
    torch.testing.assert_close(alone.encoder[1].weight.grad, torch.tensor([[0.0, 0.0], [-0.4, 0.0]]))


def test_the_distance_of_weights_by_hand():
    """Two weights differ, by 0.3 and -0.4: lambda / 2 (0.09 + 0.16) = 0.025 for 0.2, gradient lambda (v - w)."""
    model = linear_model([[1.3, 2.0], [3.0, 3.6]])
    local = local_round(model, received([[1.0, 2.0], [3.0, 4.0]]))
    term = DistanceToGlobal(name="distance_to_global", of="weights", weight=0.2).start_round(local)
    value = term(step_at(model, pixels((1, 1))))
    assert float(value.detach()) == pytest.approx(0.025)
    value.backward()
    torch.testing.assert_close(model.encoder[1].weight.grad, torch.tensor([[0.06, 0.0], [0.0, -0.08]]))


@pytest.mark.parametrize("of", ["representations", "weights"])
def test_equal_weights_have_distance_0_in_training_and_no_statistics_change(of, tiny):
    model = build_federation(tiny()).new_model(0).train()
    message = Message({name: t.clone() for name, t in model.state_dict().items() if name.startswith("online.")})
    local = local_round(model, message)
    term = DistanceToGlobal(name="distance_to_global", of=of).start_round(local)
    views = tuple(torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    step = Step(torch.zeros(()), tuple(model.encoder(view) for view in views), views=views)
    after_forward = {name: t.clone() for name, t in model.state_dict().items()}
    assert float(term(step).detach()) == pytest.approx(0.0, abs=1e-9)
    assert all(torch.equal(t, after_forward[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(message.tensors[name], t) for name, t in local.received.tensors.items())


def test_without_a_global_model_it_is_refused(tiny):
    with pytest.raises(UserError, match="distance_to_global works with the global model"):
        build_federation(tiny(regularizers=["distance_to_global"]))
