"""Orchestra's loss, turned images and memory, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedssl.objectives.orchestra import Orchestra, OrchestraModel, cluster_loss, turn
from tests.fedssl.small_models import E1, E2


def test_cluster_loss_of_two_images():
    """t = 1, centroids e1, e2. A target at e1 wants (e, 1) / (e + 1) = (p, q). An online e1 gives it: the entropy of
    (p, q); an online e2 gives (q, p): -p ln q - q ln p.
    """
    p = math.e / (math.e + 1)
    q = 1 - p
    centroids = torch.stack([E1, E2])
    target = torch.stack([E1, E1])
    agreeing = -p * math.log(p) - q * math.log(q)
    opposed = -p * math.log(q) - q * math.log(p)
    loss = cluster_loss(torch.stack([E1, E2]), target, centroids, 1.0)
    assert float(loss) == pytest.approx((agreeing + opposed) / 2)


def test_images_are_turned_by_their_place():
    images = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(5, 1, 2, 2)
    turned, turns = turn(images)
    assert turns.tolist() == [0, 1, 2, 3, 0]
    assert turned[:4, 0].tolist() == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def orchestra_model(features=2, clusters=2, memory=3) -> OrchestraModel:
    encoder = nn.Flatten()
    encoder.num_features = 4
    model = Orchestra(features=features, clusters=clusters, memory=memory).build(encoder, 10)
    assert isinstance(model, OrchestraModel)
    return model


def test_the_memory_drops_the_oldest():
    model = orchestra_model()
    model.remember(torch.stack([E1, E2]))
    model.remember(torch.stack([-E1, -E2]))
    assert torch.equal(model.memory, torch.stack([E2, -E1, -E2]))
    model.remember(torch.stack([E1, E1, E2, E2]))
    assert torch.equal(model.memory, torch.stack([E1, E2, E2]))
