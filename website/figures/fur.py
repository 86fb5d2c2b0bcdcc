"""Points of the sphere that follow the gradient of FedU2's uniformity term, by `fedssl.regularizers.uniformity`."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.client import LocalRound
from fedssl.objectives.base import Step
from fedssl.regularizers.uniformity import Uniformity
from website.figures.sliders import Slider, interactive

POINTS, STEPS, RATE = 36, 40, 0.12


class OneRound:
    """What the term needs of a client's round: a seeded generator, and a place for its metrics."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def device_generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def log(self, name: str, value: Any) -> None:
        self.metrics[name] = float(value)


def flow() -> tuple[Tensor, Tensor, Tensor]:
    """The points [STEPS + 1, POINTS, 3], and by step the term per point and the share of the mass that it moves."""
    generator = torch.Generator().manual_seed(0)
    centre = F.normalize(torch.tensor([0.55, 0.35, 0.75]), dim=0)
    points = F.normalize(centre + 0.28 * torch.randn(POINTS, 3, generator=generator), dim=1)
    local = OneRound()
    term = Uniformity(weight=1.0, draws=32).start_round(cast(LocalRound, local))
    positions, values, masses = [], [], []
    for _ in range(STEPS + 1):
        points = points.detach().requires_grad_()
        value = term(Step(loss=torch.zeros(()), representations=(points,), projections=(points,)))
        (gradient,) = torch.autograd.grad(value, points)
        positions.append(points.detach())
        values.append(value.detach() / POINTS)
        masses.append(torch.tensor(local.metrics["uniformity_mass"]))
        points = F.normalize(points.detach() - RATE * gradient, dim=1)
    return torch.stack(positions), torch.stack(values), torch.stack(masses)


def figure() -> str:
    positions, values, masses = flow()
    return interactive(
        "fur",
        "A sphere with points that begin in one cluster and spread over the sphere, step by step.",
        250,
        [Slider("step", "Step of gradient descent", [str(step) for step in range(STEPS + 1)])],
        {
            "positions": [[[round(c, 2) for c in point] for point in step] for step in positions.tolist()],
            "value": [round(value, 3) for value in values.tolist()],
            "mass": [round(mass, 3) for mass in masses.tolist()],
            "resultant": [round(length, 3) for length in positions.mean(dim=1).norm(dim=-1).tolist()],
        },
        "The term draws representations to random points of the sphere. The length of the mean is 1 where all points "
        "are one (collapse) and 0 where they are spread evenly. Hollow points are on the far side.",
    )
