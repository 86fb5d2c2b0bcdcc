"""EUA's weights of two clients' updates in the plane, by `fedssl.aggregators.eua.least_norm_step`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedssl.aggregators.eua import UpdateDivisor, least_norm_step
from website.figures.sliders import Slider, interactive

#: the first client's update: degrees from the right, counted upwards, and length
FIRST = (30, 1.0)
ANGLES = tuple(range(-180, 180, 15))
LENGTHS = tuple(quarter / 4 for quarter in range(1, 7))
DIVISORS: tuple[UpdateDivisor, ...] = ("squared_length", "length")


def updates(angle: float, length: float) -> Tensor:
    """The clients' updates, float64 [2, 2]."""
    return torch.tensor(
        [
            [size * math.cos(math.radians(degrees)), size * math.sin(math.radians(degrees))]
            for degrees, size in (FIRST, (angle, length))
        ],
        dtype=torch.float64,
    )


def table() -> tuple[list[list[float]], list[list[float]]]:
    """p and the shares of both clients, for every angle, length and divisor, in this order of the axes."""
    p, shares = [], []
    for angle in ANGLES:
        for length in LENGTHS:
            deltas = updates(angle, length)
            for divisor in DIVISORS:
                weights, step = least_norm_step(deltas @ deltas.T, divisor, [1.0, 1.0])
                p.append([round(value, 3) for value in weights.tolist()])
                shares.append([round(value, 3) for value in step.tolist()])
    return p, shares


def figure() -> str:
    p, shares = table()
    return interactive(
        "eua",
        "Two arrows from one point: how far and in which direction each client moved. A thick arrow is the step that "
        "EUA takes, a dashed one the clients' mean.",
        250,
        [
            Slider("angle", "Client 2's direction", [f"{angle}°" for angle in ANGLES], start=ANGLES.index(-45)),
            Slider("length", "Client 2's length", [f"{length:g}" for length in LENGTHS], start=LENGTHS.index(0.5)),
            Slider("divisor", "Updates divided by", [divisor.replace("_", " ") for divisor in DIVISORS]),
        ],
        {
            "first": FIRST,
            "angles": ANGLES,
            "lengths": LENGTHS,
            "p": p,
            "shares": shares,
        },
        "<i>p</i> is the paper's weight; the share is what of each update is in the step. Along the step every client "
        "whose <i>p</i> is above 0 gets nearer at the same rate (exactly so for a short step). A client that moved "
        "less than the other in nearly the same direction gets 0, and where both moved apart no step helps both.",
    )
