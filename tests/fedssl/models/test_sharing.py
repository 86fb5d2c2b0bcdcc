"""Which networks processes can share the batches of."""

from __future__ import annotations

import re

import pytest
from timm.layers import DropPath
from torch import nn

from fedssl.models.encoders import build_encoder, encoder_names
from fedssl.models.view_threads import sharing_problem


@pytest.mark.parametrize("architecture", [*encoder_names(), "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_known_networks_can_be_shared(architecture):
    assert sharing_problem(build_encoder(architecture, 3, 32)) is None


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (nn.Dropout(0.1), r"0 \(Dropout\) drops values at random"),
        (nn.AlphaDropout(0.5), r"0 \(AlphaDropout\) drops values at random"),
        (DropPath(0.1), r"0 \(DropPath\) drops values at random"),
        (nn.InstanceNorm2d(3, track_running_stats=True), r"0 \(InstanceNorm2d\) has running statistics"),
    ],
)
def test_a_layer_that_cannot_be_shared_is_named(layer, problem):
    found = sharing_problem(nn.Sequential(layer))
    assert found is not None
    assert re.match(problem, found)


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), DropPath(0.0), nn.InstanceNorm2d(3), nn.BatchNorm2d(3)])
def test_a_layer_that_can_be_shared(layer):
    assert sharing_problem(nn.Sequential(layer)) is None
