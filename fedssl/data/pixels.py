"""Conversions of pixels: to 8 bits, to image tensors uint8 [n, C, H, W], to another size, and to a network's input."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from ..untrusted import printable
from .files import listed, notify
from .options import MOST_CHANNELS, DataOptions

Limits = tuple[float, float]
#: [low, high] become 0 and 255, as a radiologist's window does, also one pair for each channel; `full` is the range of
#: the pixels' type; `per_image` is each image's own smallest and largest value; `file` is the window that a DICOM file
#: names itself; `percentiles` is measured on the training images, and then one of the first two
Window = Limits | tuple[Limits, ...] | Literal["full", "per_image", "file", "percentiles"]

#: of each channel, evenly spread over the images, from which percentiles are measured
VALUES_FOR_WINDOW = 2**22
_PERCENTILES = (1, 99)
_NARROWEST = 1e-200  # a window of one value is a step from 0 to 255 above it, and its quotients stay finite
_VALUES_AT_A_TIME = 2**22
_RESIZED_AT_A_TIME = 1024
_OVERSHOOT = 0.1  # above 1, which resizing by cubic functions leaves in floats of [0, 1]
_NEARLY_CONSTANT = 2  # of 255, between the darkest and the brightest pixel of an image


def apply_window(
    images: NDArray[Any], window: Window, type_range: Limits | None = None, axis: int | None = None
) -> NDArray[np.uint8]:
    """Scale finite pixels [n, ...] of any number type to 0..255; those outside the window become 0 or 255.

    Channels lie along `axis`, 1 or later; without it there is one. A single window holds for every channel. `per_image`
    is each channel's own range, but of one or three channels, which are colours, the image's; one value becomes 0. For
    a window of three pairs a single channel is repeated, and lies last where there was no `axis`.
    `full` is from the smallest to the largest value of the stored type, `type_range`, by default of the array's. Floats
    without it, and the wrong number of windows, raise ValueError.
    """
    if window in ("file", "percentiles"):
        raise ValueError("these pixels have no window of their own; set data.window=[LOW,HIGH]")
    if window == "full":
        if type_range is None and images.dtype.kind not in "iu":
            raise ValueError("these pixels have no full range, as they are floats; set data.window=[LOW,HIGH]")
        window = type_range or (float(np.iinfo(images.dtype).min), float(np.iinfo(images.dtype).max))
    if axis is None and is_by_channel(window):
        images, axis = images[..., None], images.ndim
    channels = 1 if axis is None else images.shape[axis]
    axes = tuple(number for number in range(1, images.ndim) if number != axis or channels in (1, 3))
    windows = windows_of(window, channels)
    along = [len(windows) if number == axis else 1 for number in range(images.ndim)]
    limits: Any = None if window == "per_image" else np.array(windows)
    scaled = np.empty(np.broadcast_shapes(images.shape, along), np.uint8)
    step = max(1, _VALUES_AT_A_TIME // max(1, images[:1].size))  # in parts, as float64 takes eight times the memory
    for start in range(0, len(images), step):
        part = images[start : start + step].astype(np.float64)
        if limits is None:
            low, high = part.min(axes, keepdims=True), part.max(axes, keepdims=True)
        else:
            low, high = limits[:, 0].reshape(along), limits[:, 1].reshape(along)
        width = np.maximum(high - low, _NARROWEST)
        scaled[start : start + step] = np.rint(np.clip((part - low) / width, 0.0, 1.0) * 255.0)
    return scaled


def window_of_percentiles(values: NDArray[Any]) -> Window:
    """Return the percentiles of each channel, [channels, k]; where both are equal, the smallest and largest value."""
    windows: list[Limits] = []
    for channel in values:
        low, high = (float(value) for value in np.percentile(channel.astype(np.float64), _PERCENTILES))
        if not low < high:
            low, high = float(channel.min()), float(channel.max())
        windows.append((low, high if low < high else low + 1.0))
    shown = ", ".join(f"[{low:g}, {high:g}]" for low, high in windows)
    notify(f"data.window is {shown}: the {_PERCENTILES[0]}st and {_PERCENTILES[1]}th percentile of each channel")
    return windows[0] if len(windows) == 1 else tuple(windows)


def windows_of(window: Window, channels: int) -> tuple[Window, ...]:
    """Return the window of each channel; raise ValueError where there is another number of them.

    A single channel may have three, as it is then repeated to three.
    """
    if not is_by_channel(window):
        return (window,) * channels
    if len(window) != channels and (channels, len(window)) != (1, 3):
        raise ValueError(
            f"{channels} channels, but data.window has {len(window)} pairs; give one [LOW,HIGH] for all or for each"
        )
    return tuple(window)


def is_by_channel(window: Window | None) -> TypeGuard[tuple[Limits, ...]]:
    """Return True if a window has a pair for each channel."""
    return isinstance(window, tuple) and isinstance(window[0], tuple)


def wholly_outside(images: NDArray[Any], window: Window, axis: int | None) -> NDArray[np.bool_]:
    """Return which images [n, ...] have no value inside a window of numbers, bool [n]; channels lie along `axis`.

    A blank image, of one value a channel, does not count: it says nothing whatever the window is.
    """
    if not isinstance(window, tuple):
        return np.zeros(len(images), bool)
    axes = tuple(other for other in range(1, images.ndim) if other != axis)
    least, most = images.min(axes).reshape(len(images), -1), images.max(axes).reshape(len(images), -1)
    low, high = np.array(windows_of(window, least.shape[1])).T
    return np.asarray(((most < low) | (least > high)).all(1) & (most > least).any(1))


def parse_window(text: str) -> Window | None:
    """Read a window as it is written on the command line: `0,4095`, `[0,4095],[0,255]`, `full`, `file`, ..."""
    try:
        window: Any = text if text in ("full", "per_image", "file") else json.loads(f"[{text}]")
        while isinstance(window, list) and len(window) == 1:
            window = window[0]
        if window == text or isinstance(window, list):
            return DataOptions(name="images", path=Path(), window=window).window
    except (ValueError, RecursionError):
        pass
    raise UserError(
        f"the window is {text!r}: expected LOW,HIGH with LOW < HIGH, such as 0,4095, or [LOW,HIGH],[LOW,HIGH],... for "
        "each channel; or full, per_image, file"
    )


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 [..., C, H, W] to float32 (x / 255 - 0.5) / 0.25, which lies in [-2, 2].

    The constants are fixed instead of measured, so that no client's pixel statistics leave it.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 with values 0 to 255, got {images.dtype}")
    return images.float().mul_(4 / 255).sub_(2)


def to_uint8(
    arrays: dict[str, NDArray[Any]], window: Window | None = None, channels: int | None = None
) -> dict[str, NDArray[np.uint8]]:
    """Convert pixels [n, ...] to 0..255; `arrays` are by the name that error messages use.

    `channels` is that of `channel_axis`. Pixels of 8 bits stay as they are. Others are scaled by `window`. Without one,
    floats are in [0, 1] or in [0, 255] and integers in 0..255. All float arrays share one scale, so that a dark test
    set is not brightened.
    """
    for name, array in arrays.items():
        require_pixels(name, array, window)
    floats = range_of_floats((name, array) for name, array in arrays.items() if array.dtype.kind == "f" and not window)
    converted = {}
    for name, array in arrays.items():
        if array.dtype == np.uint8:
            converted[name] = array
        elif window is not None and is_deep(array):
            converted[name] = _windowed(name, array, window, channels)
        elif array.dtype.kind == "f":
            converted[name] = apply_window(array, floats)
        else:
            converted[name] = array.astype(np.uint8) * np.uint8(255 if array.dtype.kind == "b" else 1)
        notify_of_constant(name, [np.ptp(image) for image in converted[name]])
    return converted


def range_of_floats(arrays: Iterable[tuple[str, NDArray[Any]]]) -> Limits:
    """Return the range of all arrays of floats: [0, 1] where most values above 0 are at most 1, and else [0, 255].

    Values somewhat above 1 are then told; much larger ones raise a UserError, as neither range suits them. `arrays` are
    looked at in turn, with the names that messages use, and are those that `require_pixels` takes.
    """
    above: dict[str, float] = {}
    count_above, positive, size = 0, 0, 0
    for name, array in arrays:
        count, brightest = int((array > 1).sum()), float(array.max())
        count_above, positive, size = count_above + count, positive + int((array > 0).sum()), size + array.size
        above |= {name: brightest} if count else {}
    if 2 * count_above > positive:
        return 0.0, 255.0
    for name, brightest in above.items():
        if brightest > 1 + _OVERSHOOT:
            raise UserError(
                f"{name} has floats up to {brightest:g}, but most of those above 0 are at most 1; expected floats in "
                "[0, 1] or in [0, 255]; set data.window=[0,1] or [0,255], or another range that becomes 0 to 255"
            )
    if above:
        where, most = listed([*above], 3), max(above.values())
        notify(f"{count_above:,} of {size:,} values are above 1, up to {most:.9g}, and count as 1: {where}")
    return 0.0, 1.0


def notify_of_constant(name: str, contrasts: Sequence[int]) -> None:
    """Tell that most images are nearly of one colour; of each, its brightest pixel minus its darkest, 0 to 255."""
    if np.median(contrasts) <= _NEARLY_CONSTANT:
        notify(
            f"{name}: in most images all pixels are at most {_NEARLY_CONSTANT} of 255 apart, from which nothing can be "
            "learned: set data.window to the range of its values, or where they have 8 bits spread them over 0 to 255; "
            "in arrays, pixels of 0 and 1 need the type bool"
        )


def notify_of_copies(hashes: Sequence[int], name_of: Callable[[int], str]) -> None:
    """Tell how many images have the same pixels as an earlier one, by a hash of each; `name_of` names one by its row.

    Hashing 64 x 64 pixels in colour takes 5 microseconds, decoding them from a PNG file of noise 90 (AMD EPYC).
    """
    first: dict[int, int] = {}
    copies = [(first[value], row) for row, value in enumerate(hashes) if first.setdefault(value, row) != row]
    if copies:
        one, other = map(printable, map(name_of, copies[0]))
        notify(
            f"{len(copies):,} of {len(hashes):,} images have the pixels of an earlier one, such as {one} and {other}: "
            "leave out the copies, since one in training and one in testing make figures too good"
        )


def is_deep(array: NDArray[Any]) -> bool:
    """Return True if pixels need a window where their values are not those of 8 bits."""
    return array.dtype.kind != "b" and array.dtype != np.uint8


def _windowed(name: str, array: NDArray[Any], window: Window, channels: int | None) -> NDArray[np.uint8]:
    axis = None if array.ndim == 3 else channel_axis(array.shape, name, channels)
    try:
        scaled = apply_window(array, window, axis=axis)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    if array.dtype.kind == "f" and (outside := wholly_outside(array, window, axis)).any():
        first = int(outside.argmax())
        raise UserError(
            f"{name}: {int(outside.sum())} of {len(array)} images lie wholly outside data.window, and would be all "
            f"black or white; the first is row {first}, of {array[first].min():g} to {array[first].max():g}; "
            "correct data.window, or those images"
        )
    return scaled


def require_pixels(name: str, array: NDArray[Any], window: Window | None = "percentiles") -> None:
    """Raise a UserError, which begins with `name`, unless an array holds images that a window can bring to 8 bits."""
    if array.dtype.kind not in "iubf":
        raise UserError(f"{name} has type {array.dtype}; pixels must be uint8 (or floats in [0, 1] or [0, 255])")
    if array.size == 0:
        raise UserError(f"{name} is empty (shape {list(array.shape)}); at least one image is needed")
    if array.ndim not in (3, 4):
        raise _wrong_shape(name, array.shape)
    if array.dtype.kind == "f" and (not_finite := int((~np.isfinite(array)).sum())):
        raise UserError(f"{name} has {not_finite} pixels that are NaN or infinite; repair or drop those images")
    low, high = array.min(), array.max()
    if window is None and (low < 0 or high > 255):
        raise UserError(
            f"{name} has pixels from {low:g} to {high:g}; expected uint8, or floats in [0, 1] or [0, 255]; set "
            f"{windows_to_set(low, high, array.dtype.kind != 'f')}"
        )


def windows_to_set(low: float, high: float, integers: bool) -> str:
    """Name the windows that pixels from `low` to `high` can have."""
    full = ", or data.window=full (the range of the type)" if integers else ""
    pair = f"[{low:g},{high:g}] or another" if low < high else "[LOW,HIGH], the"
    return (
        f"data.window={pair} range that becomes 0 to 255{full}, or data.window=per_image, or "
        "data.window=percentiles (of each channel, 1 to 99 %)"
    )


def channels_first(array: NDArray[Any], name: str, channels: int | None = None) -> Tensor:
    """Convert [n, H, W], [n, H, W, C] or [n, C, H, W] to a tensor [n, C, H, W], see `channel_axis`.

    Where `channels` is 3, grey images get three equal channels. Where it is 1, colours become grey as in Pillow.
    """
    if array.ndim == 3 and channels in (None, 1, 3):
        array = array[:, None]
    elif channel_axis(array.shape, name, channels) == 3:
        array = array.transpose(0, 3, 1, 2)
    images = torch.from_numpy(np.ascontiguousarray(array))
    return in_channels(images, channels or images.shape[1])


def in_channels(images: Any, channels: int) -> Any:
    """Return uint8 images [n, 1 or 3, H, W], which may lie in a file, as grey (1) or colour (3).

    Grey is repeated, and colour becomes its luma as in Pillow. Those that are so already are returned as they are.
    Images of another number of channels must have `channels`, or a UserError is raised.
    """
    if images.shape[1] == channels:
        return images
    if not {images.shape[1], channels} <= {1, 3}:
        raise UserError(f"the images have {images.shape[1]} channels, and {channels} are expected: give such images")
    parts = images.split(_RESIZED_AT_A_TIME)
    if channels == 3:
        return torch.cat([part.expand(-1, 3, -1, -1) for part in parts])
    weighted = (part.int() * torch.tensor([19595, 38470, 7471])[:, None, None] for part in parts)
    return torch.cat([((part.sum(1, keepdim=True) + 2**15) >> 16).to(torch.uint8) for part in weighted])


def channel_axis(shape: tuple[int, ...], name: str, channels: int | None = None) -> int:
    """Return where images of a shape have their channels: 3 for [n, H, W, C], 1 for [n, C, H, W].

    There are 1 to 32 channels, or `channels`, or three in place of one or one in place of three, as grey images and
    colours become each other. Where both layouts fit, one or three channels go first, then squares,
    then the layout of fewer channels; if `channels` is given, [n, H, W, C]. A UserError, which begins with `name`, is
    raised where none fits, or where nothing decides.
    """
    fits = [axis for axis in (3, 1) if len(shape) == 4 and 1 <= shape[axis] <= MOST_CHANNELS]
    if channels is not None:
        fits = [axis for axis in fits if shape[axis] == channels] or [
            axis for axis in fits if {shape[axis], channels} == {1, 3}
        ]
    if not fits:
        raise _wrong_shape(name, shape, channels)
    if channels is not None or len(fits) == 1:
        return fits[0]
    if usual := [axis for axis in fits if shape[axis] in (1, 3)]:
        return usual[0]
    if squares := [axis for axis in fits if shape[4 - axis] == shape[2]]:
        fits = squares
    if len(fits) == 2 and shape[1] == shape[3]:
        raise UserError(
            f"{name} has shape {list(shape)}, which may be [n, H, W, C] or [n, C, H, W]; set data.channels={shape[3]} "
            "to read it as [n, H, W, C]"
        )
    return min(fits, key=lambda axis: shape[axis])


def _wrong_shape(name: str, shape: tuple[int, ...], channels: int | None = None) -> UserError:
    wanted = f"1 to {MOST_CHANNELS} channels" if channels is None else f"data.channels={channels}"
    return UserError(f"{name} has shape {list(shape)}; expected [n, H, W], [n, H, W, C] or [n, C, H, W] with {wanted}")


def upright(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Turn values [H, W, C] by an orientation of EXIF, which TIFF has too."""
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    return values[::-1] if orientation in (3, 4, 7, 8) else values


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
