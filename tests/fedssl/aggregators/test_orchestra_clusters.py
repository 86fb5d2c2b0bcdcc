"""Orchestra's local and global clustering, by hand."""

from __future__ import annotations

import math

import torch

from fedssl.aggregators.orchestra_clusters import (
    GLOBAL,
    LOCAL,
    OrchestraClusters,
    cluster_globally,
    cluster_locally,
    equal_assignment,
)
from fedssl.messages import Message


def test_equal_assignment_by_hand():
    """With sharpness ln 3, cosines (1, 0) and (0, 1) give rows (3, 1) / 4 and (1, 3) / 4: columns sum to 1 already.
    Two equal rows (a, b) must share both clusters: each column is scaled to sum 1, so every entry is 1/2.
    """
    plan = equal_assignment(torch.eye(2), 100, sharpness=math.log(3))
    torch.testing.assert_close(plan, torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    plan = equal_assignment(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 100)
    torch.testing.assert_close(plan, torch.full((2, 2), 0.5))


def test_equal_assignment_fills_every_cluster():
    scores = torch.rand(60, 6, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, 0, 0, 0, 0, 0])
    plan = equal_assignment(scores, 1000)
    torch.testing.assert_close(plan.sum(dim=1), torch.ones(60))
    torch.testing.assert_close(plan.sum(dim=0), torch.full((6,), 10.0), rtol=0.05, atol=0)


def at(*degrees: float) -> torch.Tensor:
    radians = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_local_and_global_clusters_of_two_clients():
    """Client a remembers 0, 10, 90 and 100 degrees: centroids at 5 and 95. Client b 10, 20, 100, 110: 15 and 105.
    The server's two clusters part {5, 15} from {95, 105}.
    """
    found = []
    for index, degrees in enumerate([(0, 10, 90, 100), (10, 20, 100, 110)]):
        for seed in range(5):  # whatever the first centroids are
            centroids = cluster_locally(at(*degrees), 2, torch.Generator().manual_seed(seed))
            order = centroids[:, 1].argsort()
            torch.testing.assert_close(centroids[order], at(5 + 10 * index, 95 + 10 * index))
        found.append(centroids[order])
    part = OrchestraClusters(name="orchestra_clusters", local_clusters=2)
    replies = {k: Message({LOCAL: c}, {"samples": 1}) for k, c in enumerate(found)}
    state = part.aggregate(Message({GLOBAL: at(40, 60)}), replies)
    chosen = (torch.cat(found) @ state.tensors[GLOBAL].T).argmax(dim=1).tolist()
    assert chosen == [0, 1, 0, 1]
    torch.testing.assert_close(state.tensors[GLOBAL].norm(dim=1), torch.ones(2))
    assert state.metrics == {"clusters_used/global": 2}


def test_one_step_of_the_global_clustering_by_hand():
    """Points e1 (client a) and e2 (client b), centroids e1, e2, t = 1.

    Sharpness 25 makes the wanted assignments e1, e2 (to 1e-11). With u = s_11 - s_12 the first point's cosine is
    f = 1 / sqrt(1 + exp(-2u)), df/du = exp(-2u) (1 + exp(-2u))^(-3/2) = 0.111873 at u = 1. The loss is minus the mean
    of two such: dL/dc_1 = -0.0559367 e1 + 0.0559367 e2, plus weight decay 1e-4 e1. A step of 0.01 and normalising:
    c_1 = (1.000558, -0.000559367) / norm = (0.9999998, -0.000559055), and c_2 the mirror image.
    """
    points = torch.eye(2)
    moved = cluster_globally(points, torch.eye(2), 1.0, steps=1)
    large, small = 0.9999998, -0.000559055
    torch.testing.assert_close(moved, torch.tensor([[large, small], [small, large]]), rtol=0, atol=5e-7)
