"""RandAugment of a whole batch: images that drew the same operation pass through it together, on their device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_OPERATIONS_AN_IMAGE = 2
_MAGNITUDE, _MAGNITUDES = 9, 31  # torchvision's defaults: the ninth after 0 of so many equal steps


def rand_augment(images: Tensor) -> Tensor:
    """Return uint8 images [n, 1 or 3, H, W], each after two random operations, on their device.

    Cubuk et al. 2020, RandAugment, with torchvision's operations and default magnitude. Draws from torch's global
    generator of the CPU, image by image, what `torchvision.transforms.RandAugment` draws for each image, so that both
    make the same images of the same seed.
    """
    operations = _operations(*images.shape[-2:])
    drawn = [[_draw(operations) for _ in range(_OPERATIONS_AN_IMAGE)] for _ in range(len(images))]
    images = images.clone()
    for stage in range(_OPERATIONS_AN_IMAGE):
        rows_of: dict[tuple[int, float], list[int]] = {}
        for row, of_image in enumerate(drawn):
            rows_of.setdefault(of_image[stage], []).append(row)
        for (number, magnitude), rows in rows_of.items():
            places = torch.tensor(rows, device=images.device)
            images[places] = operations[number][0](images[places], magnitude)
    return images


#: what is done with uint8 images [m, C, H, W], given a magnitude; the magnitude; whether its sign is drawn
_Operation = tuple[Callable[[Tensor, float], Tensor], float, bool]


def _draw(operations: list[_Operation]) -> tuple[int, float]:
    """Return the number of an operation and its magnitude."""
    number = int(torch.randint(len(operations), (1,)))
    _, magnitude, signed = operations[number]
    return number, -magnitude if signed and torch.randint(2, (1,)) else magnitude


def _operations(height: int, width: int) -> list[_Operation]:
    """Return torchvision's operations in its order."""
    from torchvision.transforms import functional as F  # here, as importing it takes a second

    def moved(x: Tensor, translate: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0)) -> Tensor:
        center = [0, 0] if any(shear) else None
        pixels, degrees = [int(t) for t in translate], [math.degrees(math.atan(s)) for s in shear]
        return F.affine(x, angle=0.0, translate=pixels, scale=1.0, shear=degrees, center=center)

    def share(largest: float) -> float:
        return float(torch.linspace(0.0, largest, _MAGNITUDES)[_MAGNITUDE])

    enhancements = (F.adjust_brightness, F.adjust_saturation, F.adjust_contrast, F.adjust_sharpness)
    return [
        (lambda x, m: x, 0.0, False),
        (lambda x, m: moved(x, shear=(m, 0)), share(0.3), True),
        (lambda x, m: moved(x, shear=(0, m)), share(0.3), True),
        (lambda x, m: moved(x, translate=(m, 0)), share(150 / 331 * width), True),
        (lambda x, m: moved(x, translate=(0, m)), share(150 / 331 * height), True),
        (lambda x, m: F.rotate(x, m), share(30.0), True),
        *((lambda x, m, change=change: change(x, 1.0 + m), share(0.9), True) for change in enhancements),
        (lambda x, m: F.posterize(x, int(m)), 7.0, False),
        (lambda x, m: F.solarize(x, m), 255.0 - share(255.0), False),
        (lambda x, m: F.autocontrast(x), 0.0, False),
        (lambda x, m: equalized(x), 0.0, False),
    ]


def equalized(images: Tensor) -> Tensor:
    """Return uint8 images [m, C, H, W] with each channel's histogram equalised, as torchvision does one by one."""
    levels = images.flatten(2).long()
    counts = levels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels))
    brightest = counts.gather(2, levels.amax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - brightest) // 255
    below = counts.cumsum(2) - counts  # pixels darker than each level
    table = ((below + step // 2) // step.clamp_min(1)).clamp_max(255)
    return torch.where(step > 0, table.gather(2, levels), levels).to(torch.uint8).view_as(images)
