"""Two random views of each image of a batch: the positive pairs of self-supervised learning."""

import torch
from torch import Tensor

from fedkernels.internal import checks, native
from fedkernels.reference import two_views as _reference
from fedkernels.view_options import ViewKey, ViewOptions, ViewParameters

_DTYPES = (torch.float32, torch.bfloat16)
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last)
_DEFAULT_OPTIONS = ViewOptions()
_LARGEST_SIDE_ON_CUDA = 1024  # VIEW_LARGEST_SIDE of csrc/cuda/two_views.h; beyond it the reference serves


def two_views(
    images: Tensor,
    samples: Tensor,
    key: ViewKey,
    options: ViewOptions = _DEFAULT_OPTIONS,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[Tensor, Tensor]:
    """Two independent random views of each image, normalised to ``(x / 255 - 0.5) / 0.25``, which lies in [-2, 2].

    A view is a crop resized bilinearly to the image's size, flipped, then colour jitter (brightness, contrast,
    saturation and hue), grayscale, Gaussian blur and solarisation, in BYOL's order (Grill et al. 2020, appendix B) and
    in torchvision's definitions. Each image draws its own order of the four operations of the jitter. Images of one
    channel skip saturation, hue and grayscale; those of any number but one and three skip the jitter and grayscale. The
    blur's kernel is the odd number nearest to a tenth of the shorter side, at least 3 (Chen et al. 2020, appendix A),
    and reflects the borders.

    The random numbers are Philox4x32-10's (Salmon et al. 2011), counted by the sample's number, the view and the
    draw. So what is drawn for a view depends on `key`, the sample's number, the options and the image's size, and on
    nothing else: not on the batch, the number of threads, or the device. See `view_parameters`.

    Args:
        images: uint8 [n, C, H, W] with C of at least 1 and sides of at least 2; any strides.
        samples: int64 [n], the images' numbers in their client's data set, on the device of `images`.
        key: seed of the run, client, round and epoch.
        options: strength and probability of each operation.
        dtype: of the views, float32 or bfloat16.
        memory_format: of the views, torch.contiguous_format or torch.channels_last.

    Returns:
        Two tensors [n, C, H, W]. Not differentiable, as images are integers.

    Raises:
        TypeError: `images` are not uint8, `samples` not int64, `key` or `options` of another type.
        ValueError: a shape, a device, a number of the key, the dtype or the memory format is another than these.
    """
    key = _check(images, samples, key, options)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {checks.short(dtype)}")
    if memory_format not in _MEMORY_FORMATS:
        raise ValueError(
            f"memory_format must be torch.contiguous_format or torch.channels_last, got {checks.short(memory_format)}"
        )
    operator = native.operator("two_views", images, samples)
    too_large = images.is_cuda and (max(images.shape[2:]) > _LARGEST_SIDE_ON_CUDA or images.shape[1:].numel() >= 2**31)
    if operator is None or too_large:
        drawn = _reference.view_parameters(samples, key, images.shape[2], images.shape[3], options)
        return _reference.two_views(images, drawn, options, dtype, memory_format)
    channels_last = memory_format == torch.channels_last
    views: tuple[Tensor, Tensor] = operator(
        images, samples.contiguous(), *key, options.numbers(), dtype == torch.bfloat16, channels_last
    )
    return views


def view_parameters(
    samples: Tensor, key: ViewKey, height: int, width: int, options: ViewOptions = _DEFAULT_OPTIONS
) -> ViewParameters:
    """What `two_views` draws for images of this size: the same numbers to the bit, on every device.

    Args:
        samples: int64 [n], the images' numbers in their client's data set.
        key: seed of the run, client, round and epoch.
        height: of the images, in pixels, at least 2 and below 2^31.
        width: likewise.
        options: strength and probability of each operation.

    Returns:
        A named tuple of tensors [2, n, ...] on the device of `samples`, first all first views, then all second ones.

    Raises:
        TypeError: `samples` are not int64, `height` or `width` no integer, `key` or `options` of another type.
        ValueError: a shape, a side or a number of the key is out of its range.
    """
    key = _check_draws(samples, key, options)
    height, width = checks.integer("height", height), checks.integer("width", width)
    for name, side in (("height", height), ("width", width)):
        if not 2 <= side < 2**31:
            raise ValueError(f"{name} must be at least 2 and below 2^31, got {checks.short(side)}")
    return _reference.view_parameters(samples, key, height, width, options)


def _check(images: Tensor, samples: Tensor, key: ViewKey, options: ViewOptions) -> ViewKey:
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a torch.Tensor, got {type(images).__name__}")
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 with values 0 to 255, got {images.dtype}")
    checks.dense("images", images)
    if images.ndim != 4 or images.shape[1] < 1 or min(images.shape[2:]) < 2:
        raise ValueError(f"images must have shape [n, C, H, W] with sides of at least 2, got {list(images.shape)}")
    key = _check_draws(samples, key, options)
    if samples.shape[0] != images.shape[0]:
        raise ValueError(f"samples must have one number for each of the {len(images)} images, got {len(samples)}")
    checks.same_device(images=images, samples=samples)
    return key


def _check_draws(samples: Tensor, key: ViewKey, options: ViewOptions) -> ViewKey:
    """The key with Python's integers."""
    if not isinstance(samples, Tensor):
        raise TypeError(f"samples must be a torch.Tensor, got {type(samples).__name__}")
    if samples.dtype != torch.int64:
        raise TypeError(f"samples must be int64, got {samples.dtype}")
    checks.dense("samples", samples)
    if samples.ndim != 1:
        raise ValueError(f"samples must have shape [n], got {list(samples.shape)}")
    if not isinstance(key, ViewKey):
        raise TypeError(f"key must be a ViewKey, got {type(key).__name__}")
    key = ViewKey(*(checks.integer(f"key.{name}", value) for name, value in zip(ViewKey._fields, key, strict=True)))
    for name, value, bits in zip(ViewKey._fields, key, (63, 32, 32, 32), strict=True):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"key.{name} must be between 0 and 2^{bits} - 1, got {checks.short(value)}")
    if not isinstance(options, ViewOptions):
        raise TypeError(f"options must be a ViewOptions, got {type(options).__name__}")
    return key


if native.module is not None:

    @torch.library.register_fake("fedkernels::two_views")
    def _(
        images: Tensor,
        samples: Tensor,
        seed: int,
        client: int,
        round: int,
        epoch: int,
        options: list[float],
        bfloat16: bool,
        channels_last: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        first = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)
        return first, torch.empty_like(first)
