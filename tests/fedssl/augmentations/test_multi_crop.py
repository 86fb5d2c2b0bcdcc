"""Multi-crop: two views of most of an image and small ones of a part of it, for networks that take both sizes."""

import pytest
import torch
import torch.nn.functional as F

from fedkernels import ViewKey
from fedssl.augmentations.base import draw_views
from fedssl.augmentations.multi_crop import MultiCrop
from fedssl.augmentations.random_views import RandomViews
from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import train_rounds

KEY, CPU, ROWS = ViewKey(7, client=1, round=2, epoch=3), torch.device("cpu"), torch.arange(40)
#: each pixel has its column and row, so that a view shows where it was cut out
RAMP = torch.arange(32, dtype=torch.uint8) * 8
IMAGES = torch.stack([RAMP.expand(32, 32), RAMP[:, None].expand(32, 32), RAMP.expand(32, 32)]).repeat(40, 1, 1, 1)
CROPS = {"crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter_probability": 0.0, "grayscale": 0.0, "blur": 0.0}


def test_the_first_two_views_are_those_of_random_views_and_the_others_small_and_of_a_part():
    views = draw_views(MultiCrop(**CROPS), IMAGES, ROWS, KEY, CPU, count=5)
    assert [list(view.shape[2:]) for view in views] == [[32, 32]] * 2 + [[16, 16]] * 3
    plain = RandomViews(**CROPS, crop_scale=(0.4, 1.0))
    assert all(map(torch.equal, views[:2], draw_views(plain, IMAGES, ROWS, KEY, CPU)))
    for view, (least, most) in zip(views, [(0.4, 1.0)] * 2 + [(0.05, 0.4)] * 3, strict=True):
        pixels = (view[:, :2].amax(dim=(2, 3)) - view[:, :2].amin(dim=(2, 3))) * 0.25 * 255 / 8 + 1
        areas = pixels.prod(dim=1) / 32**2
        assert 0.75 * most < areas.max() < most + 0.05
        assert 0.7 * least < areas.min() < least + 0.15
    assert not torch.equal(views[2], views[3])


def test_a_small_view_shows_every_pixel_and_depends_on_key_and_sample_alone():
    noise = torch.randint(0, 256, IMAGES.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    small = draw_views(MultiCrop(**CROPS, local_scale=(1.0, 1.0), local_side=0.25), noise, ROWS, KEY, CPU, count=3)[2]
    means = F.avg_pool2d(normalize(noise), 4)
    assert small.std() < 0.25 * normalize(noise).std()  # 0.5 without antialiasing
    assert torch.corrcoef(torch.stack([small.flatten(), means.flatten()]))[0, 1] > 0.8
    some, views = torch.tensor([3, 31]), draw_views(MultiCrop(), IMAGES, ROWS, KEY, CPU, count=4)
    assert all(
        map(torch.equal, [v[some] for v in views], draw_views(MultiCrop(), IMAGES[some], some, KEY, CPU, count=4))
    )


@pytest.mark.parametrize(
    ("objective", "side", "reason"),
    [("dino", 0.4, "3x3 pixels .*divisible by patch size"), ("orchestra", 0.5, "4x4 pixels .*doesn't match model")],
)
def test_a_network_that_does_not_take_small_views_is_refused(noisy, objective, side, reason):
    parts = AVERAGED | {"aggregators": ["weighted_mean", *["orchestra_clusters"] * (objective == "orchestra")]}
    augmentation = {"name": "multi_crop", "local_side": side}
    recipe = noisy(**parts, objective=objective, architectures=["small_vit"], augmentation=augmentation)
    with pytest.raises(UserError, match=f"small_vit does not take the further views of {reason}.*local_side"):
        build_federation(recipe)


@pytest.mark.parametrize("option", [{"local_scale": (0.5, 0.1)}, {"local_side": 1.5}, {"crop_scale": (2.0, 3.0)}])
def test_ranges_are_refused_by_name(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        MultiCrop(**option)


def test_a_vision_transformer_trains_on_both_sizes_and_represents_images_as_before(noisy):
    objective = {"name": "dino", "hidden_features": 16, "output_features": 8, "prototypes": 12, "local_views": 2}
    parts = AVERAGED | {"architectures": ["small_vit"], "augmentation": "multi_crop", "objective": objective}
    stages = {"name": "layer_wise", "layers_per_stage": 2, "rounds_per_stage": 1}
    done = train_rounds(build_federation(noisy(**parts, schedule=stages)), 2, [0])
    assert done.replies[2][0].metrics["loss"] < 4.0  # log 12 is 2.5
    whole = train_rounds(build_federation(noisy(**parts | {"augmentation": "random_views"}, schedule=stages)), 1, [0])
    assert done.replies[1][0].metrics["flops"] < 0.7 * whole.replies[1][0].metrics["flops"]
    plain = build_federation(noisy(architectures=["small_vit"])).new_model(None).encoder
    encoder, images = build_federation(noisy(**parts)).new_model(None).encoder, torch.randn(3, 1, 8, 8)
    plain.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder.eval()(images), plain.eval()(images))
