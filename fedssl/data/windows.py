"""From pixels of more than 8 bits to 0..255, by a window that the user states: nothing is clipped silently."""

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

#: [low, high] become 0 and 255, as a radiologist's window does; `full` is the range of the pixels' type; `per_image` is
#: each image's own smallest and largest value; `file` is the window that a DICOM file names itself
Window = tuple[float, float] | Literal["full", "per_image", "file"]

_VALUES_AT_A_TIME = 2**22


def apply_window(
    images: NDArray[Any], window: Window, type_range: tuple[float, float] | None = None
) -> NDArray[np.uint8]:
    """Scale pixels of any number type to 0..255; those outside the window become 0 or 255.

    Args:
        images: [n, ...], finite.
        window: which values become 0 and 255. An image of one value becomes 0 with `per_image`.
        type_range: the smallest and largest value of the stored type, for `full`; None where it has no such range.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: the window is `full` and there is no `type_range`.
    """
    scaled = np.empty(images.shape, np.uint8)
    step = max(1, _VALUES_AT_A_TIME // max(1, images[:1].size))  # in parts, as float64 takes eight times the memory
    for start in range(0, len(images), step):
        part = images[start : start + step].astype(np.float64)
        low, high = _limits(part, window, type_range)
        width = np.maximum(high - low, np.finfo(np.float64).tiny)
        scaled[start : start + step] = np.rint(np.clip((part - low) / width, 0.0, 1.0) * 255.0)
    return scaled


def _limits(
    images: NDArray[np.float64], window: Window, type_range: tuple[float, float] | None
) -> tuple[float | NDArray[np.float64], float | NDArray[np.float64]]:
    """The values that become 0 and 255: numbers, or arrays that broadcast against `images` [n, ...]."""
    if window == "per_image":
        within = tuple(range(1, images.ndim))
        return images.min(within, keepdims=True), images.max(within, keepdims=True)
    if window == "full":
        if type_range is None:
            raise ValueError("these pixels have no full range, as they are floats; set data.window=[LOW,HIGH]")
        return type_range
    if window == "file":
        raise ValueError("these pixels have no window of their own; set data.window=[LOW,HIGH]")
    return window


def parse_window(text: str) -> Window:
    """A window as one writes it on the command line: `0,4095`, `full` or `per_image`.

    Raises:
        UserError: it is none of these.
    """
    if text == "full":
        return "full"
    if text == "per_image":
        return "per_image"
    try:
        low, high = (float(value) for value in text.strip("[]").split(","))
    except ValueError:
        low = high = math.nan
    if not low < high:
        raise UserError(
            f"the window is {text!r}: expected LOW,HIGH with LOW < HIGH, such as 0,4095; or full, per_image"
        )
    return low, high


def range_of_type(dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """The smallest and largest value of an integer type; None for others."""
    if dtype.kind not in "iu":
        return None
    limits = np.iinfo(dtype)
    return float(limits.min), float(limits.max)
