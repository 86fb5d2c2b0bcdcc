"""Two random views of each image, computed for a whole batch at once.

Every image has its own random parameters, drawn from an explicit generator. `image_operations.py` has what is done
with them.
"""

from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..options import Options
from .image_operations import (
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

_Probability = Annotated[float, Field(ge=0, le=1)]
_Strength = Annotated[float, Field(ge=0)]
_CROP_TRIES = 10


class AugmentationOptions(Options):
    """Strength and probability of each operation; 0 turns one off (crop: scale (1, 1) and ratio (1, 1)).

    Colour jitter, grayscale and flip are BYOL's (Grill et al. 2020, appendix B), blur is SimCLR's (Chen et
    al. 2020, appendix A: probability 0.5, sigma 0.1 to 2, kernel a tenth of the side). The smallest crop of
    0.2 of the area is that of MoCo v2, SimSiam and FedU2's released code; BYOL's 0.08 leaves 9x9 pixels of a
    32x32 image.

    BYOL and MoCo v3 solarise one view of two with probability 0.2. Here each view has the same probability, 0 by
    default.
    """

    crop_scale: tuple[float, float] = Field(
        (0.2, 1.0), description="smallest and largest share of the image's area that a crop has"
    )
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="smallest and largest width / height of a crop, drawn evenly in the logarithm"
    )
    flip: _Probability = Field(0.5, description="probability of swapping left and right")
    brightness: _Strength = Field(0.4, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    contrast: _Strength = Field(0.4, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    saturation: _Strength = Field(0.2, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    hue: float = Field(
        0.1, ge=0, le=0.5, description="shifts are drawn from [-value, value], in turns of the colour wheel"
    )
    jitter_probability: _Probability = Field(
        0.8, description="probability that brightness, contrast, saturation and hue change"
    )
    grayscale: _Probability = Field(0.2, description="probability of removing the colour")
    blur: _Probability = Field(0.5, description="probability of a Gaussian blur")
    blur_sigma: tuple[float, float] = Field(
        (0.1, 2.0), description="smallest and largest standard deviation of the blur, in pixels"
    )
    solarize: _Probability = Field(
        0.0, description="probability of inverting the values of 0.5 and more (of 1), the last operation"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "AugmentationOptions":
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two numbers with 0 < low <= high, got ({low:g}, {high:g})")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale must not exceed 1 (the whole image), got {self.crop_scale[1]:g}")
        return self


def normalize(images: Tensor) -> Tensor:
    """uint8 [..., C, H, W] to float32 (x / 255 - 0.5) / 0.25, which lies in [-2, 2].

    The constants are fixed instead of measured, so that no client's pixel statistics leave it.
    """
    _require_uint8(images)
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
    _require_uint8(images)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 2:
        raise ValueError(f"images must be [n, 1 or 3, H, W] with sides of at least 2, got {list(images.shape)}")
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
    any_fits = fits.any(0)
    limited = min(max(width / height, ratio[0]), ratio[1])
    box_width = torch.where(any_fits, widths.gather(0, first)[0], min(width, max(1, round(height * limited))))
    box_height = torch.where(any_fits, heights.gather(0, first)[0], min(height, max(1, round(width / limited))))
    # A uniform number that rounding took to 1 must not push the box over the edge: hence the minimum.
    top = torch.minimum((uniforms[-2] * (height - box_height + 1)).long(), height - box_height)
    left = torch.minimum((uniforms[-1] * (width - box_width + 1)).long(), width - box_width)
    top = torch.where(any_fits, top, (height - box_height) // 2)
    left = torch.where(any_fits, left, (width - box_width) // 2)
    return torch.stack((top, left, box_height, box_width), dim=1)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


def _choose(count: int, probability: float, generator: torch.Generator) -> Tensor:
    """Indices of the images that an operation with that probability applies to."""
    return (_uniform(count, 0, 1, generator) < probability).nonzero()[:, 0]


def _require_uint8(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 with values 0 to 255, got {images.dtype}")
