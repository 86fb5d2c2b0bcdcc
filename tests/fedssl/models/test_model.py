"""A model's heads, layer by layer, and its target network, which moves towards those parameters that train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.models.model import Model, mlp_head
from tests.fedssl.conftest import AVERAGED

BLOCK = ["Linear", "BatchNorm1d", "ReLU"]


@pytest.mark.parametrize(
    ("options", "layers", "sizes", "biases"),
    [
        ({}, [*BLOCK, "Linear"], [(6, 10), (10, 4)], [False, True]),
        ({"layers": 1}, ["Linear"], [(6, 4)], [True]),
        (
            {"layers": 3, "last_batch_norm": True},  # SimSiam's projector
            *([*BLOCK, *BLOCK, "Linear", "BatchNorm1d"], [(6, 10), (10, 10), (10, 4)], [False] * 3),
        ),
        (
            {"layers": 3, "batch_norm": False},
            *(["Linear", "ReLU", "Linear", "ReLU", "Linear"], [(6, 10), (10, 10), (10, 4)], [True] * 3),
        ),
    ],
)
def test_the_layers_of_a_head(options, layers, sizes, biases):
    head = mlp_head(6, 10, 4, **options)
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [type(layer).__name__ for layer in head] == layers
    assert [(layer.in_features, layer.out_features) for layer in linear] == sizes
    assert [layer.bias is not None for layer in linear] == biases
    output = head(torch.randn(64, 6))
    assert output.shape == (64, 4)
    if "last_batch_norm" in options:  # for standardised outputs
        assert head[-1].affine is False
        torch.testing.assert_close(output.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(output.var(dim=0, correction=0), torch.ones(4), atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", ["in_features", "hidden_features", "out_features", "layers"])
def test_sizes_below_one_are_errors(name):
    sizes = {"in_features": 1, "hidden_features": 1, "out_features": 1, "layers": 1}
    with pytest.raises(UserError, match=f"{name}: expected at least 1, got 0"):
        mlp_head(**sizes | {name: 0})


@pytest.fixture
def model(noisy) -> Model:
    """Its online parameters are 1, and its target's 0."""
    heads = {"name": "byol", "hidden_features": 16, "output_features": 8}
    model = build_federation(noisy(**AVERAGED, objective=heads)).new_model(0)
    with torch.no_grad():
        for network, value in ((model.online, 1.0), (model.target, 0.0)):
            for parameter in network.parameters():
                parameter.fill_(value)
    return model


def test_images_are_represented_by_the_encoder_or_the_whole_online_network(model):
    images = torch.randn(3, 1, 8, 8)
    assert [model.represent(images, layer).shape for layer in ("encoder", "predictor")] == [(3, 128), (3, 8)]


def of(model: Model, part: str) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in model.target[part].parameters()])


def test_parameters_move_by_their_share(model):
    model.update_target(0.75)
    model.update_target(0.75)
    for part in ("encoder", "projector"):
        assert torch.equal(of(model, part), torch.full_like(of(model, part), 0.4375))


def test_what_does_not_train_stays(model):
    model.encoder.requires_grad_(False)
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
