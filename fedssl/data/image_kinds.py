"""What the header of an image file says, whatever its format, and what compressed data in a file say of themselves."""

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

# of compressed data, see `read_codestream`
_JPEG_2000_BEGINS = b"\xff\x4f\xff\x51"
_CODING_STYLE = b"\xff\x52"
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # the markers from C0 to CF that do not begin a JPEG's frame
_JPEG_LS_FRAME = 0xF7


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


@dataclass(frozen=True)
class Codestream:
    """The form, the size in pixels, the samples a pixel and the bits a sample of compressed data.

    `colours` is what decoding gives where the data say so, whatever a header says: RGB where JPEG 2000 stores its
    colours transformed, YBR_FULL where JPEG has Adobe's marker of it, or fewer pixels of a sample than of another.
    """

    form: str
    width: int
    height: int
    samples: int
    bits: int
    colours: str | None = None


def read_codestream(data: bytes) -> Codestream | None:
    """Read the headers of compressed data alone; None is returned for other data."""
    start = data.find(_JPEG_2000_BEGINS, 0, 2**10)  # boxes may lie before it
    if start >= 0 and len(data) > start + 42:  # ISO 15444-1, A.5.1 and A.6.1
        right, lower, left, upper = (_number(data, start + place, 4) for place in (8, 12, 16, 20))
        style = data.find(_CODING_STYLE, start + 4 + _number(data, start + 4, 2))
        colours = "RGB" if style >= 0 and data[style + 8 : style + 9] == b"\1" else None
        samples, bits = _number(data, start + 40, 2), (data[start + 42] & 127) + 1
        return Codestream("JPEG 2000", right - left, lower - upper, samples, bits, colours)
    place = 2 if data[:2] == b"\xff\xd8" else len(data)
    transformed = False
    while place + 9 < len(data) and data[place] == 0xFF:  # ISO 10918-1, B.2.2
        marker = data[place + 1]
        transformed |= data[place + 4 : place + 9] == b"Adobe" and data[place + 15 : place + 16] == b"\1"
        if marker == _JPEG_LS_FRAME or (0xC0 <= marker <= 0xCF and marker not in _NO_FRAME):
            transformed |= len({*data[place + 11 : place + 18 : 3]}) > 1
            colours = "YBR_FULL" if transformed and data[place + 9] == 3 else None
            form = "JPEG-LS" if marker == _JPEG_LS_FRAME else "JPEG"
            width, height = _number(data, place + 7, 2), _number(data, place + 5, 2)
            return Codestream(form, width, height, data[place + 9], data[place + 4], colours)
        place += 2 + _number(data, place + 2, 2) if marker != 0xFF else 1
    return None


def _number(data: bytes, place: int, size: int) -> int:
    return int.from_bytes(data[place : place + size], "big")
