"""MoCo v3's loss and target network, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.objectives.moco_v3 import MoCoV3
from tests.fedssl.conftest import AVERAGED

LABELS = torch.zeros(2)


class Flat(nn.Module):
    """An encoder that changes nothing, for images of two pixels."""

    num_features = 2

    def forward(self, images):
        return images.flatten(1)


def plain_model(part: MoCoV3):
    """A model whose networks hand on what they get; the target projector turns rows by 90 degrees."""
    model = part.build(Flat(), 2)
    for name in model.online:
        model.online[name] = nn.Flatten()
    model.target["projector"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    model.target["projector"].weight.copy_(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    return model


def test_the_loss_by_hand():
    """Once normalised the first view is e1, e2 and the second e2, e2. The keys are turned: of the first e2, -e1, of the
    second -e1, -e1. With s = 1 / t: info_nce of (e1, e2) against (-e1, -e1) is log 2 in each row; of (e2, e2) against
    (e2, -e1) it is log(e^s + 1) - s in the first row and log(e^s + 1) in the second.
    """
    s = 2.0
    part = MoCoV3(name="moco_v3", temperature=1 / s)
    one, two = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 4.0], [0.0, 2.0]])
    step = part.step(plain_model(part), (one.view(2, 1, 1, 2), two.view(2, 1, 1, 2)), LABELS)
    log = math.log(math.exp(s) + 1)
    assert float(step.loss) == pytest.approx(math.log(2) + (log - s + log) / 2, rel=1e-6)
    assert torch.equal(step.predictions[0], one)
    assert torch.equal(step.representations[1], two)


def test_the_heads_have_the_papers_sizes():
    model = MoCoV3(name="moco_v3").build(Flat(), 2)
    sizes = {
        name: [(layer.in_features, layer.out_features) for layer in model.online[name] if isinstance(layer, nn.Linear)]
        for name in ("projector", "predictor")
    }
    assert sizes == {"projector": [(2, 512), (512, 512), (512, 256)], "predictor": [(256, 512), (512, 256)]}
    for name in sizes:
        assert isinstance(model.online[name][-1], nn.BatchNorm1d)
        assert not model.online[name][-1].affine
    assert set(model.target) == {"encoder", "projector"}
    assert (MoCoV3(name="moco_v3").temperature, MoCoV3(name="moco_v3").target_momentum) == (0.05, 0.99)


def test_no_gradient_reaches_the_target_network_which_follows_by_its_momentum():
    torch.manual_seed(0)
    part = MoCoV3(name="moco_v3", hidden_features=4, output_features=3, target_momentum=0.75)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    encoder.num_features = 2
    model = part.build(encoder, 2)
    before = model.target["encoder"][1].weight.clone()
    views = (torch.randn(4, 1, 1, 2), torch.randn(4, 1, 1, 2))
    part.step(model, views, LABELS).loss.backward()
    assert all(p.grad is None for p in model.target.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.online["encoder"].parameters())
    with torch.no_grad():
        model.encoder[1].weight += 1.0
    part.after_step(model)
    torch.testing.assert_close(model.target["encoder"][1].weight, before + 0.25)


@pytest.mark.parametrize("fresh", [True, False])
def test_the_target_starts_a_round_as_a_copy_where_asked(fresh, tiny, monkeypatch):
    objective = {"name": "moco_v3", "hidden_features": 8, "output_features": 4, "fresh_target_each_round": fresh}
    federation = build_federation(tiny(**AVERAGED, objective=objective))
    method, state = federation.method, Message()
    server = method.initial_state()
    client = federation.client(0, state)
    reply = method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
    server = method.aggregate(server, {0: reply}, 1)
    client = federation.client(0, federation.client_state(client, 1))
    monkeypatch.setattr("fedssl.method.train_locally", lambda *arguments: None)
    method.client_round(client, method.broadcast(server, [0], 2)[0], 2)
    pairs = zip(client.model.target.parameters(), client.model.online.parameters(), strict=False)
    assert all(torch.equal(old, new) for old, new in pairs) is fresh
