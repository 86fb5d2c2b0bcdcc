"""CKA of some points and the same points turned, scaled and mixed with other ones, by `fedkernels.linear_cka`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedkernels import linear_cka
from website.figures.sliders import Slider, interactive

POINTS = 14
TURNS = tuple(range(0, 360, 30))  # degrees
SCALES = tuple(quarter / 4 for quarter in range(1, 9))
SHARES = tuple(percent / 100 for percent in range(0, 101, 10))


def representations() -> tuple[Tensor, Tensor]:
    """x and the other points that it is mixed with: float64 [POINTS, 2], at most 1 from the origin."""
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(2, POINTS, 2, generator=generator, dtype=torch.float64)
    points = points - points.mean(dim=1, keepdim=True)
    points = points / points.norm(dim=-1).amax(dim=1)[:, None, None]
    x, other = (points.round(decimals=3)).unbind()
    return x, other


def changed(x: Tensor, other: Tensor) -> Tensor:
    """The second representation for every position of the sliders, [turns, scales, shares, POINTS, 2]."""
    angles = torch.tensor([math.radians(turn) for turn in TURNS], dtype=torch.float64)
    cosine, sine = angles.cos(), angles.sin()
    rotations = torch.stack([torch.stack([cosine, sine], -1), torch.stack([-sine, cosine], -1)], -2)
    shares = torch.tensor(SHARES, dtype=torch.float64)[:, None, None]
    mixed = (1 - shares) * x + shares * other
    scales = torch.tensor(SCALES, dtype=torch.float64)[:, None, None, None]
    return scales * (mixed @ rotations[:, None, None])


def figure() -> str:
    x, other = representations()
    y = changed(x, other)
    similarity = linear_cka(x.expand_as(y), y, centered=True)
    distance = (x - y).norm(dim=-1).mean(dim=-1)
    return interactive(
        "cka",
        "Two clouds of numbered points. The second one is the first one turned, scaled and mixed with other points.",
        190,
        [
            Slider("turn", "Turn", [f"{turn}°" for turn in TURNS], start=1),
            Slider("scale", "Scale", [f"{scale:g}" for scale in SCALES], start=2),
            Slider("share", "Other points mixed in", [f"{share:.0%}" for share in SHARES]),
        ],
        {
            "x": x.tolist(),
            "other": other.tolist(),
            "turns": TURNS,
            "scales": SCALES,
            "shares": SHARES,
            "cka": _rounded(similarity),
            "distance": _rounded(distance),
        },
        "Turning and scaling a representation moves every point and leaves CKA at 1: clients whose networks have "
        "different coordinates can still be compared. Only another arrangement of the points lowers it.",
    )


def _rounded(values: Tensor) -> list[float]:
    """A table by the sliders as one list, the first slider's axis first."""
    return [round(value, 3) for value in values.flatten().tolist()]
