"""What random views are drawn from: strengths and probabilities, the key of the random numbers, and what was drawn."""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import SymFloat, SymInt, Tensor

_PAIRS = ("crop_scale", "crop_ratio", "blur_sigma")
_PROBABILITIES = ("flip", "jitter_probability", "grayscale", "blur", "solarize")
_STRENGTHS = ("brightness", "contrast", "saturation", "hue")
_LARGEST = {"crop_scale": 1.0, "hue": 0.5, **dict.fromkeys(_PROBABILITIES, 1.0)}
_LARGEST_OF_OTHERS = 1e6  # beyond it nothing is left of an image


@dataclass(frozen=True)
class ViewOptions:
    """Strength and probability of each operation; 0 turns one off (crop of square images: scale and ratio (1, 1)).

    The defaults are BYOL's (Grill et al. 2020, appendix B) with the smallest crop of MoCo v2 and SimSiam.

    Attributes:
        crop_scale: smallest and largest share of the image's area that a crop has, 0 to 1.
        crop_ratio: smallest and largest width / height of a crop, drawn evenly in the logarithm.
        flip: probability of swapping left and right.
        brightness, contrast, saturation: factors are drawn from [max(0, 1 - value), 1 + value].
        hue: shifts are drawn from [-value, value], in turns of the colour wheel, 0 to 0.5.
        jitter_probability: probability that brightness, contrast, saturation and hue change.
        grayscale: probability of removing the colour.
        blur: probability of a Gaussian blur.
        blur_sigma: smallest and largest standard deviation of the blur, in pixels.
        solarize: probability of inverting the values of 0.5 and more (of 1), the last operation.

    Raises:
        TypeError: a value is not a number, or not a pair of numbers.
        ValueError: a value is out of its range; the message names it.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    jitter_probability: float = 0.8
    grayscale: float = 0.2
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            most = _LARGEST.get(name, _LARGEST_OF_OTHERS)
            if name not in _PAIRS:
                if not 0 <= number(name, value, "a number") <= most:
                    raise ValueError(f"{name} must be between 0 and {most:g}, got {short(value)}")
                object.__setattr__(self, name, float(value))
                continue
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise TypeError(f"{name} must be two numbers, got {short(value)}")
            low, high = (number(name, one, "a number") for one in value)
            least = 1 / _LARGEST_OF_OTHERS
            if not least <= low <= high <= most:
                given = f"({short(low)}, {short(high)})"
                raise ValueError(f"{name} must be two numbers with {least:g} <= low <= high <= {most:g}, got {given}")
            object.__setattr__(self, name, (float(low), float(high)))

    def numbers(self) -> list[float]:
        """What the compiled operator takes: struct ViewOptions of csrc/cpu/view_parameters.h."""
        return [
            *self.crop_scale,
            *self.crop_ratio,
            *(math.log(ratio) for ratio in self.crop_ratio),
            self.flip,
            *(getattr(self, name) for name in _STRENGTHS),
            self.jitter_probability,
            self.grayscale,
            self.blur,
            *self.blur_sigma,
            self.solarize,
        ]


class ViewKey(NamedTuple):
    """What the random numbers belong to: views of another key are independent.

    Attributes:
        seed: of the run, 0 to 2^63 - 1.
        client, round, epoch: 0 to 2^32 - 1 each.
    """

    seed: int
    client: int = 0
    round: int = 0
    epoch: int = 0


class ViewParameters(NamedTuple):
    """What was drawn for both views of n images; the first dimension is the view."""

    boxes: Tensor  # [2, n, 4] int64: top, left, height, width of the crop, in pixels
    flip: Tensor  # [2, n] bool
    jitter: Tensor  # [2, n] bool: do brightness, contrast, saturation and hue change?
    order: Tensor  # [2, n, 4] int64: a permutation; 0 is brightness, 1 contrast, 2 saturation, 3 hue
    factors: Tensor  # [2, n, 4] float32: of brightness, contrast and saturation; of the hue the shift in turns
    grayscale: Tensor  # [2, n] bool
    blur: Tensor  # [2, n] bool
    sigma: Tensor  # [2, n] float32: standard deviation of the blur, in pixels
    solarize: Tensor  # [2, n] bool


def number(name: str, value: Any, expected: str = "a Python number") -> Any:
    """Return a real number of Python or numpy as it is, for the caller to compare and then to convert by float.

    A numpy array without dimensions is a number too. True and False are none.
    """
    if type(value) is float:  # soon found, which abstract classes are not
        return value
    one = plain(value)
    if isinstance(one, bool) or not isinstance(one, (Real, SymInt, SymFloat)):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    return one


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Return an integer of Python or numpy as Python's. A symbolic one, as of a traced shape, stays symbolic."""
    if type(value) is int:
        return value
    one = plain(value)
    if isinstance(one, SymInt):
        return one  # type: ignore[return-value]
    if isinstance(one, bool) or not isinstance(one, Integral):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    return int(one)


def plain(value: Any) -> Any:
    """Return one of numpy's scalars and arrays without dimensions as Python's; numpy itself is not needed."""
    if isinstance(value, (int, float, SymInt, SymFloat, Tensor)) or getattr(value, "shape", None) != ():
        return value
    return value.item()


def short(value: object) -> str:
    """Return a value for a message, in about 80 characters. Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
