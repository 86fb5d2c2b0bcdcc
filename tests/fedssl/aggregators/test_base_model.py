"""FedCA's base model, sent once and aligned with, by hand."""

from __future__ import annotations

import pytest
import torch

from fedssl.aggregators.base_model import BASE, BaseModel
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.regularizers.base_alignment import BaseAlignment
from tests.fedssl.small_models import local_round, scalar_model, value


def test_the_base_model_is_sent_once_and_kept():
    """Encoders of one number: client 2, base 5. Images 1 and 3: ((2 - 5) 1)^2 = 9 and 81, mean 45, weight 0.1."""
    part = BaseModel(name="base_model")
    server = Message({f"{BASE}0.weight": torch.tensor([[5.0]])})
    down = part.broadcast(server, [0, 1], [])
    assert list(down[0].tensors) == [f"{BASE}0.weight"]
    server.numbers |= part.aggregate(server, {0: Message()}).numbers
    again = part.broadcast(server, [0, 1], [])
    assert again[0].tensors == {}
    assert list(again[1].tensors) == [f"{BASE}0.weight"]
    memory = Message()
    for received in (down[0], again[0]):
        model = scalar_model(2.0)
        local = local_round(model, received, memory=memory)
        term = BaseAlignment(name="base_alignment", weight=0.1).start_round(local)
        images = torch.tensor([[1.0], [3.0]])
        step = Step(torch.tensor(0.0), (model.encoder(images),), views=(images,))
        assert float(term(step).detach()) == pytest.approx(4.5)
        assert value(model, "encoder") == 2.0
