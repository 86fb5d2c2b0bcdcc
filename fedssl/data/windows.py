"""The window of percentiles: measured once, on training images, and recorded as numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import notify
from .pixels import Limits, Window, channel_axis, is_deep, require_pixels

_PERCENTILES = (1, 99)
_VALUES = 2**22  # of each channel, evenly spread over the images


def window_of_arrays(arrays: Mapping[str, NDArray[Any]], window: Window | None, channels: int | None) -> Window | None:
    """Return a window as it is; that of percentiles as the numbers of the first of some arrays of images [n, ...].

    `arrays` are by the name that error messages use, `channels` is that of `channel_axis`. Without pixels of more than
    8 bits there is no window: None.
    """
    name, images = next(iter(arrays.items()))
    if window != "percentiles":
        return window
    require_pixels(name, images)
    if not is_deep(images):
        return None
    axis = 0 if images.ndim == 3 else channel_axis(images.shape, name, channels)
    by_channel = np.moveaxis(images, axis, 0) if axis and channels != 1 else images[None]  # colours become grey
    step = math.ceil(by_channel[0].size / _VALUES)
    return _window(by_channel[:, ::step].reshape(len(by_channel), -1))


def window_of_files(chosen: Sequence[NDArray[Any]], channels: int) -> Window | None:
    """Return the window of the values [k, C] of some files, whose images become images of `channels` channels."""
    least = max(1, _VALUES // max(1, len(chosen)))
    parts = [values[:: math.ceil(len(values) / least)] for values in chosen]
    parts = [
        part.reshape(-1, 1).repeat(channels, 1) if {part.shape[1], channels} == {1, 3} else part for part in parts
    ]  # grey and colours become each other
    fitting = [part for part in parts if part.shape[1] == channels]  # decoding refuses the others
    parts = fitting or [part.reshape(-1, 1) for part in parts]
    return _window(np.concatenate(parts).T) if parts else None


def _window(values: NDArray[Any]) -> Window:
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
