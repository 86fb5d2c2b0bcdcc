"""Two random views of each image in plain PyTorch: what is drawn, bit for bit, and what is done with it."""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkernels.reference._philox import philox
from fedkernels.view_options import ViewKey, ViewOptions, ViewParameters

# Which of an image's random words decides what. csrc/cpu/view_parameters.h has the same numbers.
_FACTORS, _ORDER, _JITTER, _FLIP, _GRAYSCALE, _BLUR, _SIGMA, _SOLARIZE, _TOP, _LEFT = 0, 4, 5, 6, 7, 8, 9, 10, 11, 12
_FIRST_TRY, _TRIES = 16, 10  # of the crop's shape: two words each
_WORDS = _FIRST_TRY + 2 * _TRIES

_ORDERS = list(itertools.permutations(range(4)))  # in lexicographic order
_LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601


# What is drawn


def view_parameters(samples: Tensor, key: ViewKey, height: int, width: int, options: ViewOptions) -> ViewParameters:
    """Philox4x32-10 with a key made of `key`; the counter is the sample's number, the view and the word's number / 4.

    Everything up to the last rounding is float64 by +, -, *, / and square roots, which are the same everywhere.
    """
    uniform = _words(samples, key).double() * 2.0**-32  # [_WORDS, 2, n], below 1
    strengths = (options.brightness, options.contrast, options.saturation)
    ranges = [*((max(0.0, 1 - strength), 1 + strength) for strength in strengths), (-options.hue, options.hue)]
    factors = [low + (high - low) * uniform[_FACTORS + index] for index, (low, high) in enumerate(ranges)]
    low, high = options.blur_sigma
    orders = torch.tensor(_ORDERS, device=samples.device)
    return ViewParameters(
        boxes=_crop_boxes(uniform, height, width, options),
        flip=uniform[_FLIP] < options.flip,
        jitter=uniform[_JITTER] < options.jitter_probability,
        order=orders[(uniform[_ORDER] * len(_ORDERS)).long()],
        factors=torch.stack(factors, dim=-1).float(),
        grayscale=uniform[_GRAYSCALE] < options.grayscale,
        blur=uniform[_BLUR] < options.blur,
        sigma=(low + (high - low) * uniform[_SIGMA]).float(),
        solarize=uniform[_SOLARIZE] < options.solarize,
    )


def _words(samples: Tensor, key: ViewKey) -> Tensor:
    """[_WORDS, 2, n] int64, 0 to 2^32 - 1."""

    def word(value: int) -> Tensor:
        return samples.new_tensor(value & 0xFFFFFFFF)

    # The key of all views is itself a random number, of the seed and these three.
    of_key = [word(key.client), word(key.round), word(key.epoch), word(0)]
    derived = philox(of_key, [word(key.seed), word(key.seed >> 32)])[:2]
    blocks = torch.arange(_WORDS // 4, device=samples.device)[:, None, None]
    views = torch.arange(2, device=samples.device)[:, None]
    counter = torch.broadcast_tensors(samples & 0xFFFFFFFF, samples >> 32 & 0xFFFFFFFF, views, blocks)
    return torch.stack(philox(counter, derived), dim=1).flatten(0, 1)


def _crop_boxes(uniform: Tensor, height: int, width: int, options: ViewOptions) -> Tensor:
    """Torchvision's RandomResizedCrop: the first of ten shapes that fits, else the largest central allowed one."""
    tries = uniform[_FIRST_TRY:].unflatten(0, (_TRIES, 2))
    low, high = options.crop_scale
    areas = height * width * (low + (high - low) * tries[:, 0])
    low, high = (math.log(ratio) for ratio in options.crop_ratio)
    ratios = _exp(low + (high - low) * tries[:, 1])
    widths, heights = (areas * ratios).sqrt().round().long(), (areas / ratios).sqrt().round().long()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first, any_fits = fits.int().argmax(0, keepdim=True), fits.any(0)

    limited = min(max(width / height, options.crop_ratio[0]), options.crop_ratio[1])
    box_width = torch.where(any_fits, widths.gather(0, first)[0], min(width, max(1, round(height * limited))))
    box_height = torch.where(any_fits, heights.gather(0, first)[0], min(height, max(1, round(width / limited))))
    top = torch.where(any_fits, (uniform[_TOP] * (height - box_height + 1)).long(), (height - box_height) // 2)
    left = torch.where(any_fits, (uniform[_LEFT] * (width - box_width + 1)).long(), (width - box_width) // 2)
    return torch.stack((top, left, box_height, box_width), dim=-1)


def _exp(x: Tensor) -> Tensor:
    """The exponential for |x| < 700 to about 1e-15, of operations that give the same bits everywhere."""
    n = (x * 1.4426950408889634).round()
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    power = torch.full_like(x, 1 / math.factorial(13))
    for k in range(12, -1, -1):
        power = power * r + 1 / math.factorial(k)
    return power * ((n.long() + 1023) << 52).view(torch.float64)  # 2^n


# What is done with it


@torch.no_grad()
def two_views(
    images: Tensor,
    parameters: ViewParameters,
    options: ViewOptions,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[Tensor, Tensor]:
    """Both views, [n, C, H, W]; an operation whose strength in `options` is 0 is left out."""
    first, second = (
        _view(images, ViewParameters(*(drawn[view] for drawn in parameters)), options)
        .to(dtype)
        .contiguous(memory_format=memory_format)
        for view in range(2)
    )
    return first, second


def _view(images: Tensor, drawn: ViewParameters, options: ViewOptions) -> Tensor:
    channels, height, width = images.shape[1:]
    views = _crop_and_resize(images.float() / 255, drawn.boxes, drawn.flip)
    views = _jitter(views, drawn, options)
    if channels == 3:
        views = _where(drawn.grayscale, _luma(views).expand_as(views), views)
    views = _where(drawn.blur, _blur(views, drawn.sigma, blur_kernel_size(height, width)), views)
    views = _where(drawn.solarize, torch.where(views >= 0.5, 1 - views, views), views)
    return (views - 0.5) / 0.25


def _where(chosen: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    return torch.where(chosen[:, None, None, None], changed, images)


def _crop_and_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Bilinear; what lies half a pixel beyond the box is the box's border."""
    n, channels, height, width = images.shape
    top, left, box_height, box_width = boxes.unbind(-1)
    row, next_row, row_weight = _neighbours(top, box_height, height)
    column, next_column, column_weight = _neighbours(left, box_width, width)

    def rows_at(indices: Tensor) -> Tensor:
        return images.gather(2, indices[:, None, :, None].expand(n, channels, height, width))

    above, below = rows_at(row), rows_at(next_row)
    images = above + (below - above) * row_weight[:, None, :, None]

    def columns_at(indices: Tensor) -> Tensor:
        return images.gather(3, indices[:, None, None, :].expand(n, channels, height, width))

    before, after = columns_at(column), columns_at(next_column)
    resized = before + (after - before) * column_weight[:, None, None, :]
    return _where(mirrored, resized.flip(3), resized)


def _neighbours(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n, size] each: the two pixels that an output pixel lies between, and the weight of the second."""
    centres = torch.arange(size, device=start.device, dtype=torch.float64) + 0.5
    positions = centres * (length[:, None].double() / size) - 0.5
    positions = torch.minimum(positions.clamp_min(0), length[:, None] - 1.0)
    first = positions.floor()
    weight = (positions - first).float()
    first = first.long()
    second = torch.minimum(first + 1, length[:, None] - 1)
    return start[:, None] + first, start[:, None] + second, weight


def _jitter(images: Tensor, drawn: ViewParameters, options: ViewOptions) -> Tensor:
    """The operations in each image's own order."""
    strengths = (options.brightness, options.contrast, options.saturation, options.hue)
    operations: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (_brightness, _contrast, _saturation, _hue)
    # An image of one channel is its own gray version: saturation and hue would not change it.
    operations_of = {1: 2, 3: 4}.get(images.shape[1], 0)
    available = [index for index in range(operations_of) if strengths[index] > 0]
    for step, index in itertools.product(range(4), available):
        chosen = drawn.jitter & (drawn.order[:, step] == index)
        factors = drawn.factors[:, index, None, None, None]
        images = _where(chosen, operations[index](images, factors), images)
    return images


def _luma(images: Tensor) -> Tensor:
    """RGB [n, 3, H, W] to [n, 1, H, W]."""
    red, green, blue = images.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _brightness(images: Tensor, factors: Tensor) -> Tensor:
    return (images * factors).clamp(0, 1)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    luma = _luma(images) if images.shape[1] == 3 else images
    return torch.lerp(luma.mean((1, 2, 3), keepdim=True), images, factors).clamp(0, 1)


def _saturation(images: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(_luma(images).expand_as(images), images, factors).clamp(0, 1)


def _hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turns the hue of HSV. Channel c is value - chroma clamp(min(k, 4 - k), 0, 1), k = (hue + its offset) mod 6."""
    red, green, blue = images.split(1, dim=1)
    value, chroma = images.amax(1, keepdim=True), images.amax(1, keepdim=True) - images.amin(1, keepdim=True)
    of_red, of_green, of_blue = green - blue, blue - red + 2 * chroma, red - green + 4 * chroma
    hue = torch.where(value == red, of_red, torch.where(value == green, of_green, of_blue))
    hue = hue / chroma.clamp_min(1e-12) + 6 * shifts  # a pixel without chroma is gray, whatever hue it gets
    k = torch.remainder(hue + torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None], 6)
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def blur_kernel_size(height: int, width: int) -> int:
    """The odd number nearest to a tenth of the shorter side, at least 3 (SimCLR: Chen et al. 2020, appendix A)."""
    return max(3, 2 * round((min(height, width) / 10 - 1) / 2) + 1)


def _blur(images: Tensor, sigmas: Tensor, kernel_size: int) -> Tensor:
    """Image i with its own kernel, borders reflected."""
    radius = kernel_size // 2
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    kernels = torch.softmax(-0.5 * (offsets / sigmas[:, None].double()) ** 2, dim=1).float()
    images = F.pad(images, [radius] * 4, mode="reflect")
    for dimension in (2, 3):
        size = images.shape[dimension] - 2 * radius
        shifted = (images.narrow(dimension, shift, size) for shift in range(kernel_size))
        terms = [part * kernels[:, shift, None, None, None] for shift, part in enumerate(shifted)]
        images = torch.stack(terms).sum(0)
    return images
