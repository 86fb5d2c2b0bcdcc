"""Two global views of most of an image, and small local views of little of it, as SwAV and DINO have them."""

from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedkernels import ViewKey, ViewOptions, two_views

from .random_views import RandomViews


class MultiCrop(RandomViews):
    """Multi-crop (Caron et al. 2020, SwAV, section 3.3; scales of Caron et al. 2021, DINO, section 3.1).

    An objective's first two views are global: `random_views` with crops of at least 0.4 of the area. All further ones
    are local: crops of 0.05 to 0.4 of the area, made by the same operator at the images' size and then resized to
    `local_side` by a bilinear filter with antialiasing. How many there are is the objective's (`dino.local_views`). All
    views have the same probabilities of flip, jitter, grayscale, blur and solarisation, whereas DINO blurs the first
    global view always, the second one rarely, and solarises the second one alone.

    Networks must take images of both sizes. Convolutional networks do. With objective `dino` vision transformers of
    timm's interpolate their positions; the local views' sides must then be multiples of the patches' side.
    """

    crop_scale: tuple[float, float] = Field((0.4, 1.0), description="range of a global view's share of the area")
    local_scale: tuple[float, float] = Field((0.05, 0.4), description="range of a local view's share of the area")
    local_side: float = Field(
        0.5, gt=0, le=1, description="a local view's side as a share of the image's; 96 of 224 pixels in DINO"
    )

    @model_validator(mode="after")
    def _check_local_ranges(self) -> "MultiCrop":
        """Raise a ValueError that names the option which `fedkernels.two_views` does not take."""
        try:
            _ = self.local_options
        except ValueError as error:
            raise ValueError(str(error).replace("crop_scale", "local_scale")) from error
        return self

    @cached_property
    def local_options(self) -> ViewOptions:
        """Return the options of local views as `fedkernels.two_views` takes them."""
        return replace(self.view_options, crop_scale=self.local_scale)

    def further_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *(max(1, round(side * self.local_side)) for side in shape[1:]))

    def further_views(self, images: Tensor, samples: Tensor, key: ViewKey) -> tuple[Tensor, Tensor]:
        size = list(self.further_shape(images.shape[1:])[1:])
        views = two_views(images, samples, key, self.local_options, memory_format=torch.channels_last)
        first, second = (F.interpolate(view, size, mode="bilinear", antialias=True) for view in views)
        return first, second
