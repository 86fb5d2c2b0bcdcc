"""The target network moves towards those online parameters that train, and towards no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedssl.federation import build_federation
from fedssl.models.model import Model
from tests.fedssl.conftest import AVERAGED

HEADS = {"name": "byol", "hidden_features": 16, "output_features": 8}


@pytest.fixture
def model(tiny) -> Model:
    """Its online parameters are 1, and its target's 0."""
    model = build_federation(tiny(**AVERAGED, objective=HEADS)).new_model(0)
    with torch.no_grad():
        for network, value in ((model.online, 1.0), (model.target, 0.0)):
            for parameter in network.parameters():
                parameter.fill_(value)
    return model


def of(model: Model, part: str) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in model.target[part].parameters()])


def test_parameters_move_by_their_share(model):
    model.update_target(0.75)
    model.update_target(0.75)
    assert torch.equal(of(model, "encoder"), torch.full_like(of(model, "encoder"), 0.4375))
    assert torch.equal(of(model, "projector"), torch.full_like(of(model, "projector"), 0.4375))


@pytest.mark.parametrize("looked_up_once", [False, True])
def test_what_does_not_train_stays(looked_up_once, model):
    model.encoder.requires_grad_(False)
    if looked_up_once:
        with model.same_parameters():
            model.update_target(0.5)
    else:
        model.update_target(0.5)
    assert of(model, "encoder").count_nonzero() == 0
    assert of(model, "projector").unique().tolist() == [0.5]


def test_what_trains_is_looked_up_again_in_the_next_round(model):
    with model.same_parameters():
        model.update_target(0.5)
    model.encoder.requires_grad_(False)
    model.update_target(0.5)
    with model.same_parameters():
        model.update_target(0.5)
    assert of(model, "encoder").unique().tolist() == [0.5]
    assert of(model, "projector").unique().tolist() == [0.875]
