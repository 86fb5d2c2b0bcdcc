"""csrc/cuda/two_views.cu against the reference, which draws the same numbers."""

import ctypes

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, view_parameters
from fedkernels.reference._philox import philox
from fedkernels.reference.two_views import two_views
from tests.cuda_on_cpu.emulation import poison

KEY = ViewKey(seed=2**62 + 7, client=3, round=2**32 - 1, epoch=5)
STRONG = ViewOptions(brightness=1.5, contrast=1.2, saturation=1.1, hue=0.5, blur_sigma=(0.05, 9.0), solarize=0.4)
LAYOUTS = {False: torch.contiguous_format, True: torch.channels_last}


class ViewBatch(ctypes.Structure):
    """struct ViewBatch of csrc/cuda/two_views.h."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        ("samples", ctypes.c_void_p),
        ("images", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("channels", "height", "width")),
        ("key", ctypes.c_uint32 * 2),
        ("options", ctypes.c_double * len(ViewOptions().numbers())),
        ("views", ctypes.c_void_p * 2),
        *((name, ctypes.c_bool) for name in ("bfloat16", "channels_last")),
    )


def run(library, images, samples, options=STRONG, dtype=torch.float32, channels_last=False, **device):
    counter = [torch.tensor(word) for word in (KEY.client, KEY.round, KEY.epoch, 0)]
    key = philox(counter, [torch.tensor(word) for word in (KEY.seed & 0xFFFFFFFF, KEY.seed >> 32)])[:2]

    def views(call):
        found = [poison(*images.shape, dtype=dtype).contiguous(memory_format=LAYOUTS[channels_last]) for _ in range(2)]
        batch = ViewBatch(
            images.data_ptr(),
            images.stride(),
            samples.data_ptr(),
            *images.shape,
            tuple(map(int, key)),
            tuple(options.numbers()),
            tuple(view.data_ptr() for view in found),
            dtype == torch.bfloat16,
            channels_last,
        )
        memory = poison(library.ask("cuda_two_views_floats", ctypes.byref(batch)), dtype=torch.float32)
        call("cuda_two_views", ctypes.byref(batch), memory, None)
        return found

    return library.results(views, **device)


def check(compiler, images, samples, options=STRONG, dtype=torch.float32, tolerance=2e-5, **layout):
    found = run(compiler.load("two_views.cu"), images, samples, options, dtype, **layout)
    truth = two_views(images, view_parameters(samples, KEY, *images.shape[2:], options), options)
    for view, true in zip(found, truth, strict=True):
        assert view.dtype == dtype
        torch.testing.assert_close(view.float(), true, rtol=0, atol=tolerance)


def batch_of(count, channels, height, width):
    images = torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(0))
    return images.to(torch.uint8), torch.arange(count) * 2**33 - 5


@pytest.mark.parametrize("shape", [(12, 3, 32, 32), (6, 1, 28, 28), (8, 3, 5, 47), (8, 3, 47, 5), (20, 3, 2, 2)])
@pytest.mark.parametrize("options", [ViewOptions(), STRONG], ids=["byol", "strong"])
def test_equals_the_reference(compiler, shape, options):
    check(compiler, *batch_of(*shape), options)


@pytest.mark.parametrize("shape", [(5, 3, 40, 33), (5, 1, 40, 33)])
def test_images_that_lie_in_device_memory(compiler, shape):
    """More views than blocks: a block takes several, one after the other, in the same place."""
    check(compiler, *batch_of(*shape), multiprocessors=1, shared_limit=16 << 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_dtypes_and_layouts(compiler, dtype, channels_last, channels):
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    check(compiler, *batch_of(5, channels, 13, 18), dtype=dtype, tolerance=tolerance, channels_last=channels_last)


def test_any_strides(compiler):
    images, samples = batch_of(4, 3, 11, 17)
    library = compiler.load("two_views.cu")
    truth = run(library, images, samples)
    sliced = torch.zeros(8, 7, 22, 53, dtype=torch.uint8)[1::2, 1:7:2, ::2, 2::3].copy_(images)
    for same in (images.contiguous(memory_format=torch.channels_last), sliced):
        assert not same.is_contiguous()
        found = run(library, same, samples)
        assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))


def test_no_images(compiler):
    images, samples = batch_of(0, 3, 11, 17)
    assert run(compiler.load("two_views.cu"), images, samples)[0].shape == (0, 3, 11, 17)
