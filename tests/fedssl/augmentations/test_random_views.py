"""random_views: fedkernels.two_views with a recipe's options, by keys of the client, the round and the purpose."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from pydantic import ValidationError

from fedkernels import ViewKey, ViewOptions, two_views
from fedkernels.internal import native
from fedssl.augmentations.base import draw_views
from fedssl.augmentations.random_views import RandomViews
from fedssl.client import Client, LocalRound
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.simsiam import SimSiam

KEY, CPU = ViewKey(7, client=1, round=2, epoch=3), torch.device("cpu")
IMAGES = torch.randint(0, 256, (12, 3, 17, 13), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ROWS = torch.arange(12)


def local_round(seed: int = 0, client: int = 0, number: int = 1) -> LocalRound:
    model = Model({"encoder": torch.nn.Linear(1, 1)})
    return LocalRound(
        Client(client, IMAGES, torch.zeros(12, dtype=torch.int64), None, model),
        Message(),
        number,
        seed,
        SimSiam(),
        RandomViews(),
    )


def test_the_options_have_the_names_and_defaults_of_fedkernels():
    assert RandomViews().model_dump(exclude={"name"}) == dataclasses.asdict(ViewOptions())


def test_the_options_reach_fedkernels():
    part = RandomViews(crop_scale=(0.3, 0.6), solarize=0.5, hue=0.0, blur_sigma=(0.5, 3))
    options = ViewOptions(crop_scale=(0.3, 0.6), solarize=0.5, hue=0.0, blur_sigma=(0.5, 3))
    for one, other in zip(part.views(IMAGES, ROWS, KEY), two_views(IMAGES, ROWS, KEY, options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip": 1.1},
        {"hue": 0.6},
        {"blur": -0.1},
        {"brightness": -1},
        {"brightness": 1e7},
        {"crop_scale": (0.5, 0.2)},
        {"crop_scale": (0.2, 1.5)},
        {"crop_ratio": (0, 1)},
        {"blur_sigma": (0, 1)},
        {"solarize": 1.2},
        {"posterize": 0.2},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RandomViews(**wrong)


def test_views_do_not_depend_on_the_batch():
    local = local_round()
    expected = local.views(IMAGES, ROWS, "training", epoch=2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for size in (1, 5, 12):
        for rows in order.split(size):
            views = local.views(IMAGES[rows], rows, "training", epoch=2)
            assert all(torch.equal(one, other[rows]) for one, other in zip(views, expected, strict=True))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_any_number_of_views_begins_with_the_same_two(count):
    views = draw_views(RandomViews(), IMAGES, ROWS, KEY, CPU, count)
    assert len(views) == count
    for one, other in zip(views, two_views(IMAGES, ROWS, KEY), strict=False):
        assert torch.equal(one, other)
    for one, other in itertools.combinations(views, 2):
        assert not any(torch.equal(*images) for images in zip(one, other, strict=True))


def test_every_seed_client_round_purpose_and_epoch_has_its_own_views():
    image, row = IMAGES[:1], ROWS[:1]
    views = [
        view
        for seed, client, number in itertools.product((0, 1, 2**70), (-1, 0, 1), (0, 1, 2))
        for purpose, epoch in itertools.product(("training", "public_objective", "memory"), (0, 1))
        for view in local_round(seed, client, number).views(image, row, purpose, epoch)
    ]
    flat = torch.cat(views).flatten(1)
    assert len(flat.unique(dim=0)) == len(flat) == 3 * 3 * 3 * 3 * 2 * 2


def test_views_without_the_compiled_module_are_the_same(monkeypatch):
    compiled = local_round().views(IMAGES, ROWS, "training")
    monkeypatch.setattr(native, "module", None)
    for one, other in zip(compiled, local_round().views(IMAGES, ROWS, "training"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_torchs_generators_are_left_alone():
    local, before = local_round(), torch.get_rng_state()
    local.views(IMAGES, ROWS, "training")
    assert torch.equal(torch.get_rng_state(), before)
