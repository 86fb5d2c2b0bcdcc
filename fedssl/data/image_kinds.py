"""What the header of an image file says, whatever its format."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .options import MOST_CHANNELS

if TYPE_CHECKING:  # a recipe is resolved without numpy
    import numpy as np

#: what a crop needs
SMALLEST_SIDE = 2

MOST_PIXELS = 89_000_000  # Pillow warns from here on, as a small file may unpack to more than the memory


class BrokenImageError(Exception):
    """A file that cannot be read as an image; the message is the reason."""


@dataclass(frozen=True)
class ImageKind:
    """The header of an image file.

    Attributes:
        size: width and height as they are stored, in pixels.
        channels: 1 for gray and 3 for colour, apart from transparency; as many as are stored where these are others, or
            where `data.channels` asks for them.
        deep: whether pixels need a window, as they have more than 8 bits, a sign or, in DICOM files, a unit
            (Hounsfield).
        type_range: of an image that needs a window, the smallest and largest value of its type, with its unit; None for
            floats and for 8 bits of other files than DICOM.
        frames: how many images the file holds; the first one is used.
        has_window: whether it is a DICOM file whose author chose how it is shown.
        inverted: whether small values are bright: DICOM's MONOCHROME1, or a deep gray TIFF whose zero is white.
        alpha: whether the file says how transparent its pixels are, which is left out.
    """

    size: tuple[int, int]
    channels: int
    deep: bool
    type_range: tuple[float, float] | None
    frames: int
    has_window: bool = False
    inverted: bool = False
    alpha: bool = False


def kind_of_values(
    size: tuple[int, int],
    channels: int,
    dtype: "np.dtype[Any]",
    frames: int = 1,
    bits: int | None = None,
    inverted: bool = False,
    alpha: bool = False,
) -> ImageKind:
    """Return the kind of an image of values of a type, of which `bits` may be used, by default all."""
    require_size(*size)
    if not 1 <= channels <= MOST_CHANNELS:
        raise BrokenImageError(f"{channels} channels, expected 1 to {MOST_CHANNELS}")
    if dtype == "uint8" or dtype.kind == "b":
        return ImageKind(size, channels, False, None, frames, alpha=alpha)
    bits = bits or 8 * dtype.itemsize
    limits = {"f": None, "u": (0.0, 2.0**bits - 1), "i": (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)}[dtype.kind]
    return ImageKind(size, channels, True, limits, frames, inverted=inverted, alpha=alpha)


def usual_channels(kinds: Collection[ImageKind]) -> int:
    """Return the number of channels that most images have; of two that are as common, the larger one."""
    counts = Counter(kind.channels for kind in kinds)
    return max(counts, key=lambda channels: (counts[channels], channels), default=1)


def usual_size(kinds: Collection[ImageKind]) -> tuple[int, int] | None:
    """Return the size that more than half of the images have, or None."""
    size, count = Counter(kind.size for kind in kinds).most_common(1)[0] if kinds else (None, 0)
    return size if 2 * count > len(kinds) else None


def require_size(width: int, height: int) -> None:
    """Raise a BrokenImageError unless an image is of a size that is read, in pixels."""
    if width * height > MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, more than {MOST_PIXELS:,}: cut it into tiles")
    if min(width, height) < SMALLEST_SIDE:
        raise BrokenImageError(f"{width} x {height} pixels, expected at least {SMALLEST_SIDE} a side")
