"""RandAugment of a whole batch: images that drew the same operation pass through it together, on their device."""

from __future__ import annotations

import torch
from torch import Tensor


def rand_augment(images: Tensor) -> Tensor:
    """Return uint8 images [n, 1 or 3, H, W] after torchvision's RandAugment (Cubuk et al. 2020), on their device.

    Draws from torch's global generator of the CPU, image by image, what `torchvision.transforms.RandAugment` draws for
    each with its defaults, and makes the same images of it. That class gives a whole batch one set of operations.
    """
    from torchvision.transforms.autoaugment import RandAugment, _apply_op  # here, as importing it takes a second
    from torchvision.transforms.v2.functional import equalize

    one = RandAugment()
    table = one._augmentation_space(one.num_magnitude_bins, tuple(images.shape[-2:]))
    space = [(name, float(m[one.magnitude]) if m.dim() else 0.0, signed) for name, (m, signed) in table.items()]

    def drawn() -> tuple[str, float]:
        name, magnitude, signed = space[int(torch.randint(len(space), (1,)))]
        return name, -magnitude if signed and torch.randint(2, (1,)) else magnitude

    operations = [[drawn() for _ in range(one.num_ops)] for _ in range(len(images))]
    images = images.clone()
    for stage in zip(*operations, strict=True):
        for name, magnitude in dict.fromkeys(stage):
            rows = [row for row, of_image in enumerate(stage) if of_image == (name, magnitude)]
            if name == "Equalize":  # which that class takes image by image
                images[rows] = equalize(images[rows])
            else:
                images[rows] = _apply_op(images[rows], name, magnitude, one.interpolation, fill=None)
    return images
