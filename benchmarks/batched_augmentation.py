"""Augmentation of a batch in plain PyTorch, a peer of `two_views`: each operation on the images that it is drawn for.

It was fedssl's own before `fedkernels.two_views`. Against the reference it saves what the reference computes for images
that an operation leaves as they are, and it draws one order of the jitter for the whole batch. The definitions of the
operations are torchvision's.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkernels import ViewOptions
from fedkernels.reference.two_views import blur_kernel_size

_CROP_TRIES = 10


def augment(images: Tensor, options: ViewOptions, generator: torch.Generator) -> Tensor:
    """One random view of each image: uint8 [n, 3, H, W] to normalised float32 [n, 3, H, W]."""
    count, _, height, width = images.shape
    views = images.float().div_(255)
    boxes = _crop_boxes(count, height, width, options, generator)
    views = _crop_and_resize(views, boxes, _uniform(count, 0, 1, generator) < options.flip)
    chosen = _choose(count, options.jitter_probability, generator)
    views[chosen] = _jitter(views[chosen], options, generator)
    chosen = _choose(count, options.grayscale, generator)
    views[chosen] = _to_gray(views[chosen]).expand(-1, 3, -1, -1)
    chosen = _choose(count, options.blur, generator)
    sigmas = _uniform(len(chosen), *options.blur_sigma, generator)
    views[chosen] = _gaussian_blur(views[chosen], sigmas, blur_kernel_size(height, width))
    if options.solarize:
        chosen = _choose(count, options.solarize, generator)
        views[chosen] = torch.where(views[chosen] >= 0.5, 1 - views[chosen], views[chosen])
    return views.sub_(0.5).div_(0.25)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)


def _choose(count: int, probability: float, generator: torch.Generator) -> Tensor:
    return (_uniform(count, 0, 1, generator) < probability).nonzero()[:, 0]


def _crop_boxes(count: int, height: int, width: int, options: ViewOptions, generator: torch.Generator) -> Tensor:
    """[count, 4]: top, left, height, width; the first of ten shapes that fits, else the whole image."""
    areas = height * width * _uniform(_CROP_TRIES * count, *options.crop_scale, generator).view(_CROP_TRIES, count)
    low, high = (math.log(ratio) for ratio in options.crop_ratio)
    ratios = _uniform(_CROP_TRIES * count, low, high, generator).exp().view(_CROP_TRIES, count)
    widths, heights = (areas * ratios).sqrt().round().long(), (areas / ratios).sqrt().round().long()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first, any_fits = fits.int().argmax(0, keepdim=True), fits.any(0)
    box_width = torch.where(any_fits, widths.gather(0, first)[0], width)
    box_height = torch.where(any_fits, heights.gather(0, first)[0], height)
    top = (_uniform(count, 0, 1, generator) * (height - box_height + 1)).long()
    left = (_uniform(count, 0, 1, generator) * (width - box_width + 1)).long()
    return torch.stack((top, left, box_height, box_width), dim=1)


def _crop_and_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    height, width = images.shape[2:]
    rows = _sample_positions(boxes[:, 0], boxes[:, 2], height)
    columns = _sample_positions(boxes[:, 1], boxes[:, 3], width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    x, y = columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)
    return F.grid_sample(images, torch.stack((x, y), dim=3), mode="bilinear", align_corners=False)


def _sample_positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """[n, size]: where to read for each output pixel, as grid_sample counts (-1 and 1 are the edges)."""
    start, length = start[:, None].float(), length[:, None].float()
    pixels = start + (torch.arange(size) + 0.5) * (length / size) - 0.5
    pixels = torch.minimum(torch.maximum(pixels, start), start + length - 1)
    return (2 * pixels + 1) / size - 1


def _jitter(images: Tensor, options: ViewOptions, generator: torch.Generator) -> Tensor:
    strengths = (options.brightness, options.contrast, options.saturation, options.hue)
    for index in torch.randperm(4, generator=generator).tolist():
        strength = strengths[index]
        low, high = (-strength, strength) if index == 3 else (max(0.0, 1 - strength), 1 + strength)
        factors = _uniform(len(images), low, high, generator)[:, None, None, None]
        if index == 0:
            images = (images * factors).clamp_(0, 1)
        elif index == 1:
            images = _blend(images, _to_gray(images).mean((1, 2, 3), keepdim=True), factors)
        elif index == 2:
            images = _blend(images, _to_gray(images), factors)
        else:
            images = _turn_hue(images, factors[:, 0])
    return images


def _blend(images: Tensor, centres: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(centres.expand_as(images), images, factors).clamp_(0, 1)


def _to_gray(images: Tensor) -> Tensor:
    weights = torch.tensor([[0.2989, 0.587, 0.114]])
    return (weights @ images.flatten(2)).unflatten(2, images.shape[2:])


def _turn_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the HSV hue by shifts [n, 1, 1], in turns."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    # Which channel is the largest, as 0 or 1: on a CPU this takes a fraction of the time of booleans.
    is_red = 1 - (value - red).sign_()
    is_blue = (1 - is_red).mul_((value - green).sign_())
    is_green = 1 - is_red - is_blue
    hue = is_red.mul_(green - blue)
    hue += is_green * (blue - red)
    hue += is_blue * (red - green)
    hue /= chroma.clamp_min(1e-12)
    hue += 2 * is_green + 4 * is_blue + 6 * shifts
    k = hue[:, None] + torch.tensor([5.0, 3.0, 1.0])[:, None, None]
    k -= (k / 6).floor_().mul_(6)
    distance = torch.minimum(k, 4 - k).clamp_(0, 1)
    return value[:, None] - distance.mul_(chroma[:, None])


def _gaussian_blur(images: Tensor, sigmas: Tensor, kernel_size: int) -> Tensor:
    radius = kernel_size // 2
    offsets = torch.arange(-radius, radius + 1)
    kernels = torch.softmax(-0.5 * (offsets / sigmas[:, None]) ** 2, dim=1)
    images = F.pad(images, [radius] * 4, mode="reflect")
    # Each image has its own kernel: summing shifted images is faster than a convolution of n C groups.
    for dimension in (2, 3):
        size = images.shape[dimension] - 2 * radius
        blurred = images.narrow(dimension, 0, size) * kernels[:, 0, None, None, None]
        for shift in range(1, kernel_size):
            blurred.addcmul_(images.narrow(dimension, shift, size), kernels[:, shift, None, None, None])
        images = blurred
    return images
