"""two_views against torchvision's functions with the drawn parameters, and what a view does not depend on."""

import itertools

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, two_views, view_parameters
from fedkernels.internal import native
from tests.fedkernels.conftest import by_reference

BF16, FP32 = torch.bfloat16, torch.float32
KEY = ViewKey(seed=2**62 + 7, client=3, round=2**32 - 1, epoch=5)
OFF = ViewOptions(
    crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, brightness=0, contrast=0, saturation=0, hue=0, grayscale=0, blur=0
)
STRONG = ViewOptions(brightness=1.5, contrast=1.2, saturation=1.1, hue=0.5, blur_sigma=(0.05, 9.0), solarize=0.4)
EDGES = ((2, 2), (3, 2), (4, 15), (15, 4), (16, 17), (17, 33), (28, 28), (32, 32), (31, 96), (5, 120), (120, 5))


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def numbers(count, first=0):
    return torch.arange(first, first + count)


def only(**changes):
    """Options with everything off but `changes`."""
    return ViewOptions(**{**vars(OFF), **changes})


def by_torchvision(images, samples, key, options):
    """Each image by itself, with torchvision's functions."""
    tv = pytest.importorskip("torchvision.transforms.v2.functional")
    operations = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    strengths = (options.brightness, options.contrast, options.saturation, options.hue)
    height, width = images.shape[2:]
    kernel = max(3, 2 * round((min(height, width) / 10 - 1) / 2) + 1)
    drawn, views = view_parameters(samples, key, height, width, options), ([], [])
    for view, index in itertools.product(range(2), range(len(images))):
        boxes, flip, jitter, order, factors, grayscale, blur, sigma, solarize = (one[view, index] for one in drawn)
        image = tv.resized_crop(images[index] / 255, *boxes.tolist(), [height, width], antialias=False)
        image = tv.horizontal_flip(image) if flip else image
        for operation in order.tolist() if jitter and len(image) in (1, 3) else ():
            if strengths[operation] and (len(image) == 3 or operation < 2):
                image = operations[operation](image, float(factors[operation]))
        image = tv.rgb_to_grayscale(image, 3) if grayscale and len(image) == 3 else image
        image = tv.gaussian_blur(image, [kernel, kernel], [float(sigma)] * 2) if blur else image
        image = tv.solarize(image, 0.5) if solarize else image
        views[view].append((image - 0.5) / 0.25)
    return torch.stack(views[0]), torch.stack(views[1])


def assert_near(found, truth, tolerance=2e-5):
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance)


ALONE = {
    "nothing": OFF,
    "crop": only(crop_scale=(0.1, 1.0), crop_ratio=(0.5, 2.0)),
    "flip": only(flip=0.5),
    **{name: only(**{name: 1.5}) for name in ("brightness", "contrast", "saturation")},
    "hue": only(hue=0.5),
    "grayscale": only(grayscale=0.5),
    "blur": only(blur=0.5, blur_sigma=(0.05, 9.0)),
    "solarize": only(solarize=0.5),
}
SHAPES = [(40, 3, 32, 32), (40, 3, 19, 26), (20, 1, 28, 28), (4, 3, 64, 70), (9, 2, 19, 26), (9, 5, 21, 18)]
TOGETHER = itertools.product((ViewOptions(), STRONG), SHAPES)


@pytest.mark.parametrize(("options", "shape"), [*((options, (30, 3, 27, 27)) for options in ALONE.values()), *TOGETHER])
def test_equals_torchvisions_functions(options, shape):
    images, samples = random_bytes(*shape), numbers(shape[0], -9)
    views = two_views(images, samples, KEY, options)
    alone = options in ALONE.values()
    assert_near(views, by_torchvision(images, samples, KEY, options), 5e-5 if alone else 1e-4)
    changed = [(view - (images / 255 * 4 - 2)).abs().max() > 1e-3 for view in views]
    assert any(changed) == (options != OFF)


def test_gray_pixels_ties_and_extremes():
    """Equal channels are where the hue's formula changes its branch, and divides by no chroma."""
    levels = torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8)
    pixels = torch.tensor(list(itertools.product(levels.tolist(), repeat=3)), dtype=torch.uint8)  # [216, 3]
    image = pixels.T.reshape(1, 3, 12, 18).repeat(40, 1, 1, 1)
    options = only(hue=0.5, saturation=1.0, solarize=0.5)
    assert_near(two_views(image, numbers(40), KEY, options), by_torchvision(image, numbers(40), KEY, options), 5e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("height", "width"), EDGES)
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes_beside_registers(height, width, channels):
    """Any compiled operator draws the reference's parameters to the bit: one wrong box would show."""
    images, samples = random_bytes(60, channels, height, width), numbers(60, 2**40)
    assert_near(two_views(images, samples, KEY, STRONG), by_reference()(two_views)(images, samples, KEY, STRONG))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("ratio", [(1 / 3, 3.0), (0.01, 0.02), (50.0, 100.0)])
def test_drawn_boxes_of_many_samples(ratio):
    """Small images whose entries tell where they lie: the views tell which box was cut."""
    y, x = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    images = torch.stack([20 * y, 20 * x, y * x]).to(torch.uint8).expand(5000, 3, 12, 12)
    options = only(crop_scale=(0.01, 1.0), crop_ratio=ratio, flip=0.5)
    given = images, numbers(5000), KEY, options
    assert_near(two_views(*given), by_reference()(two_views)(*given))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_other_formats_hold_the_same_views(dtype, channels):
    """Those of bfloat16 are the rounded ones of float32."""
    images, samples = random_bytes(20, channels, 19, 21), numbers(20)
    truth = two_views(images, samples, KEY)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        views = two_views(images, samples, KEY, dtype=dtype, memory_format=memory_format)
        for view, wide in zip(views, truth, strict=True):
            assert view.is_contiguous(memory_format=memory_format)
            assert view.dtype == dtype
            assert torch.equal(view, wide.to(dtype))


def test_strides_do_not_matter():
    images, samples = random_bytes(20, 3, 19, 21), numbers(40)[::2]
    around = random_bytes(40, 7, 38, 63, seed=1)
    sliced, channels_last = around[1::2, 1:7:2, ::2, 2::3].copy_(images), torch.channels_last
    for same in (
        images.contiguous(memory_format=channels_last),
        images.mT.contiguous().mT,
        sliced,
        images[:1, :1].expand(images.shape),
    ):
        assert not same.is_contiguous()
        truth = two_views(same.contiguous(), samples.contiguous(), KEY)
        assert all(torch.equal(*pair) for pair in zip(two_views(same, samples, KEY), truth, strict=True))


def test_a_view_depends_on_its_sample_and_not_on_the_batch():
    images, samples = random_bytes(24, 3, 17, 17), numbers(24, 1000)
    truth = two_views(images, samples, KEY)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for chosen in (order, order[:5], order[:1]):
        views = two_views(images[chosen], samples[chosen], KEY)
        assert all(torch.equal(one, other[chosen]) for one, other in zip(views, truth, strict=True))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.nightly)])
def test_compiles_without_a_graph_break_and_once_for_all_epochs(dynamic):
    """torch.compile gives up after eight times. The reference's graph with jitter takes half a minute."""
    images, samples, small = random_bytes(4, 3, 12, 14), numbers(4), native.module is None and dynamic is None
    options, epochs = only(grayscale=0.5) if small else STRONG, 1 if native.module is None else 10
    torch.compiler.reset()
    compiled = torch.compile(two_views, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for epoch in range(epochs):
        key = KEY._replace(epoch=epoch)
        assert_near(compiled(images, samples, key, options), two_views(images, samples, key, options), 1e-5)


@pytest.mark.usefixtures("native")
def test_the_operator_refuses_what_python_would():
    images, samples = random_bytes(2, 3, 4, 4), numbers(2)
    operator, values = torch.ops.fedkernels.two_views.default, ViewOptions().numbers()
    for arguments, message in (
        ((images.float(), samples, 1, 2, 3, 4, values, False, False), "images must be uint8"),
        ((images[:, :0], samples, 1, 2, 3, 4, values, False, False), "at least 1 channel"),
        ((images, samples[:1], 1, 2, 3, 4, values, False, False), "samples must be contiguous int64"),
        ((images, samples, 1, 2, 3, 4, values[:-1], False, False), "options must hold"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
