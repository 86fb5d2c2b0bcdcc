"""What stands for local training of small models."""

from __future__ import annotations

import torch

from fedssl.client import LocalRound
from fedssl.messages import Message
from fedssl.models.model import Model
from tests.fedssl.small_models import local_round


def online(model: Model) -> Message:
    return Message({name: t.clone() for name, t in model.state_dict().items() if name.startswith("online.")})


def move(model: Model, by: float, second: float | None = None, predictor: float | None = None) -> None:
    """What stands for local training."""
    with torch.no_grad():
        model.encoder[0].weight += by
        if second is not None:
            model.encoder[1].weight += second
        if predictor is not None:
            model.online["predictor"].weight.fill_(predictor)


def one_round(part, model, memory, received, number, **moved) -> LocalRound:
    local = local_round(model, received, number, memory=memory)
    after_training = part.receive(local)
    move(model, **moved)
    after_training()
    return local
