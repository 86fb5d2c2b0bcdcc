"""Conversions of pixels: to 8 bits, to image tensors uint8 [n, C, H, W], to another size, and to a network's input."""

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from .files import notify

#: [low, high] become 0 and 255, as a radiologist's window does; `full` is the range of the pixels' type; `per_image` is
#: each image's own smallest and largest value; `file` is the window that a DICOM file names itself
Window = tuple[float, float] | Literal["full", "per_image", "file"]

_NARROWEST = 1e-200  # a window of one value is a step from 0 to 255 above it, and its quotients stay finite
_VALUES_AT_A_TIME = 2**22
_RESIZED_AT_A_TIME = 1024


def apply_window(
    images: NDArray[Any], window: Window, type_range: tuple[float, float] | None = None
) -> NDArray[np.uint8]:
    """Scale finite pixels [n, ...] of any number type to 0..255; those outside the window become 0 or 255.

    With `per_image` an image of one value becomes 0. `full` is from the smallest to the largest value of the stored
    type, `type_range`, by default of the array's; floats without it raise ValueError.
    """
    if window == "file":
        raise ValueError("these pixels have no window of their own; set data.window=[LOW,HIGH]")
    if window == "full":
        if type_range is None and images.dtype.kind not in "iu":
            raise ValueError("these pixels have no full range, as they are floats; set data.window=[LOW,HIGH]")
        window = type_range or (float(np.iinfo(images.dtype).min), float(np.iinfo(images.dtype).max))
    scaled = np.empty(images.shape, np.uint8)
    step = max(1, _VALUES_AT_A_TIME // max(1, images[:1].size))  # in parts, as float64 takes eight times the memory
    for start in range(0, len(images), step):
        part = images[start : start + step].astype(np.float64)
        axes = tuple(range(1, part.ndim))
        limits: Any = (
            (part.min(axes, keepdims=True), part.max(axes, keepdims=True)) if window == "per_image" else window
        )
        low, high = limits
        width = np.maximum(high - low, _NARROWEST)
        scaled[start : start + step] = np.rint(np.clip((part - low) / width, 0.0, 1.0) * 255.0)
    return scaled


def parse_window(text: str) -> Window:
    """Read a window as it is written on the command line: `0,4095`, `full` or `per_image`."""
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


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 [..., C, H, W] to float32 (x / 255 - 0.5) / 0.25, which lies in [-2, 2].

    The constants are fixed instead of measured, so that no client's pixel statistics leave it.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 with values 0 to 255, got {images.dtype}")
    return images.float().mul_(4 / 255).sub_(2)


def to_uint8(arrays: dict[str, NDArray[Any]], window: Window | None = None) -> dict[str, NDArray[np.uint8]]:
    """Convert pixels [n, ...] to 0..255; `arrays` are by the name that error messages use.

    Pixels of 8 bits stay as they are. Others are scaled by `window`. Without one, floats are in [0, 1] or in
    [0, 255] and integers in 0..255. All float arrays share one scale, so that a dark test set is not brightened.
    """
    for name, array in arrays.items():
        _check_pixels(name, array, window)
    brightest = max((float(array.max()) for array in arrays.values() if array.dtype.kind == "f"), default=0.0)
    float_scale = 255.0 if brightest <= 1.0 else 1.0
    converted = {}
    for name, array in arrays.items():
        if array.dtype == np.uint8:
            converted[name] = array
        elif window is not None and _is_deep(array):
            converted[name] = apply_window(array, window)
        elif array.dtype.kind == "f":
            converted[name] = np.rint(array.astype(np.float32) * float_scale).astype(np.uint8)
        else:
            converted[name] = array.astype(np.uint8) * np.uint8(255 if array.dtype.kind == "b" else 1)
        if array.dtype.kind != "f" and converted[name].max() == 1:
            notify(f"{name} has no pixel above 1 of 255, so that all is black: save pixels of 0 and 1 as type bool")
    return converted


def _is_deep(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "b" and array.dtype != np.uint8


def _check_pixels(name: str, array: NDArray[Any], window: Window | None) -> None:
    if window == "file" and _is_deep(array):
        raise UserError(f"{name} names no window of its own, as a DICOM file does; set data.window=[LOW,HIGH]")
    if array.dtype.kind not in "iubf":
        raise UserError(f"{name} has type {array.dtype}; pixels must be uint8 (or floats in [0, 1] or [0, 255])")
    if array.size == 0:
        raise UserError(f"{name} is empty (shape {list(array.shape)}); at least one image is needed")
    if array.ndim not in (3, 4):
        raise _wrong_shape(name, array)
    if array.dtype.kind == "f":
        not_finite = array.size - int(np.isfinite(array).sum())
        if not_finite > 0:
            raise UserError(f"{name} has {not_finite} pixels that are NaN or infinite; repair or drop those images")
        if window == "full":
            raise UserError(
                f"{name} has floats, which have no full range; set data.window=[LOW,HIGH] or data.window=per_image"
            )
    low, high = array.min(), array.max()
    if window is None and (low < 0 or high > 255):
        raise UserError(
            f"{name} has pixels from {low:g} to {high:g}; expected uint8, or floats in [0, 1] or [0, 255]; set "
            f"data.window=[{low:g},{high:g}] or another range that becomes 0 to 255, or data.window=full (the range "
            "of the type), or data.window=per_image"
        )


def channels_first(array: NDArray[Any], name: str) -> Tensor:
    """Convert [n, H, W], [n, H, W, C] or [n, C, H, W] with 1 or 3 channels to a tensor [n, C, H, W].

    Where both layouts with channels fit, the array is read as [n, H, W, C]. Errors of other shapes begin with `name`.
    """
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    elif not (array.ndim == 4 and array.shape[1] in (1, 3)):
        raise _wrong_shape(name, array)
    return torch.from_numpy(np.ascontiguousarray(array))


def _wrong_shape(name: str, array: NDArray[Any]) -> UserError:
    return UserError(f"{name} has shape {list(array.shape)}; expected [n, H, W] or [n, H, W, C] with 1 or 3 channels")


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Crop the centre of the images [n, C, H, W] to the target's shape and resize it, bilinear and antialiased."""
    from torchvision.transforms.v2 import functional

    old_height, old_width = images.shape[2:]
    scale = min(old_height / height, old_width / width)
    box = [max(1, round(height * scale)), max(1, round(width * scale))]
    # In parts: the filter may work in float, and a whole dataset would then take four times its memory.
    parts = [
        functional.resize(functional.center_crop(part, box), [height, width], antialias=True)
        for part in images.split(_RESIZED_AT_A_TIME)
    ]
    return torch.cat(parts)
