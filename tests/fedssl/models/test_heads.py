"""The heads: the sequence of layers, where biases stand, and the shapes."""

import pytest
import torch
from torch import nn

from fedssl.errors import UserError
from fedssl.models.model import mlp_head


def structure(head):
    return [type(layer).__name__ for layer in head]


def test_two_layers_are_linear_norm_relu_linear():
    head = mlp_head(6, 10, 4)
    assert structure(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert (head[0].in_features, head[0].out_features) == (6, 10)
    assert head[1].num_features == 10
    assert (head[3].in_features, head[3].out_features) == (10, 4)
    assert head[0].bias is None
    assert head[3].bias is not None
    assert head(torch.randn(5, 6)).shape == (5, 4)


def test_simsiam_projector():
    head = mlp_head(6, 10, 4, layers=3, last_batch_norm=True)
    assert structure(head) == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert [layer.bias is None for layer in head if isinstance(layer, nn.Linear)] == [True, True, True]
    assert (head[-1].num_features, head[-1].affine) == (4, False)
    # What the last BatchNorm is there for: standardised outputs.
    output = head(torch.randn(64, 6))
    torch.testing.assert_close(output.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.var(dim=0, correction=0), torch.ones(4), atol=1e-2, rtol=0)


def test_without_batch_norm_every_layer_has_a_bias():
    head = mlp_head(6, 10, 4, layers=3, batch_norm=False)
    assert structure(head) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert all(layer.bias is not None for layer in head if isinstance(layer, nn.Linear))
    assert head(torch.randn(1, 6)).shape == (1, 4)


def test_one_layer_ignores_the_hidden_size():
    head = mlp_head(6, 10, 4, layers=1)
    assert structure(head) == ["Linear"]
    assert (head[0].in_features, head[0].out_features, head[0].bias is None) == (6, 4, False)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((0, 1, 1, 1), "in_features"),
        ((1, 0, 1, 1), "hidden_features"),
        ((1, 1, 0, 1), "out_features"),
        ((1, 1, 1, 0), "layers"),
    ],
)
def test_sizes_below_one_are_errors(sizes, name):
    with pytest.raises(UserError, match=f"{name}: expected at least 1, got 0"):
        mlp_head(*sizes)
