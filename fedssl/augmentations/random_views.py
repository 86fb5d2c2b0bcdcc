"""Crop, flip, colour jitter, grayscale, blur and solarisation, as BYOL and SimCLR have them."""

from dataclasses import fields
from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedkernels import ViewKey, ViewOptions, two_views

from ..errors import UserError
from .base import Augmentation

_Probability = Annotated[float, Field(ge=0, le=1)]
_Strength = Annotated[float, Field(ge=0)]


class RandomViews(Augmentation):
    """Strength and probability of each operation; 0 turns one off (crop: scale (1, 1) and ratio (1, 1)).

    Colour jitter, grayscale and flip are BYOL's (Grill et al. 2020, appendix B), blur is SimCLR's (Chen et al. 2020,
    appendix A: probability 0.5, sigma 0.1 to 2, kernel a tenth of the side). The smallest crop of 0.2 of the area is
    that of MoCo v2, SimSiam and FedU2's released code; BYOL's 0.08 leaves 9x9 pixels of a 32x32 image. BYOL and MoCo v3
    solarise one view of two with probability 0.2. Here each view has the same probability, 0 by default.

    Jitter and grayscale are for images of one or three channels; for others both probabilities must be 0.

    The views are those of `fedkernels.two_views`: an image's views depend on the key and on the image's number alone.
    """

    uses_global_generators = False

    crop_scale: tuple[float, float] = Field((0.2, 1.0), description="range of a crop's share of the image's area")
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="smallest and largest width / height of a crop, drawn evenly in the logarithm"
    )
    flip: _Probability = Field(0.5, description="probability of swapping left and right")
    brightness: _Strength = Field(0.4, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    contrast: _Strength = Field(0.4, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    saturation: _Strength = Field(0.2, description="factors are drawn from [max(0, 1 - value), 1 + value]")
    hue: float = Field(0.1, ge=0, le=0.5, description="shifts are drawn from [-value, value] turns of the colour wheel")
    jitter_probability: _Probability = Field(
        0.8, description="probability that brightness, contrast, saturation and hue change"
    )
    grayscale: _Probability = Field(0.2, description="probability of removing the colour")
    blur: _Probability = Field(0.5, description="probability of a Gaussian blur")
    blur_sigma: tuple[float, float] = Field((0.1, 2.0), description="range of the blur's standard deviation, in pixels")
    solarize: _Probability = Field(0.0, description="probability of inverting values of 0.5 to 1, the last operation")

    @model_validator(mode="after")
    def _check_ranges(self) -> "RandomViews":
        """Raise a ValueError that names the option which `fedkernels.two_views` does not take."""
        _ = self.view_options
        return self

    @cached_property
    def view_options(self) -> ViewOptions:
        """Return the options as `fedkernels.two_views` takes them."""
        return ViewOptions(**{field.name: getattr(self, field.name) for field in fields(ViewOptions)})

    def check_channels(self, channels: int) -> None:
        if channels in (1, 3) or not (self.jitter_probability or self.grayscale):
            return
        raise UserError(
            f"augmentation.jitter_probability is {self.jitter_probability:g} and augmentation.grayscale "
            f"{self.grayscale:g}, but these are for images of 1 or 3 channels, and the images have {channels}: set "
            "augmentation.jitter_probability=0 augmentation.grayscale=0"
        )

    def views(self, images: Tensor, samples: Tensor, key: ViewKey) -> tuple[Tensor, Tensor]:
        # the layout in which networks train (models/precision.py)
        return two_views(images, samples, key, self.view_options, memory_format=torch.channels_last)


#: for training on labels, as in FedU2's released code (semi_eval.py): a square of 0.64 to 1 of the area, half mirrored
CROP_AND_FLIP = RandomViews(
    crop_scale=(0.64, 1.0), crop_ratio=(1.0, 1.0), flip=0.5, jitter_probability=0.0, grayscale=0.0, blur=0.0
)
