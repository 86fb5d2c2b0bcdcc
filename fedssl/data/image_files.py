"""One image file: its header, and its pixels at a given size.

Pillow reads all formats but DICOM, that of medical imaging, which pydicom reads; only such a file's pixels are kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, install_command
from ..untrusted import printable
from .files import DICOM_SUFFIXES, first_line
from .pixels import Window, apply_window

if TYPE_CHECKING:
    from PIL.Image import Image

#: what a crop needs
SMALLEST_SIDE = 2

# What Pillow may take a file for, whatever its name ends with. Its other formats include some that start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
_MOST_PIXELS = 89_000_000  # Pillow warns from here on, as a small file may unpack to more than the memory
_TIFF_BITS, _TIFF_SAMPLE_FORMAT = 258, 339
_16_BITS = (0.0, 65535.0)


class BrokenImageError(Exception):
    """A file that cannot be read as an image; the message is the reason."""


@dataclass(frozen=True)
class ImageKind:
    """The header of an image file.

    Attributes:
        size: width and height as they are stored, in pixels.
        gray: whether it has one channel, apart from transparency.
        deep: "gray" where pixels need a window, as they have more than 8 bits or, in DICOM files, a unit (Hounsfield);
            "colour" where colours have more than 8 bits a channel, of which Pillow never reads but the upper 8.
        type_range: of a deep image, the smallest and largest value of its type, with its unit; None for floats.
        frames: how many images the file holds; the first one is used.
        own_window: the range that a DICOM file's author chose to be shown; None where the file names none.
        inverted: whether small values are bright, as in a DICOM file that is MONOCHROME1.
    """

    size: tuple[int, int]
    gray: bool
    deep: Literal["no", "gray", "colour"]
    type_range: tuple[float, float] | None
    frames: int
    own_window: tuple[float, float] | None = None
    inverted: bool = False


def image_kind(file: Path) -> ImageKind:
    """Read a file's header alone; BrokenImageError is raised for what is no image, or too large or too small."""
    if not _is_dicom(file):
        with _opened(file) as image:
            return _kind(image)
    with _named_as_broken(file):
        kind = _dicom_kind(_read_stored(file, stop_before_pixels=True))
        _require_size(*kind.size)
        return kind


def read_pixels(file: Path, height: int, width: int, channels: int, window: Window | None) -> NDArray[np.uint8]:
    """Read an image, upright by its EXIF entry, its centre cropped and resized, as uint8 [channels, height, width].

    Transparency is left out: the colours are used as they are stored. `image_kind` says if a window is needed. A file
    that is no image, or is damaged, raises BrokenImageError.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    with _named_as_broken(file):
        upright = _read_dicom(file, window) if _is_dicom(file) else _read_upright(file, window)
        converted = upright.convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(ImageOps.fit(converted, (width, height), Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def value_range(file: Path) -> tuple[float, float]:
    """Return the smallest and largest pixel value of a deep gray image, or raise BrokenImageError."""
    if _is_dicom(file):
        with _named_as_broken(file):
            _, pixels = _dicom_pixels(file)
    else:
        with _opened(file) as image:
            pixels = _finite_pixels(image)
    return float(pixels.min()), float(pixels.max())


def _is_dicom(file: Path) -> bool:
    return file.name.lower().endswith(DICOM_SUFFIXES)


@contextmanager
def _named_as_broken(file: Path) -> Iterator[None]:
    """Raise whatever fails in this context as BrokenImageError: Pillow and pydicom raise errors of any type."""
    from PIL import Image

    try:
        if file.stat().st_size == 0:
            raise BrokenImageError("the file is empty")
        yield
    except (BrokenImageError, UserError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BrokenImageError("not an image of a known format") from error
    except Exception as error:
        raise BrokenImageError(first_line(error)) from error


def _require_size(width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, more than {_MOST_PIXELS:,}: cut it into tiles")
    if min(width, height) < SMALLEST_SIDE:
        raise BrokenImageError(f"{width} x {height} pixels, expected at least {SMALLEST_SIDE} a side")


@contextmanager
def _opened(file: Path) -> Iterator["Image"]:
    from PIL import Image

    with _named_as_broken(file), Image.open(file, formats=_FORMATS) as image:
        _require_size(*image.size)
        yield image


def _kind(image: "Image") -> ImageKind:
    # Phones store a second picture for screens of high contrast in what is then a JPEG of two frames, an MPO.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if image.mode == "F":
        return ImageKind(image.size, True, "gray", None, frames)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return ImageKind(image.size, True, "gray", _integer_range(image), frames)
    gray = image.mode in ("1", "L", "LA")
    if _has_deep_colours(image):
        return ImageKind(image.size, gray, "colour", _16_BITS, frames)
    return ImageKind(image.size, gray, "no", None, frames)


def _integer_range(image: "Image") -> tuple[float, float]:
    if image.mode != "I" or image.format != "TIFF":
        return _16_BITS  # Pillow scales a PGM's values to these
    tags: Any = image
    bits, sample_format = tags.tag_v2.get(_TIFF_BITS, (32,))[0], tags.tag_v2.get(_TIFF_SAMPLE_FORMAT, (1,))[0]
    return (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if sample_format == 2 else (0.0, 2.0**bits - 1)  # 2: signed


def _has_deep_colours(image: "Image") -> bool:
    """Return True if an image that Pillow gives 8 bits a channel is stored with more."""
    for tile in getattr(image, "tile", []):
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if any(isinstance(argument, str) and ";16" in argument for argument in arguments):  # such as RGB;16B
            return True
        if image.format == "PPM" and any(isinstance(argument, int) and argument > 255 for argument in arguments):
            return True
    return False


def _read_upright(file: Path, window: Window | None) -> "Image":
    from PIL import ImageOps
    from PIL.Image import fromarray

    with _opened(file) as image:
        kind = _kind(image)
        if kind.deep != "gray":
            image.load()
            return ImageOps.exif_transpose(image)
        assert window is not None
        orientation = image.getexif()
        shallow = fromarray(apply_window(_finite_pixels(image)[None], window, kind.type_range)[0])
        shallow.getexif().update(orientation)
        return ImageOps.exif_transpose(shallow)


def _finite_pixels(image: "Image") -> NDArray[Any]:
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    return pixels


def _read_stored(file: Path, **options: Any) -> Any:
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise UserError(
            f"{printable(file)} is a DICOM file, which needs pydicom: {install_command('dicom')}"
        ) from error
    return dcmread(file, **options)


def _dicom_kind(stored: Any) -> ImageKind:
    interpretation = str(stored.PhotometricInterpretation)
    if interpretation == "PALETTE COLOR":
        raise BrokenImageError("colours by a palette, which are not read")
    bits, signed = int(stored.BitsStored), bool(stored.PixelRepresentation)
    gray = int(stored.SamplesPerPixel) == 1
    if not gray and bits > 8:
        raise BrokenImageError(f"colours of {bits} bits, which are not read")
    slope, intercept = _rescale(stored)
    smallest, largest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    low, high = sorted((smallest * slope + intercept, largest * slope + intercept))
    return ImageKind(
        (int(stored.Columns), int(stored.Rows)),
        gray,
        "gray" if gray and (bits > 8 or signed or (slope, intercept) != (1.0, 0.0)) else "no",
        (low, high),
        int(stored.get("NumberOfFrames") or 1),
        _own_window(stored),
        interpretation == "MONOCHROME1",
    )


def _rescale(stored: Any) -> tuple[float, float]:
    slope, intercept = stored.get("RescaleSlope"), stored.get("RescaleIntercept")
    return 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)


def _own_window(stored: Any) -> tuple[float, float] | None:
    """Return the values that the file's first window shows darkest and brightest, by DICOM PS3.3, C.11.2.1.2."""
    centres, widths = stored.get("WindowCenter"), stored.get("WindowWidth")
    if centres is None or widths is None:
        return None
    centre, width = (float(np.atleast_1d(np.asarray(values, dtype=float))[0]) for values in (centres, widths))
    function = str(stored.get("VOILUTFunction") or "LINEAR")
    if function == "SIGMOID":
        raise BrokenImageError("a sigmoid window, which is not read")
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1.0
    return (centre - width / 2, centre + width / 2) if width > 0 else None


def _dicom_pixels(file: Path) -> tuple[ImageKind, NDArray[Any]]:
    """Read the first image: gray values with their unit, float64 [H, W], or 8 bits, uint8 [H, W] or [H, W, 3]."""
    stored = _read_stored(file)
    kind = _dicom_kind(stored)
    pixels = np.asarray(stored.pixel_array)
    if kind.frames > 1:
        pixels = pixels[0]
    if kind.deep == "gray":
        slope, intercept = _rescale(stored)
        pixels = pixels.astype(np.float64) * slope + intercept
    return kind, pixels


def _read_dicom(file: Path, window: Window | None) -> "Image":
    from PIL.Image import fromarray

    kind, pixels = _dicom_pixels(file)
    if kind.deep == "gray":
        chosen = kind.own_window if window == "file" else window
        assert chosen is not None
        pixels = apply_window(pixels[None], chosen, kind.type_range)[0]
    return fromarray(255 - pixels if kind.inverted else pixels)
