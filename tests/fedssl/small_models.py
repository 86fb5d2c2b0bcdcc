"""Models small enough to compute by hand, and one client's round with them."""

import math

import torch
from torch import nn

from fedssl.augmentations.random_views import RandomViews
from fedssl.client import Client, LocalRound
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.objectives.byol import BYOL

E1, E2 = torch.eye(2)
#: a temperature at which a cosine of 1 weighs exp(1 / t) = 3 and one of 0 weighs 1
THREE = 1 / math.log(3)
#: weights of a projector from four numbers to two
FIRST_TWO = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0))
SWAPPED = ((0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))


class Flat(nn.Module):
    """An encoder that changes nothing, for images of two pixels."""

    num_features = 2

    def forward(self, images):
        return images.flatten(1)


class Scale(nn.Module):
    """A linear layer without bias: one weight [out, in] to compute with."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def scalar_model(encoder=0.0, second=None, predictor=0.0) -> Model:
    """Networks of one number each; the encoder has two such layers where `second` is given."""
    layers = [Scale([[encoder]])] + ([Scale([[second]])] if second is not None else [])
    online = {"encoder": nn.Sequential(*layers), "projector": Scale([[0.0]]), "predictor": Scale([[predictor]])}
    return Model(online, target_parts=("encoder", "projector"))


def flat_model(projector, predictor=((1.0, 0.0), (0.0, 1.0))) -> Model:
    """Images [n, 1, 2, 2] -> 4 numbers -> 2 by the projector -> 2 by the predictor."""
    return Model({"encoder": nn.Flatten(), "projector": Scale(projector), "predictor": Scale(predictor)})


def local_round(
    model, received=None, number=1, images=None, objective=None, index=0, memory=None, previous=None
) -> LocalRound:
    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8) if images is None else images
    client = Client(index, images, torch.zeros(len(images)), None, model, memory or Message())
    views = RandomViews(crop_scale=(1, 1))
    return LocalRound(client, received or Message(), number, 0, objective or BYOL(), views, previous)


def step_of(*views: torch.Tensor) -> Step:
    """A step whose representations and projections are these."""
    return Step(torch.tensor(0.0), representations=views, projections=views)


def value(model: Model, name: str) -> float:
    return float(model.online[name].state_dict()["weight" if name != "encoder" else "0.weight"])
