"""FedCA's dictionary, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedssl.aggregators.base import OWN_IMAGES, PROJECTION
from fedssl.aggregators.dictionary import DICTIONARY, Dictionary
from fedssl.guard import Asked, refusals
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


@pytest.mark.parametrize(("samples", "rows"), [(None, 9), (4, 4), (12, 9)])
def test_a_client_sends_a_projection_of_each_of_its_images_unless_told_how_many(samples, rows):
    model = Model({"encoder": nn.Flatten(), "projector": Scale(FIRST_TWO)})
    images = torch.arange(36, dtype=torch.uint8).reshape(9, 1, 2, 2)
    part = Dictionary(name="dictionary", samples=samples)
    sent = part.collect(local_round(model, images=images, index=1), []).tensors["dictionary.1"]
    assert sent.shape == (rows, 2)
    assert len(sent.unique(dim=0)) == rows  # of different images
    torch.testing.assert_close(sent.norm(dim=1), torch.ones(rows))


def sizes_of_a_round(shares: list[int], features: int) -> tuple[int, int]:
    """Bytes of a dictionary down to one client and, of the first client, up."""
    part = Dictionary(name="dictionary")
    replies = {k: Message({f"dictionary.{k}": torch.zeros(n, features)}) for k, n in enumerate(shares)}
    down = part.broadcast(part.aggregate(Message(), replies), [0], [])[0]
    return down.num_bytes, replies[0].num_bytes


def test_the_traffic_is_that_of_lw_fedssls_table_2():
    """118,287 images of COCO on ten clients, 256 floats each. The table has 30.69 GB for FedCA and 8.03 for FedSimCLR,
    in 180 rounds, a GB being 1000 * 2^20 bytes; round 1 has no dictionary yet. Full batches of 512 are 117,760 images.
    """
    shares = [11829] * 7 + [11828] * 3
    assert sum(shares) == 118287
    down, up = sizes_of_a_round(shares, 256)
    assert (down, up) == (118287 * 1024, 11829 * 1024)  # 121 MB and 12 MB: 133 MB a round
    gigabyte = 1000 * 2**20
    assert (179 * down + 180 * up) / gigabyte == pytest.approx(30.69 - 8.03, rel=0.005)
    down, up = sizes_of_a_round([11776] * 10, 256)
    assert (179 * down + 180 * up) / gigabyte == pytest.approx(30.69 - 8.03, abs=0.01)


def test_a_client_may_send_as_many_projections_as_it_may_have_images():
    """It began with five: up to ten are plausible, as a site may collect more. Of another number nothing is known."""
    expected = Dictionary(name="dictionary").expected(Message(), 0, [])
    assert expected == {"dictionary.0": (OWN_IMAGES, PROJECTION)}

    def refused(rows, samples):
        replies = {k: Message({"dictionary.0": torch.ones(n, 3)}, {"samples": 5.0}) for k, n in enumerate((rows, 5, 4))}
        asked = Asked({k: expected or {} for k in replies}, sizes={PROJECTION: 3}, samples=samples)
        return refusals(Message(), replies, asked, 1e6)

    known = {0: 5, 1: 5, 2: 5}
    assert not refused(5, known)
    assert not refused(10, known)
    assert refused(11, known) == {0: "dictionary.0 has shape [11, 3], expected [1 to 10, 3]"}
    assert refused(0, known) == {0: "dictionary.0 has shape [0, 3], expected [1 to 10, 3]"}
    assert not refused(11, {})
