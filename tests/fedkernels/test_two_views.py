"""two_views against torchvision's functions with the drawn parameters, and what a view does not depend on."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from fedkernels import ViewKey, ViewOptions, two_views, view_parameters
from fedkernels.internal import native

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


def by_reference(*arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "module", None)
        return two_views(*arguments, **options)


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
        for operation in order.tolist() if jitter else ():
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


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 3, 19, 26), (20, 1, 28, 28), (4, 3, 64, 70)])
@pytest.mark.parametrize("options", [ViewOptions(), STRONG], ids=["byol", "strong"])
def test_equals_torchvisions_functions(shape, options):
    images, samples = random_bytes(*shape), numbers(shape[0], -9)
    assert_near(two_views(images, samples, KEY, options), by_torchvision(images, samples, KEY, options), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        only(crop_scale=(0.1, 1.0), crop_ratio=(0.5, 2.0)),
        only(flip=0.5),
        only(brightness=1.5),
        only(contrast=1.5),
        only(saturation=1.5),
        only(hue=0.5),
        only(grayscale=0.5),
        only(blur=0.5, blur_sigma=(0.05, 9.0)),
        only(solarize=0.5),
    ],
    ids=["crop", "flip", "brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize"],
)
def test_each_operation_alone(options):
    images, samples = random_bytes(30, 3, 27, 27), numbers(30)
    views = two_views(images, samples, KEY, options)
    assert_near(views, by_torchvision(images, samples, KEY, options), 5e-5)
    plain = images / 255 * 4 - 2
    changed = [(view - plain).abs().amax((1, 2, 3)) > 1e-3 for view in views]
    assert any(flags.any() for flags in changed)


def test_with_everything_off_a_view_is_the_normalised_image():
    images = random_bytes(5, 3, 9, 9)
    assert_near(two_views(images, numbers(5), KEY, OFF), [(images / 255 - 0.5) / 0.25] * 2, 1e-6)


def test_gray_pixels_ties_and_extremes():
    """Equal channels are where the hue's formula changes its branch, and divides by no chroma."""
    levels = torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8)
    pixels = torch.tensor(list(itertools.product(levels.tolist(), repeat=3)), dtype=torch.uint8)  # [216, 3]
    image = pixels.T.reshape(1, 3, 12, 18).repeat(40, 1, 1, 1)
    options = only(hue=0.5, saturation=1.0, solarize=0.5)
    assert_near(two_views(image, numbers(40), KEY, options), by_torchvision(image, numbers(40), KEY, options), 5e-5)


@pytest.mark.parametrize(("height", "width"), EDGES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [ViewOptions(), STRONG], ids=["byol", "strong"])
def test_sizes_beside_registers(height, width, channels, options):
    """Any compiled operator draws the reference's parameters to the bit: one wrong box would show."""
    images, samples = random_bytes(60, channels, height, width), numbers(60, 2**40)
    assert_near(two_views(images, samples, KEY, options), by_reference(images, samples, KEY, options))


@pytest.mark.parametrize("ratio", [(1 / 3, 3.0), (0.01, 0.02), (50.0, 100.0)])
def test_drawn_boxes_of_many_samples(ratio):
    """Small images whose entries tell where they lie: the views tell which box was cut."""
    y, x = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    images = torch.stack([20 * y, 20 * x, y * x]).to(torch.uint8).expand(5000, 3, 12, 12)
    options = only(crop_scale=(0.01, 1.0), crop_ratio=ratio, flip=0.5)
    assert_near(two_views(images, numbers(5000), KEY, options), by_reference(images, numbers(5000), KEY, options))


def test_bfloat16_is_the_rounded_float32():
    images, samples = random_bytes(20, 3, 19, 21), numbers(20)
    for wide, narrow in zip(two_views(images, samples, KEY), two_views(images, samples, KEY, dtype=BF16), strict=True):
        assert narrow.dtype == BF16
        assert torch.equal(narrow, wide.to(BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_holds_the_same_views(dtype, channels):
    images, samples = random_bytes(20, channels, 19, 21), numbers(20)
    truth = two_views(images, samples, KEY, dtype=dtype)
    views = two_views(images, samples, KEY, dtype=dtype, memory_format=torch.channels_last)
    for view, other in zip(views, truth, strict=True):
        assert view.is_contiguous(memory_format=torch.channels_last)
        assert other.is_contiguous()
        assert torch.equal(view, other)


def test_strides_do_not_matter():
    images, samples = random_bytes(20, 3, 19, 21), numbers(40)[::2]
    truth = two_views(images, samples.contiguous(), KEY)
    around = random_bytes(40, 7, 38, 63, seed=1)
    sliced = around[1::2, 1:7:2, ::2, 2::3].copy_(images)
    for same in (images.contiguous(memory_format=torch.channels_last), images.mT.contiguous().mT, sliced):
        assert not same.is_contiguous()
        views = two_views(same, samples, KEY)
        assert all(torch.equal(one, other) for one, other in zip(views, truth, strict=True))
    flat = random_bytes(1, 1, 19, 21).expand(20, 3, 19, 21)
    truth = two_views(flat.contiguous(), samples, KEY)
    assert all(torch.equal(*pair) for pair in zip(two_views(flat, samples, KEY), truth, strict=True))


def test_a_view_depends_on_its_sample_and_not_on_the_batch():
    images, samples = random_bytes(24, 3, 17, 17), numbers(24, 1000)
    truth = two_views(images, samples, KEY)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for chosen in (order, order[:5], order[:1]):
        views = two_views(images[chosen], samples[chosen], KEY)
        assert all(torch.equal(one, other[chosen]) for one, other in zip(views, truth, strict=True))


def test_other_samples_views_and_keys_draw_other_numbers():
    images = random_bytes(1, 3, 17, 17).expand(6, 3, 17, 17)
    keys = [KEY, *(KEY._replace(**{name: value}) for name, value in zip(KEY._fields, (8, 4, 1, 6), strict=True))]
    keys.append(KEY._replace(seed=KEY.seed - 2**62))
    views = [view for key in keys for view in two_views(images, numbers(6), key)]
    flat = torch.cat(views).flatten(1)
    assert len(flat.unique(dim=0)) == len(flat)


@pytest.mark.cpu_only(reason="threads of the CPU")
def test_threads_do_not_matter():
    images, samples = random_bytes(37, 3, 33, 29), numbers(37)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(two_views(images, samples, KEY))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


def test_no_images():
    for view in two_views(random_bytes(0, 3, 8, 8), numbers(0), KEY, dtype=BF16, memory_format=torch.channels_last):
        assert view.shape == (0, 3, 8, 8)
        assert view.dtype == BF16


def test_views_need_no_gradient_and_leave_the_images():
    images, before = random_bytes(3, 3, 8, 8), random_bytes(3, 3, 8, 8)
    with torch.enable_grad():
        views = two_views(images, numbers(3), KEY)
    assert not any(view.requires_grad for view in views)
    assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_autocast_changes_nothing(dtype):
    images = random_bytes(4, 3, 8, 8)
    truth = two_views(images, numbers(4), KEY, dtype=dtype)
    with torch.autocast("cpu", BF16):
        views = two_views(images, numbers(4), KEY, dtype=dtype)
    assert all(torch.equal(one, other) and one.dtype == dtype for one, other in zip(views, truth, strict=True))


def compiled_it_gives_the_same(dynamic: bool | None) -> None:
    """And is not compiled once more for each epoch: torch.compile gives up after eight times."""
    images, samples = random_bytes(4, 3, 12, 14), numbers(4)
    torch.compiler.reset()
    compiled = torch.compile(two_views, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for epoch in range(10 if native.module is not None else 1):
        key = KEY._replace(epoch=epoch)
        views, truth = compiled(images, samples, key), two_views(images, samples, key)
        assert_near(views, truth, 1e-5)


def test_compiles_without_a_graph_break():
    compiled_it_gives_the_same(dynamic=None)
    if native.module is not None:  # the reference takes half a minute
        compiled_it_gives_the_same(dynamic=True)


@pytest.mark.nightly
def test_compiles_without_a_graph_break_for_any_sizes():
    compiled_it_gives_the_same(dynamic=True)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tensors_without_numbers(memory_format):
    images, samples = random_bytes(4, 3, 12, 14), numbers(4)
    wanted = {"dtype": BF16, "memory_format": memory_format}
    truth = two_views(images, samples, KEY, **wanted)
    on_meta = two_views(images.to("meta"), samples.to("meta"), KEY, **wanted)
    with FakeTensorMode() as mode:
        fake = two_views(mode.from_tensor(images), mode.from_tensor(samples), KEY, **wanted)
    assert all(view.is_meta for view in on_meta)
    assert all(isinstance(view, FakeTensor) for view in fake)
    for view, other in zip((*on_meta, *fake), 2 * truth, strict=True):
        assert (view.shape, view.dtype, view.stride()) == (other.shape, other.dtype, other.stride())


I, N = random_bytes(2, 3, 4, 4), numbers(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: two_views(I.numpy(), N, KEY), TypeError, "images must be a torch.Tensor, got ndarray"),
        (lambda: two_views(I.float(), N, KEY), TypeError, "images must be uint8 with values 0 to 255, got torch.float"),
        (lambda: two_views(I.to_sparse(), N, KEY), TypeError, "images must be a dense tensor, got layout"),
        (lambda: two_views(I[0], N, KEY), ValueError, r"images must have shape .* got \[3, 4, 4\]"),
        (lambda: two_views(I[:, :2], N, KEY), ValueError, r"\[n, 1 or 3, H, W\] .* got \[2, 2, 4, 4\]"),
        (lambda: two_views(I[:, :, :1], N, KEY), ValueError, r"sides of at least 2, got \[2, 3, 1, 4\]"),
        (lambda: two_views(I, [0, 1], KEY), TypeError, "samples must be a torch.Tensor, got list"),
        (lambda: two_views(I, N.int(), KEY), TypeError, "samples must be int64, got torch.int32"),
        (lambda: two_views(I, N.to_sparse(), KEY), TypeError, "samples must be a dense tensor, got layout"),
        (lambda: two_views(I, N[None], KEY), ValueError, r"samples must have shape \[n\], got \[1, 2\]"),
        (lambda: two_views(I, N[:1], KEY), ValueError, "samples must have one number for each of the 2 images, got 1"),
        (lambda: two_views(I, N.to("meta"), KEY), ValueError, "samples must be on the device of images"),
        (lambda: two_views(I, N, (1, 2, 3, 4)), TypeError, "key must be a ViewKey, got tuple"),
        (lambda: two_views(I, N, ViewKey("7")), TypeError, "key.seed must be an integer, got str"),
        (lambda: two_views(I, N, ViewKey(1, 2.0)), TypeError, "key.client must be an integer, got float"),
        (lambda: two_views(I, N, ViewKey(1, True)), TypeError, "key.client must be an integer, got bool"),
        (lambda: two_views(I, N, ViewKey(2**63)), ValueError, r"key.seed must be between 0 and 2\^63 - 1, got 9223"),
        (lambda: two_views(I, N, ViewKey(1, epoch=-1)), ValueError, r"key.epoch must be between 0 and 2\^32 - 1"),
        (lambda: two_views(I, N, KEY, {"flip": 0}), TypeError, "options must be a ViewOptions, got dict"),
        (lambda: two_views(I, N, KEY, dtype=torch.float16), ValueError, "dtype must be torch.float32 or torch.bfl"),
        (
            lambda: two_views(I, N, KEY, memory_format=torch.preserve_format),
            ValueError,
            "memory_format must be torch.contiguous_format or torch.channels_last, got torch.preserve_format",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("native")
def test_the_operator_refuses_what_python_would():
    operator, values = torch.ops.fedkernels.two_views.default, ViewOptions().numbers()
    for arguments, message in (
        ((I.float(), N, 1, 2, 3, 4, values, False, False), "images must be uint8"),
        ((I[:, :2], N, 1, 2, 3, 4, values, False, False), "1 or 3 channels"),
        ((I, N[:1], 1, 2, 3, 4, values, False, False), "samples must be contiguous int64"),
        ((I, N, 1, 2, 3, 4, values[:-1], False, False), "options must hold"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
