"""Two random views of each image, computed for a whole batch at once.

Every image has its own random parameters, drawn from an explicit generator. The operations are plain
functions of float32 images [n, C, H, W] in [0, 1] and of one parameter an image, in torchvision's
definitions.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from ..options import Options

_Probability = Annotated[float, Field(ge=0, le=1)]
_Strength = Annotated[float, Field(ge=0)]
_CROP_TRIES = 10


class AugmentationOptions(Options):
    """Strength and probability of each operation; 0 turns one off (crop: scale (1, 1) and ratio (1, 1)).

    Colour jitter, grayscale and flip are BYOL's (Grill et al. 2020, appendix B), blur is SimCLR's (Chen et
    al. 2020, appendix A: probability 0.5, sigma 0.1 to 2, kernel a tenth of the side). The smallest crop of
    0.2 of the area is that of MoCo v2, SimSiam and FedU2's released code; BYOL's 0.08 leaves 9x9 pixels of a
    32x32 image.

    crop_scale: the crop's share of the area; crop_ratio: its width / height (drawn evenly in the logarithm).
    flip, grayscale, blur, jitter_probability: probabilities.
    brightness, contrast, saturation: factors are drawn from [max(0, 1 - value), 1 + value].
    hue: shifts are drawn from [-hue, hue] turns of the colour wheel.
    blur_sigma: standard deviation of the blur in pixels.
    solarize: probability that values of 0.5 and more (of 1) are inverted, the last operation in BYOL and MoCo v3. They
        do so to one view of two with probability 0.2; here each view has the same. Off by default.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: _Probability = 0.5
    brightness: _Strength = 0.4
    contrast: _Strength = 0.4
    saturation: _Strength = 0.2
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    jitter_probability: _Probability = 0.8
    grayscale: _Probability = 0.2
    blur: _Probability = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: _Probability = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> "AugmentationOptions":
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two numbers with 0 < low <= high, came ({low:g}, {high:g})")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale must not exceed 1 (the whole image), came {self.crop_scale[1]:g}")
        return self


def normalize(images: Tensor) -> Tensor:
    """uint8 [..., C, H, W] to float32 (x / 255 - 0.5) / 0.25, which lies in [-2, 2].

    The constants are fixed instead of measured, so that no client's pixel statistics leave it.
    """
    _check(images)
    return images.float().mul_(4 / 255).sub_(2)


def two_views(images: Tensor, options: AugmentationOptions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two independent calls of `augment`: the positive pair of uint8 images [n, C, H, W]."""
    return augment(images, options, generator), augment(images, options, generator)


def augment(images: Tensor, options: AugmentationOptions, generator: torch.Generator) -> Tensor:
    """One random view of each image: uint8 [n, C, H, W] to normalised float32 [n, C, H, W] (see `normalize`).

    Random resized crop, horizontal flip, colour jitter, grayscale, Gaussian blur, solarisation, in BYOL's order.
    Images of one channel skip saturation, hue and grayscale. The order of the four jitter operations is drawn
    once a batch.

    Randomness comes from `generator` alone. The parameters are drawn on the generator's device and moved to
    the images', so that a CPU generator gives the same parameters for images on a CPU and on a GPU.
    """
    _check(images)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 2:
        raise ValueError(f"images must be [n, 1 or 3, H, W] with sides of at least 2, came {list(images.shape)}")
    count, channels, height, width = images.shape
    device = images.device
    views = images.float().div_(255)

    boxes = draw_crop_boxes(count, height, width, options.crop_scale, options.crop_ratio, generator)
    mirrored = _uniform(count, 0, 1, generator) < options.flip
    views = crop_and_resize(views, boxes.to(device), mirrored.to(device))

    chosen = _choose(count, options.jitter_probability, generator).to(device)
    views[chosen] = _jitter(views[chosen], options, generator)
    if channels == 3:
        chosen = _choose(count, options.grayscale, generator).to(device)
        views[chosen] = to_gray(views[chosen]).expand(-1, 3, -1, -1)
    chosen = _choose(count, options.blur, generator).to(device)
    sigmas = _uniform(len(chosen), *options.blur_sigma, generator).to(device)
    views[chosen] = gaussian_blur(views[chosen], sigmas, blur_kernel_size(height, width))
    if options.solarize:  # nothing is drawn where it is off, so that it does not move other draws
        chosen = _choose(count, options.solarize, generator).to(device)
        views[chosen] = solarize(views[chosen])
    return views.sub_(0.5).div_(0.25)


def _jitter(images: Tensor, options: AugmentationOptions, generator: torch.Generator) -> Tensor:
    strengths = (options.brightness, options.contrast, options.saturation, options.hue)
    operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    # A one-channel image is its own gray version: saturation and hue would not change it.
    available = 4 if images.shape[1] == 3 else 2
    for index in torch.randperm(available, generator=generator, device=generator.device).tolist():
        strength, operation = strengths[index], operations[index]
        if strength == 0:
            continue
        low, high = (-strength, strength) if operation is adjust_hue else (max(0.0, 1 - strength), 1 + strength)
        images = operation(images, _uniform(len(images), low, high, generator).to(images.device))
    return images


# ---- drawing -------------------------------------------------------------------------------------------


def draw_crop_boxes(
    count: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """Boxes of a random resized crop, int64 [count, 4]: top, left, height, width, all inside the image.

    Distributed as torchvision's RandomResizedCrop: the first of ten drawn shapes that fits, else the largest
    central box whose ratio is allowed.
    """
    uniforms = torch.rand(2 * _CROP_TRIES + 2, count, generator=generator, device=generator.device)
    areas = height * width * (scale[0] + (scale[1] - scale[0]) * uniforms[:_CROP_TRIES])
    low, high = torch.tensor(ratio, device=generator.device).log()
    ratios = (low + (high - low) * uniforms[_CROP_TRIES : 2 * _CROP_TRIES]).exp()
    widths = (areas * ratios).sqrt().round().long()
    heights = (areas / ratios).sqrt().round().long()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)

    first = fits.int().argmax(0, keepdim=True)  # the first of the largest, so the first that fits
    found = fits.any(0)
    limited = min(max(width / height, ratio[0]), ratio[1])
    box_width = torch.where(found, widths.gather(0, first)[0], min(width, max(1, round(height * limited))))
    box_height = torch.where(found, heights.gather(0, first)[0], min(height, max(1, round(width / limited))))
    # A uniform number that rounding took to 1 must not push the box over the edge: hence the minimum.
    top = torch.minimum((uniforms[-2] * (height - box_height + 1)).long(), height - box_height)
    left = torch.minimum((uniforms[-1] * (width - box_width + 1)).long(), width - box_width)
    top = torch.where(found, top, (height - box_height) // 2)
    left = torch.where(found, left, (width - box_width) // 2)
    return torch.stack((top, left, box_height, box_width), dim=1)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


def _choose(count: int, probability: float, generator: torch.Generator) -> Tensor:
    """Indices of the images that an operation with that probability applies to."""
    return (_uniform(count, 0, 1, generator) < probability).nonzero()[:, 0]


# ---- operations ----------------------------------------------------------------------------------------


def crop_and_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Cut box i from image i, stretch it to the image's size, and swap left and right where mirrored[i].

    images [n, C, H, W]; boxes int64 [n, 4]: top, left, height, width; mirrored bool [n]. Bilinear. A box is
    never larger than the image, so this never shrinks and needs no filter against aliasing.
    """
    height, width = images.shape[2:]
    rows = _sample_positions(boxes[:, 0], boxes[:, 2], height)
    columns = _sample_positions(boxes[:, 1], boxes[:, 3], width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    x, y = columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)
    grid = torch.stack((x, y), dim=3)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def _sample_positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """[n, size]: where to read for each output pixel, as grid_sample counts (-1 and 1 are the edges)."""
    start, length = start[:, None].float(), length[:, None].float()
    pixels = start + (torch.arange(size, device=start.device) + 0.5) * (length / size) - 0.5
    # Half a pixel beyond the box belongs to its neighbours: repeat the box's border instead.
    pixels = torch.minimum(torch.maximum(pixels, start), start + length - 1)
    return (2 * pixels + 1) / size - 1


def to_gray(images: Tensor) -> Tensor:
    """RGB [n, 3, H, W] to luma [n, 1, H, W] by the ITU-R 601 weights."""
    weights = torch.tensor([[0.2989, 0.587, 0.114]], device=images.device)
    return (weights @ images.flatten(2)).unflatten(2, images.shape[2:])


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply image i by factors[i] ([n], >= 0): 0 is black, 1 changes nothing."""
    return (images * factors[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Stretch image i about its mean luma by factors[i] ([n], >= 0): 0 is uniform gray, 1 changes nothing."""
    gray = to_gray(images) if images.shape[1] == 3 else images
    return _blend(images, gray.mean((1, 2, 3), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Stretch RGB image i about its gray version by factors[i] ([n], >= 0): 0 is gray, 1 changes nothing."""
    return _blend(images, to_gray(images), factors)


def _blend(images: Tensor, centres: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(centres.expand_as(images), images, factors[:, None, None, None]).clamp_(0, 1)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the HSV hue of RGB image i by shifts[i] ([n], in turns, -0.5 to 0.5)."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    # Which channel is the largest, as 0 or 1: on a CPU this takes a fraction of the time of booleans.
    is_red = 1 - (value - red).sign_()
    is_blue = (1 - is_red).mul_((value - green).sign_())
    is_green = 1 - is_red - is_blue
    # Hue in sixths of a turn. A pixel without chroma is gray, whatever hue it gets.
    hue = is_red.mul_(green - blue)
    hue += is_green * (blue - red)
    hue += is_blue * (red - green)
    hue /= chroma.clamp_min(1e-12)
    hue += 2 * is_green + 4 * is_blue + 6 * shifts[:, None, None]
    # Channel c is value - chroma * clamp(min(k, 4 - k), 0, 1) with k = (hue + c's offset) mod 6.
    k = hue[:, None] + torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]
    k -= (k / 6).floor_().mul_(6)
    distance = torch.minimum(k, 4 - k).clamp_(0, 1)
    return value[:, None] - distance.mul_(chroma[:, None])


def blur_kernel_size(height: int, width: int) -> int:
    """The odd number nearest to a tenth of the shorter side, at least 3 (SimCLR, appendix A)."""
    return max(3, 2 * round((min(height, width) / 10 - 1) / 2) + 1)


def gaussian_blur(images: Tensor, sigmas: Tensor, kernel_size: int) -> Tensor:
    """Blur image i with standard deviation sigmas[i] ([n], pixels > 0), borders reflected.

    `kernel_size` is odd and less than twice the shorter side.
    """
    radius = kernel_size // 2
    offsets = torch.arange(-radius, radius + 1, device=images.device)
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


def solarize(images: Tensor) -> Tensor:
    """Invert the values of 0.5 and more: [n, C, H, W], 0 to 1."""
    return torch.where(images >= 0.5, 1 - images, images)


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 with values 0 to 255, came {images.dtype}")
