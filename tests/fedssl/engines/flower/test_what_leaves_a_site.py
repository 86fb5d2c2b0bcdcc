"""No image or label of a site is in any message that leaves it."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedssl.aggregators.weighted_mean import WeightedMean
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.flower.loop_grid import KINDS, run_on, start, write_sites


def images_in(data: bytes, images: torch.Tensor) -> int:
    """How many of the images stand in some bytes, as they are, scaled to 0..1, or in any float type of that."""
    count = 0
    for image in images:
        forms = [image, image.float(), image.float() / 255, image.half(), (image.float() / 255).bfloat16()]
        forms += [2 * (image.float() / 255) - 1]
        count += any(form.contiguous().view(torch.uint8).numpy().tobytes() in data for form in forms)
    return count


def bytes_of(messages: list[FlowerMessage]) -> bytes:
    return b"".join(part.deflate() for message in messages for part in get_all_nested_objects(message).values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_of_a_site_leaves_it(kind, quick, tmp_path):
    recipe = quick(**KINDS[kind])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    run_on(recipe, directory, grid)
    federation = build_federation(recipe)
    assert len(grid.sent) >= 6
    assert images_in(bytes_of(grid.sent), federation.dataset.train_images) == 0
    labels = federation.dataset.train_labels[federation.client_rows[0]]
    assert labels.numpy().tobytes() not in bytes_of(grid.sent)


def test_this_search_finds_an_image_that_leaves(quick, tmp_path, monkeypatch):
    real = WeightedMean.collect

    def leak(part, local, travelling):
        message = real(part, local, travelling)
        message.tensors["batch"] = local.client.images[:5].float() / 255
        return message

    monkeypatch.setattr(WeightedMean, "collect", leak)
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    with pytest.raises(UserError, match="batch was not asked for"):
        run_on(recipe, directory, grid)
    assert images_in(bytes_of(grid.sent), build_federation(recipe).dataset.train_images) >= 5
