"""fedkernels.two_views has the options of fedssl's augmentation and does what its operations do."""

import dataclasses

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, two_views, view_parameters
from fedssl.data.augmentation import AugmentationOptions
from fedssl.data.image_operations import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    blur_kernel_size,
    crop_and_resize,
    gaussian_blur,
    solarize,
    to_gray,
)

OPTIONS = ViewOptions(solarize=0.3)


def test_options_have_the_same_names_and_defaults():
    assert dataclasses.asdict(ViewOptions()) == AugmentationOptions().model_dump()


def view_by_operations(images, drawn):
    """[n, C, H, W], from what was drawn for one view of each image."""
    views = crop_and_resize(images / 255, drawn.boxes, drawn.flip)
    operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for index in range(len(images)):
        image = views[index : index + 1]
        for operation in drawn.order[index].tolist() if drawn.jitter[index] else ():
            if images.shape[1] == 3 or operation < 2:
                image = operations[operation](image, drawn.factors[index : index + 1, operation])
        views[index] = to_gray(image)[0] if drawn.grayscale[index] and images.shape[1] == 3 else image[0]
    blurred = gaussian_blur(views, drawn.sigma, blur_kernel_size(*images.shape[2:]))
    views = torch.where(drawn.blur[:, None, None, None], blurred, views)
    views = torch.where(drawn.solarize[:, None, None, None], solarize(views), views)
    return (views - 0.5) / 0.25


@pytest.mark.parametrize("shape", [(30, 3, 32, 32), (20, 1, 28, 28), (10, 3, 50, 41)])
def test_views_are_those_of_the_operations(shape):
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    samples, key = torch.arange(len(images)), ViewKey(3, client=1, round=2, epoch=4)
    drawn = view_parameters(samples, key, *shape[2:], OPTIONS)
    for view, found in enumerate(two_views(images, samples, key, OPTIONS)):
        truth = view_by_operations(images, type(drawn)(*(one[view] for one in drawn)))
        torch.testing.assert_close(found, truth, rtol=0, atol=4e-4)  # grid_sample's positions are float32
