"""Augmentations make random views of a client's images."""

from abc import abstractmethod
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from fedkernels import ViewKey

from ..errors import UserError
from ..parts import Part
from ..randomness import generators_set_to, seed_for


class Augmentation(Part):
    """Makes two random views of each image of a batch.

    What it draws must follow from `samples` and `key`, or come from torch's global generators, as in torchvision's
    transforms: `draw_views` seeds those for each batch. Then a run can be repeated and resumed.
    """

    #: whether it draws from torch's global generators
    uses_global_generators: ClassVar[bool] = True

    def check_channels(self, channels: int) -> None:
        """Raise UserError if the options do not go with images of so many channels."""

    @abstractmethod
    def views(self, images: Tensor, samples: Tensor, key: ViewKey) -> tuple[Tensor, Tensor]:
        """Draw two random views of each image, float32 [n, C, H, W], normalised as by `fedssl.data.pixels.normalize`.

        Args:
            images: uint8 [n, C, H, W], on the device where the network is.
            samples: int64 [n], the images' numbers in their data set, on the device of `images`.
            key: what the views belong to: seed, client, round and epoch.
        """

    def further_views(self, images: Tensor, samples: Tensor, key: ViewKey) -> tuple[Tensor, Tensor]:
        """Draw two more views, for objectives with more than two, of the shape that `further_shape` gives.

        They are drawn as `views` are, unless a subclass overrides this. Its arguments are those of `views`, with
        another key.
        """
        return self.views(images, samples, key)

    def further_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [C, h, w] of further views of images [C, H, W], given theirs."""
        return shape


def draw_views(
    augmentation: Augmentation, images: Tensor, samples: Tensor, key: ViewKey, device: torch.device, count: int = 2
) -> tuple[Tensor, ...]:
    """Draw `count` random views of each image of a batch, float32 [n, C, H, W] on `device`.

    The first two are the augmentation's `views`, the others its `further_views`, which may be smaller.

    The images, uint8 [n, C, H, W], are moved to `device` before, as bytes, so that a GPU makes the views. `samples` are
    their numbers in their data set, int64 [n] on the CPU; views of the same key and sample are the same. Views are
    drawn in pairs: an odd number of them takes as long as the next even one.

    Raises:
        UserError: the augmentation returned something else than two such tensors.
    """
    on_device, numbers = images.to(device), samples.to(device, non_blocking=True)
    views: list[Tensor] = []
    for pair in range((count + 1) // 2):
        key_of_pair = key._replace(seed=seed_for(key.seed, "pair", pair)) if pair else key
        seed = seed_for(*key_of_pair, *samples.tolist()) if augmentation.uses_global_generators else 0
        with generators_set_to(seed) if augmentation.uses_global_generators else nullcontext():
            draw = augmentation.further_views if pair else augmentation.views
            drawn = draw(on_device, numbers, key_of_pair)
        shape = augmentation.further_shape(images.shape[1:]) if pair else images.shape[1:]
        method = f"{augmentation.name}: {'further_views' if pair else 'views'}"
        _require_views(method, drawn, [len(images), *shape], on_device.device)
        views += drawn
    return tuple(views[:count])


def _require_views(method: str, drawn: object, shape: list[int], device: torch.device) -> None:
    needed = f"float32 {shape} on {device}"
    got = [_describe(view) for view in drawn] if isinstance(drawn, (tuple, list)) else _describe(drawn)
    if got != [needed, needed]:
        shown = got if isinstance(got, str) else f"[{', '.join(got)}]"
        raise UserError(f"augmentation {method} must return two tensors, each {needed}, got {shown}")


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
