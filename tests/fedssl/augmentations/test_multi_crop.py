"""Multi-crop: two views of most of an image and small ones of a part of it, for networks that take both sizes."""

import pytest
import torch

from fedkernels import ViewKey
from fedssl.augmentations.base import draw_views
from fedssl.augmentations.multi_crop import MultiCrop
from fedssl.augmentations.random_views import RandomViews
from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.rounds_in_memory import train_rounds

KEY, CPU, ROWS = ViewKey(7, client=1, round=2, epoch=3), torch.device("cpu"), torch.arange(40)
#: each pixel has its column and row, so that a view shows where it was cut out
RAMP = torch.arange(32, dtype=torch.uint8) * 8
IMAGES = torch.stack([RAMP.expand(32, 32), RAMP[:, None].expand(32, 32), torch.zeros(32, 32, dtype=torch.uint8)])
IMAGES = IMAGES.expand(40, 3, 32, 32).contiguous()
CROPS_ALONE = {"crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter_probability": 0.0, "grayscale": 0.0, "blur": 0.0}


def test_the_first_two_views_are_those_of_random_views_and_the_others_small_and_of_a_part():
    part = MultiCrop(**CROPS_ALONE)
    views = draw_views(part, IMAGES, ROWS, KEY, CPU, count=5)
    assert [list(view.shape[2:]) for view in views] == [[32, 32]] * 2 + [[16, 16]] * 3
    plain = RandomViews(**CROPS_ALONE, crop_scale=(0.4, 1.0))
    assert all(map(torch.equal, views[:2], draw_views(plain, IMAGES, ROWS, KEY, CPU)))
    columns = normalize(RAMP).max() - normalize(RAMP).min()
    for view, least, most in (*((one, 0.4, 1.0) for one in views[:2]), *((one, 0.05, 0.4) for one in views[2:])):
        sides = (view[:, :2].amax(dim=(2, 3)) - view[:, :2].amin(dim=(2, 3))) / columns * 31 / 32 + 1 / 32
        areas = sides[:, 0] * sides[:, 1]
        assert 0.75 * most < areas.max() < most + 0.05
        assert 0.7 * least < areas.min() < least + 0.15
    assert not torch.equal(views[2], views[3])


def test_a_small_view_is_the_mean_of_what_it_shows_and_depends_on_key_and_sample_alone():
    whole = MultiCrop(**CROPS_ALONE, local_scale=(1.0, 1.0))
    small = draw_views(whole, IMAGES, ROWS, KEY, CPU, count=3)[2]
    inside = (slice(None), slice(None), slice(1, -1), slice(1, -1))  # the filter is cut off at the border
    expected = torch.nn.functional.avg_pool2d(normalize(IMAGES), 2)
    torch.testing.assert_close(small[inside], expected[inside])
    part, some = MultiCrop(), torch.tensor([3, 31])
    all_views = draw_views(part, IMAGES, ROWS, KEY, CPU, count=4)
    assert all(
        torch.equal(view[some], alone)
        for view, alone in zip(all_views, draw_views(part, IMAGES[some], some, KEY, CPU, count=4), strict=True)
    )


@pytest.mark.parametrize(
    ("objective", "side", "reason"),
    [("dino", 0.4, "3x3 pixels .*divisible by patch size"), ("orchestra", 0.5, "4x4 pixels .*doesn't match model")],
)
def test_a_network_that_does_not_take_small_views_is_refused(noisy, objective, side, reason):
    recipe = noisy(
        objective=objective,
        architectures=["small_vit"],
        augmentation={"name": "multi_crop", "local_side": side},
        aggregators=["weighted_mean", *(["orchestra_clusters"] if objective == "orchestra" else [])],
        local_update="replace",
    )
    with pytest.raises(UserError, match=f"small_vit does not take the further views of {reason}.*local_side"):
        build_federation(recipe)


def test_ranges_are_refused_by_name():
    for options in ({"local_scale": (0.5, 0.1)}, {"local_side": 1.5}, {"crop_scale": (2.0, 3.0)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            MultiCrop(**options)


@pytest.mark.parametrize(
    "schedule", ["end_to_end", {"name": "layer_wise", "layers_per_stage": 2, "rounds_per_stage": 1}]
)
def test_a_vision_transformer_trains_on_both_sizes_and_represents_images_as_before(noisy, schedule):
    objective = {"name": "dino", "hidden_features": 16, "output_features": 8, "prototypes": 12, "local_views": 2}
    recipe = noisy(
        objective=objective,
        architectures=["small_vit"],
        schedule=schedule,
        aggregators=["weighted_mean"],
        local_update="replace",
        augmentation="multi_crop",
    )
    federation = build_federation(recipe)
    encoder = federation.new_model(None).encoder.eval()
    plain = build_federation(noisy(architectures=["small_vit"])).new_model(None).encoder.eval()
    plain.load_state_dict(getattr(encoder, "network", encoder).state_dict(), strict=schedule == "end_to_end")
    if schedule == "end_to_end":
        images = torch.randn(3, 1, 8, 8)
        torch.testing.assert_close(encoder(images), plain(images), rtol=0, atol=0)
    replies = train_rounds(federation, 2).replies
    assert replies[2][0].metrics["loss"] < replies[1][0].metrics["loss"] * 1.5
