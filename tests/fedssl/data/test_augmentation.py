"""Each operation against torchvision's, the ranges of what is drawn, and reproducibility."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as tv

from fedssl.data.augmentation import AugmentationOptions, augment, draw_crop_boxes, normalize, two_views
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

NOTHING = AugmentationOptions(crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, jitter_probability=0, grayscale=0, blur=0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=seeded())


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)


def only(**changes: object) -> AugmentationOptions:
    """Options with everything off but `changes`."""
    return AugmentationOptions(**{**NOTHING.model_dump(), **changes})


# ---- operations against torchvision --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "parameters"),
    [
        (adjust_brightness, tv.adjust_brightness, (0.0, 0.6, 1.0, 1.4, 3.0)),
        (adjust_contrast, tv.adjust_contrast, (0.0, 0.6, 1.0, 1.4, 3.0)),
        (adjust_saturation, tv.adjust_saturation, (0.0, 0.6, 1.0, 1.4, 3.0)),
        (adjust_hue, tv.adjust_hue, (-0.5, -0.1, 0.0, 0.07, 0.5)),
    ],
)
def test_jitter_operations_are_torchvisions(ours, theirs, parameters):
    images = random_images(len(parameters), 3, 9, 12)
    expected = torch.stack([theirs(image, value) for image, value in zip(images, parameters, strict=True)])
    torch.testing.assert_close(ours(images, torch.tensor(parameters)), expected, atol=2e-6, rtol=0)


def test_brightness_and_contrast_of_one_channel():
    images = random_images(2, 1, 8, 8)
    factors = torch.tensor([0.5, 1.3])
    for ours, theirs in ((adjust_brightness, tv.adjust_brightness), (adjust_contrast, tv.adjust_contrast)):
        expected = torch.stack([theirs(images[i], float(factors[i])) for i in range(2)])
        torch.testing.assert_close(ours(images, factors), expected, atol=2e-6, rtol=0)


def test_hue_of_ties_and_gray_pixels():
    """Equal channels are where the hue formula changes its branch, and divides by no chroma."""
    pixels = torch.tensor(
        [
            [0, 0, 0],
            [1, 1, 1],
            [0.3, 0.3, 0.3],
            [1, 1, 0],
            [0, 1, 1],
            [1, 0, 1],
            [1, 0, 0],
            [0, 1, 0],
            [0, 0, 1],
        ]
    )
    images = pixels.T.reshape(1, 3, 3, 3).expand(4, -1, -1, -1)
    shifts = torch.tensor([-0.35, 0.0, 0.2, 1 / 3])
    expected = torch.stack([tv.adjust_hue(images[i], float(shifts[i])) for i in range(4)])
    torch.testing.assert_close(adjust_hue(images, shifts), expected, atol=2e-6, rtol=0)


def test_gray_is_torchvisions():
    images = random_images(3, 3, 5, 7)
    torch.testing.assert_close(to_gray(images), tv.rgb_to_grayscale(images), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("channels", "height", "width", "kernel_size"), [(3, 32, 20, 3), (1, 8, 8, 3), (3, 23, 40, 7)])
def test_blur_is_torchvisions(channels, height, width, kernel_size):
    images = random_images(3, channels, height, width)
    sigmas = torch.tensor([0.1, 0.7, 2.0])
    expected = torch.stack([tv.gaussian_blur(images[i], [kernel_size] * 2, [float(sigmas[i])] * 2) for i in range(3)])
    torch.testing.assert_close(gaussian_blur(images, sigmas, kernel_size), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("size", "expected"), [(8, 3), (28, 3), (32, 3), (64, 7), (96, 9), (224, 23)])
def test_blur_kernel_is_odd_and_about_a_tenth(size, expected):
    assert blur_kernel_size(size, size + 5) == blur_kernel_size(size + 5, size) == expected


def test_solarisation_is_torchvisions():
    images = random_images(2, 3, 8, 8)
    torch.testing.assert_close(solarize(images), tv.solarize(images, threshold=0.5))
    part = (augment(random_bytes(500, 1, 6, 6), only(solarize=0.2), seeded()) <= 1e-4).flatten(1).all(1)
    assert part.float().mean().item() == pytest.approx(0.2, abs=0.05)


def test_crop_is_torchvisions_with_and_without_mirror():
    images = random_images(5, 3, 12, 17)
    boxes = torch.tensor([[0, 0, 12, 17], [3, 5, 4, 9], [8, 10, 4, 7], [0, 16, 12, 1], [11, 0, 1, 17]])
    mirrored = torch.tensor([False, True, False, True, True])
    expected = []
    for image, (top, left, height, width), mirror in zip(images, boxes.tolist(), mirrored, strict=True):
        crop = tv.resized_crop(image, top, left, height, width, [12, 17], antialias=True)
        expected.append(crop.flip(-1) if mirror else crop)
    torch.testing.assert_close(crop_and_resize(images, boxes, mirrored), torch.stack(expected), atol=1e-5, rtol=0)


# ---- what is drawn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (20, 30)])
def test_crop_boxes_are_distributed_as_torchvisions(height, width):
    scale, ratio, count = (0.2, 1.0), (3 / 4, 4 / 3), 4000
    ours = draw_crop_boxes(count, height, width, scale, ratio, seeded())
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = torch.tensor([RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)])
    assert ours[:, :2].min() >= 0
    assert (ours[:, 0] + ours[:, 2]).max() == height
    assert (ours[:, 1] + ours[:, 3]).max() == width
    for statistic in (
        lambda boxes: boxes.double(),
        lambda boxes: (boxes[:, 2] * boxes[:, 3]).double()[:, None] / (height * width),
        lambda boxes: (boxes[:, 3] / boxes[:, 2]).double().log()[:, None],
    ):
        a, b = statistic(ours), statistic(theirs)
        standard_error = ((a.var(0) + b.var(0)) / count).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 4 * standard_error).all()
        torch.testing.assert_close(a.std(0), b.std(0), rtol=0.06, atol=1e-3)


@pytest.mark.parametrize(("height", "width", "ratio"), [(4, 32, (1.0, 1.0)), (32, 4, (1.0, 1.2)), (6, 6, (9.0, 9.0))])
def test_crop_boxes_that_never_fit_fall_back_to_the_centre(height, width, ratio):
    ours = draw_crop_boxes(3, height, width, (1.0, 1.0), ratio, seeded())
    expected = RandomResizedCrop.get_params(torch.empty(1, height, width), [1.0, 1.0], list(ratio))
    assert ours.tolist() == [list(expected)] * 3


def brightness_of(options: AugmentationOptions) -> Tensor:
    """Each image's factor, seen in what comes of equal gray images of value 0.4."""
    views = augment(torch.full((2000, 3, 4, 4), 102, dtype=torch.uint8), options, seeded())
    return (views[:, 0, 0, 0] * 0.25 + 0.5) / 0.4


def test_brightness_range_and_jitter_probability():
    options = only(jitter_probability=0.8, brightness=0.4, contrast=0, saturation=0, hue=0)
    factors = brightness_of(options)
    untouched = (factors - 1).abs() < 1e-5
    assert 0.17 < untouched.float().mean() < 0.23
    assert 0.6 - 1e-5 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4 + 1e-5
    assert (factors[~untouched].mean() - 1).abs() < 0.03


def test_factors_are_never_negative():
    factors = brightness_of(only(jitter_probability=1, brightness=1.5, contrast=0, saturation=0, hue=0))
    assert -1e-6 <= factors.min() < 0.01
    assert factors.max() <= 2.5 + 1e-5


def test_each_probability_is_the_share_of_images_touched():
    images = random_bytes(1, 3, 6, 6).expand(2000, -1, -1, -1)
    same = normalize(images)

    def touched(options: AugmentationOptions) -> float:
        return ((augment(images, options, seeded()) - same).abs().amax((1, 2, 3)) > 0.01).float().mean().item()

    assert touched(NOTHING) == 0
    assert touched(only(flip=0.5)) == pytest.approx(0.5, abs=0.035)
    assert touched(only(grayscale=0.2)) == pytest.approx(0.2, abs=0.03)
    assert touched(only(blur=0.5, blur_sigma=(1, 2))) == pytest.approx(0.5, abs=0.035)
    assert touched(only(flip=1)) == touched(only(grayscale=1)) == touched(only(blur=1, blur_sigma=(1, 2))) == 1


def test_every_image_has_its_own_parameters():
    images = random_bytes(1, 3, 32, 32).expand(16, -1, -1, -1)
    views = augment(images, AugmentationOptions(), seeded())
    different = (views[:, None] - views[None]).abs().amax((2, 3, 4)) > 0.01
    assert different.fill_diagonal_(True).all()


def test_full_flip_and_gray_are_exact():
    images = random_bytes(4, 3, 8, 8)
    torch.testing.assert_close(augment(images, only(flip=1), seeded()), normalize(images.flip(-1)), atol=1e-4, rtol=0)
    gray = augment(images, only(grayscale=1), seeded())
    assert torch.equal(gray[:, 0], gray[:, 1])
    assert torch.equal(gray[:, 0], gray[:, 2])


# ---- the whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(5, 1, 8, 8), (5, 3, 32, 32), (3, 3, 20, 28), (4, 1, 2, 2), (1, 3, 8, 8), (0, 3, 8, 8)]
)
def test_shape_type_and_range(shape):
    images = random_bytes(*shape)
    before = images.clone()
    for view in two_views(images, AugmentationOptions(), seeded()):
        assert view.shape == shape
        assert view.dtype == torch.float32
        assert view.isfinite().all()
        assert (view.abs() <= 2 + 1e-4).all()
    assert torch.equal(images, before)


def test_one_generator_decides_everything():
    images, options = random_bytes(12, 3, 16, 16), AugmentationOptions()
    state = torch.get_rng_state()
    first = two_views(images, options, seeded(3))
    torch.rand(5)  # the global generator moves on; nothing may follow from it
    again = two_views(images, options, seeded(3))
    other = two_views(images, options, seeded(4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    torch.set_rng_state(state)
    augment(images, options, seeded())
    assert torch.equal(torch.get_rng_state(), state)


def test_one_channel_views_vary_without_colour():
    images = random_bytes(1, 1, 8, 8).expand(50, -1, -1, -1)
    views = augment(images, only(jitter_probability=1, grayscale=1), seeded())
    assert len(views[:, 0, 0, 0].unique()) > 40


def test_normalize_uses_constants():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(normalize(images).flatten(), torch.tensor([-2.0, -1.2, 2.0]))
    torch.testing.assert_close(normalize(images[0]), normalize(images)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cpu_generator_gives_the_same_views_on_a_gpu():
    images = random_bytes(16, 3, 32, 32)
    on_cpu = augment(images, AugmentationOptions(), seeded())
    on_gpu = augment(images.cuda(), AugmentationOptions(), seeded())
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-2, rtol=0)


def test_bad_images_are_refused():
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        augment(random_images(2, 3, 8, 8), NOTHING, seeded())
    with pytest.raises(TypeError, match="uint8"):
        normalize(random_images(2, 3, 8, 8))
    for shape in ((3, 8, 8), (2, 2, 8, 8), (2, 3, 1, 8)):
        with pytest.raises(ValueError, match="must be"):
            augment(random_bytes(*shape), NOTHING, seeded())


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip": 1.1},
        {"hue": 0.6},
        {"blur": -0.1},
        {"brightness": -1},
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
        AugmentationOptions(**wrong)
