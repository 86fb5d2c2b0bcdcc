"""FedCA's dictionary, by hand."""

from __future__ import annotations

import torch
from torch import nn

from fedssl.aggregators.dictionary import DICTIONARY, Dictionary
from fedssl.messages import Message
from fedssl.models.model import Model
from tests.fedssl.small_models import FIRST_TWO, Scale, local_round


def test_the_dictionary_joins_the_clients_newest_projections():
    model = Model({"encoder": nn.Flatten(), "projector": Scale(FIRST_TWO)})
    # pixel 255 is 2 and 128 about 0.008, so the first image projects to almost e1, the second to almost e2
    images = torch.full((2, 1, 2, 2), 128, dtype=torch.uint8)
    images[0, 0, 0, 0] = images[1, 0, 0, 1] = 255
    part = Dictionary(name="dictionary", samples=5)
    sent = part.collect(local_round(model, images=images, index=1), [])
    assert list(sent.tensors) == ["dictionary.1"]
    rows = sent.tensors["dictionary.1"]
    torch.testing.assert_close(rows[rows[:, 0].argsort(descending=True)], torch.eye(2), rtol=0, atol=0.01)
    server = Message()
    assert part.broadcast(server, [0, 1], [])[0].tensors == {}
    server.tensors |= part.aggregate(server, {1: sent}).tensors
    server.tensors |= part.aggregate(server, {0: Message({"dictionary.0": -torch.eye(2)})}).tensors
    down = part.broadcast(server, [0, 1], [])
    assert torch.equal(down[1].tensors[DICTIONARY], torch.cat([-torch.eye(2), rows]))
