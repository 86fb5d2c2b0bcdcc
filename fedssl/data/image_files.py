"""One image file: its header, and its pixels at a given size.

Pillow reads all formats but DICOM, that of medical imaging; only such a file's pixels are kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .dicom_files import dicom_kind, dicom_pixels, dicom_range
from .files import first_line, is_dicom
from .image_kinds import BrokenImageError, ImageKind, require_size
from .pixels import Window, apply_window

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow may take a file for, whatever its name ends with. Its other formats include some that start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_PLANES, _TIFF_SAMPLE_FORMAT = 258, 262, 284, 339
_SIGNED = 2  # as a TIFF's sample format
_YCBCR = 6  # as a TIFF's photometric interpretation
_16_BITS = (0.0, 65535.0)
_ORIENTATION = 274  # EXIF's


def image_kind(file: Path) -> ImageKind:
    """Read a file's header alone; BrokenImageError is raised for what is no image, or too large or too small."""
    if not is_dicom(file):
        with _opened(file) as image:
            return _kind(image)
    with _named_as_broken(file):
        return dicom_kind(file)


def read_pixels(file: Path, height: int, width: int, channels: int, window: Window | None) -> NDArray[np.uint8]:
    """Read an image, upright by its EXIF entry, its centre cropped and resized, as uint8 [channels, height, width].

    Transparency is left out: the colours are used as they are stored. `image_kind` says if a window is needed. A file
    that is no image, or is damaged, raises BrokenImageError.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling, fromarray

    with _named_as_broken(file):
        upright = fromarray(dicom_pixels(file, window)) if is_dicom(file) else _read_upright(file, window)
        converted = upright.convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(ImageOps.fit(converted, (width, height), Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def value_range(file: Path) -> tuple[float, float]:
    """Return the smallest and largest pixel value of a deep gray image, or raise BrokenImageError."""
    if is_dicom(file):
        with _named_as_broken(file):
            return dicom_range(file)
    with _opened(file) as image:
        values = _stored_values(image)
    return float(values.min()), float(values.max())


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
        kind = ", or a TIFF of one that is not read" if file.suffix.lower() in (".tif", ".tiff") else ""
        raise BrokenImageError(f"not an image of a known format{kind}") from error
    except Exception as error:
        raise BrokenImageError(first_line(error)) from error


@contextmanager
def _opened(file: Path) -> Iterator["Image"]:
    from PIL import Image

    # Not by its name: Pillow then maps some TIFFs into memory, and mixes up those that it has to turn by 90 degrees.
    with _named_as_broken(file), open(file, "rb") as stream, Image.open(stream, formats=_FORMATS) as image:
        require_size(*image.size)
        yield image


def _kind(image: "Image") -> ImageKind:
    # Phones store a second picture for screens of high contrast in what is then a JPEG of two frames, an MPO.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    is_tiff = image.format == "TIFF"
    # Pillow before 13 takes Y, Cb and Cr for red, green and blue, unless libtiff reads them.
    mixed_up = is_tiff and image.mode == "RGB" and _tiff_tag(image, _TIFF_PHOTOMETRIC, 2) == _YCBCR
    if mixed_up and any(tile.codec_name != "libtiff" for tile in getattr(image, "tile", [])):
        raise BrokenImageError("colours as YCbCr, which this Pillow mixes up; install Pillow 13, or store RGB")
    signed_bytes = is_tiff and image.mode == "L" and _is_signed(image)
    if image.mode in ("F", "I") or image.mode.startswith("I;16") or signed_bytes:
        limits = None if image.mode == "F" else _integer_range(image) if is_tiff else _16_BITS
        inverted = is_tiff and _tiff_tag(image, _TIFF_PHOTOMETRIC, 1) == 0  # Pillow turns those of 8 bits over itself
        return ImageKind(image.size, True, "gray", limits, frames, inverted=inverted)
    gray = image.mode in ("1", "L", "LA", "La")
    if _has_deep_colours(image):
        return ImageKind(image.size, gray, "colour", _16_BITS, frames)
    return ImageKind(image.size, gray, "no", None, frames)


def _tiff_tag(image: "Image", tag: int, default: int) -> int:
    """Return a TIFF's number, of the first channel where each has its own."""
    tags: Any = image
    value = tags.tag_v2.get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


def _is_signed(image: "Image") -> bool:
    return _tiff_tag(image, _TIFF_SAMPLE_FORMAT, 1) == _SIGNED


def _integer_range(image: "Image") -> tuple[float, float]:
    bits = _tiff_tag(image, _TIFF_BITS, 1)
    return (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if _is_signed(image) else (0.0, 2.0**bits - 1)


def _has_deep_colours(image: "Image") -> bool:
    """Return True if an image that Pillow gives 8 bits a channel is stored with more."""
    if image.format == "TIFF" and image.mode not in ("1", "P") and _tiff_tag(image, _TIFF_BITS, 1) > 8:
        if _tiff_tag(image, _TIFF_PLANES, 1) == 2 and image.info.get("compression") == "raw":
            raise BrokenImageError("colours of 16 bits in a plane each, which are not read; store them by pixel")
        return True
    for tile in getattr(image, "tile", []):
        for argument in tile.args if isinstance(tile.args, tuple) else (tile.args,):
            if isinstance(argument, str) and ";16" in argument and argument != "BGR;16":  # 16 bits a pixel
                return True
            if image.format == "PPM" and isinstance(argument, int) and argument > 255:
                return True
    return False


def _read_upright(file: Path, window: Window | None) -> "Image":
    from PIL import ImageOps
    from PIL.Image import fromarray

    with _opened(file) as image:
        kind = _kind(image)
        image.load()
        orientation = _orientation(image)
        if kind.deep == "gray":
            assert window is not None
            shown = apply_window(_stored_values(image)[None], window, kind.type_range)[0]
            upright = fromarray(255 - shown if kind.inverted else shown)
        else:
            upright = image.convert("LA") if image.mode == "La" else image
        upright.info = {}  # or else Pillow writes all entries of the EXIF anew, and fails at a damaged one
        upright.getexif()[_ORIENTATION] = orientation
        return ImageOps.exif_transpose(upright)


def _orientation(image: "Image") -> int:
    """Return the one entry of an image's EXIF that is used; 1, which is upright, where EXIF cannot be parsed.

    Pillow has turned a TIFF by itself, and removed the entry.
    """
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # of any type, as the block may hold any bytes
        return 1


def _stored_values(image: "Image") -> NDArray[Any]:
    """Return the values of a deep gray image as its file means them: Pillow has no type for some."""
    values = np.asarray(image)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    if image.mode == "L":
        return values.view(np.int8)
    if image.format == "TIFF" and image.mode == "I" and not _is_signed(image):
        return values.view(np.uint32)
    return values
