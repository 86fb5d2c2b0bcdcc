"""What the header of an image file says, whatever its format."""

from dataclasses import dataclass
from typing import Literal

#: what a crop needs
SMALLEST_SIDE = 2

_MOST_PIXELS = 89_000_000  # Pillow warns from here on, as a small file may unpack to more than the memory


class BrokenImageError(Exception):
    """A file that cannot be read as an image; the message is the reason."""


@dataclass(frozen=True)
class ImageKind:
    """The header of an image file.

    Attributes:
        size: width and height as they are stored, in pixels.
        channels: 1 for gray and 3 for colour, apart from transparency; as many as are stored where these are others, or
            where `data.channels` asks for them.
        deep: "gray" where pixels need a window, as they have more than 8 bits, a sign or, in DICOM files, a unit
            (Hounsfield); "colour" where colours have more than 8 bits a channel, of which only the upper 8 are read.
        type_range: of an image that needs a window, the smallest and largest value of its type, with its unit; None for
            floats and for 8 bits of other files than DICOM.
        frames: how many images the file holds; the first one is used.
        has_window: whether it is a DICOM file whose author chose how it is shown.
        inverted: whether small values are bright: DICOM's MONOCHROME1, or a deep gray TIFF whose zero is white.
    """

    size: tuple[int, int]
    channels: int
    deep: Literal["no", "gray", "colour"]
    type_range: tuple[float, float] | None
    frames: int
    has_window: bool = False
    inverted: bool = False

    @property
    def gray(self) -> bool:
        """Return whether the image has one channel."""
        return self.channels == 1


def require_size(width: int, height: int) -> None:
    """Raise a BrokenImageError unless an image is of a size that is read, in pixels."""
    if width * height > _MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, more than {_MOST_PIXELS:,}: cut it into tiles")
    if min(width, height) < SMALLEST_SIDE:
        raise BrokenImageError(f"{width} x {height} pixels, expected at least {SMALLEST_SIDE} a side")
