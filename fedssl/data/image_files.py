"""One image file: its header, and its pixels at a given size.

Pillow reads all formats but DICOM, that of medical imaging, TIFF, numpy's arrays and PNGs of deep colours; only such a
file's pixels are kept.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..errors import UserError
from .dicom_files import dicom_kind, dicom_pixels, dicom_values
from .files import ARRAY_SUFFIX, first_line, is_dicom, is_tiff
from .image_kinds import BrokenImageError, ImageKind, kind_of_values, require_size
from .pixels import Window, apply_window, channel_axis, upright, wholly_outside
from .tiff_files import read_tiff

# What Pillow may take a file for, whatever its name ends with. Its other formats include some that start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM")
_16_BITS = 65535.0
_ORIENTATION = 274  # EXIF's


def image_kind(file: Path, channels: int | None = None) -> ImageKind:
    """Read a file's header alone; BrokenImageError is raised for what is no image, or too large or too small.

    `channels` is `data.channels`: the bands or pages of a TIFF are its channels if there are as many.
    """
    with _named_as_broken(file):
        return dicom_kind(file) if is_dicom(file) else _read(file, channels, header_only=True)[0]


def readable_kind(file: Path, channels: int | None) -> ImageKind | None:
    """Return what `image_kind` does, without Pillow's warnings, or None where the file cannot be read."""
    with suppress(BrokenImageError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return image_kind(file, channels)
    return None


def read_pixels(
    file: Path, height: int, width: int, channels: int, window: Window | None, asked_for: int | None = None
) -> NDArray[np.uint8]:
    """Read an image, upright by its EXIF entry, its centre cropped and resized, as uint8 [channels, height, width].

    Transparency is left out: the colours are used as they are stored. `image_kind`, whose `channels` are `asked_for`
    here, says if a window is needed. A file that is no image, is damaged, has another number of channels or, of floats,
    no value in the window raises BrokenImageError.
    """
    colours = channels in (1, 3)
    with _named_as_broken(file):
        if is_dicom(file):
            shown = np.atleast_3d(dicom_pixels(file, window))
        else:
            shown = _shown(*_read(file, asked_for if colours else channels), window)
        if colours and shown.shape[2] in (1, 3):
            mode = "L" if channels == 1 else "RGB"
            parts = [Image.fromarray(shown if shown.shape[2] == 3 else shown[:, :, 0]).convert(mode)]
        elif shown.shape[2] == channels:
            parts = [Image.fromarray(shown[:, :, channel]) for channel in range(channels)]
        else:
            raise BrokenImageError(f"{shown.shape[2]} channels, expected {channels}")
        fitted = [ImageOps.fit(part, (width, height), Image.Resampling.BILINEAR) for part in parts]
    return np.concatenate([np.atleast_3d(np.asarray(part)) for part in fitted], 2).transpose(2, 0, 1)


def stored_values(file: Path, channels: int | None = None) -> NDArray[Any]:
    """Return the values [k, C] of an image that needs a window, or raise BrokenImageError; see `image_kind`."""
    with _named_as_broken(file):
        if is_dicom(file):
            return dicom_values(file)[:, None]
        kind, values = _read(file, channels)
        return _finite(values).reshape(-1, kind.channels)


def _read(file: Path, channels: int | None, header_only: bool = False) -> tuple[ImageKind, NDArray[Any]]:
    """Return what the header of a file says, and its values [H, W, C], which `header_only` leaves out."""
    if file.suffix.lower() == ARRAY_SUFFIX:
        kind, values = _array(file, channels)
        return kind, values if header_only else np.array(values)
    if is_tiff(file):
        return read_tiff(file, channels, header_only)
    with Image.open(file, formats=_FORMATS) as image:
        require_size(*image.size)
        kind = _kind(image)
        return kind, np.empty(0) if header_only else _values(file, image, kind)


def _array(file: Path, channels: int | None) -> tuple[ImageKind, NDArray[Any]]:
    """Return the kind of an .npy file, and its values [H, W, C], which are still in the file."""
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except ValueError as error:
        raise BrokenImageError("no array of numbers that numpy.save has written whole") from error
    if array.dtype.kind not in "iubf" or not 2 <= array.ndim <= 3:
        raise BrokenImageError(f"an array {list(array.shape)} of {array.dtype}, expected numbers [H, W] or [H, W, C]")
    try:
        if array.ndim == 3 and channel_axis((1, *array.shape), file.name, channels) == 1:
            array = array.transpose(1, 2, 0)
    except UserError as error:
        raise BrokenImageError(
            f"an array {list(array.shape)}, expected [H, W, C] or [C, H, W] of {channels or '1 to 32'} channels; "
            "where both fit, set data.channels"
        ) from error
    values = array if array.ndim == 3 else array[:, :, None]
    height, width, count = values.shape
    return kind_of_values((width, height), count, values.dtype), values


def _shown(kind: ImageKind, values: NDArray[Any], window: Window | None) -> NDArray[np.uint8]:
    """Return values [H, W, C] as 0..255."""
    if not kind.deep:
        return values.astype(np.uint8) * np.uint8(255 if values.dtype.kind == "b" else 1)
    assert window is not None
    if _finite(values).dtype.kind == "f" and wholly_outside(values[None], window, 3)[0]:
        raise BrokenImageError(f"all values, {values.min():g} to {values.max():g}, lie outside data.window")
    shown = apply_window(values[None], window, kind.type_range, 3)[0]
    return 255 - shown if kind.inverted else shown


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    return values


@contextmanager
def _named_as_broken(file: Path) -> Iterator[None]:
    """Raise whatever fails in this context as BrokenImageError: Pillow and pydicom raise errors of any type."""
    try:
        if file.stat().st_size == 0:
            raise BrokenImageError("the file is empty")
        yield
    except (BrokenImageError, UserError, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BrokenImageError("not an image of a known format") from error
    except Exception as error:
        raise BrokenImageError(first_line(error)) from error


def _kind(image: Image.Image) -> ImageKind:
    # Phones store a second picture for screens of high contrast in what is then a JPEG of two frames, an MPO.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    # what Pillow's decoders are told of the values in the file
    told = [tile.args for tile in getattr(image, "tile", [])]
    told = [one for arguments in told for one in (arguments if isinstance(arguments, tuple) else (arguments,))]
    most = max((one for one in told if isinstance(one, int)), default=0) if image.format == "PPM" else 0
    type_range = (0.0, most or _16_BITS)
    if _is_deep_gray(image):
        return ImageKind(image.size, 1, True, None if image.mode == "F" else type_range, frames)
    gray = image.mode in ("1", "L", "LA") or "LA;16B" in told  # which Pillow gives as RGBA
    # colours that are stored with more than the 8 bits a channel that Pillow gives; BGR;16 is 16 bits a pixel
    deep = any(isinstance(one, str) and ";16" in one and one != "BGR;16" for one in told)
    deep |= most > 255
    channels = 1 if gray else 3
    if deep and image.format != "PNG":
        raise BrokenImageError(f"colours of 16 bits in a {image.format}, which are not read; store them as PNG or TIFF")
    alpha = image.has_transparency_data
    return ImageKind(image.size, channels, deep, type_range if deep else None, frames, alpha=alpha)


def _is_deep_gray(image: Image.Image) -> bool:
    return image.mode in ("F", "I") or image.mode.startswith("I;16")


def _values(file: Path, image: Image.Image, kind: ImageKind) -> NDArray[Any]:
    """Return the values [H, W, 1 or 3] of a file that Pillow opens, upright and without alpha."""
    from imagecodecs import png_decode

    if kind.deep and not _is_deep_gray(image):
        values = png_decode(file.read_bytes())[:, :, : kind.channels]
    else:
        values = np.asarray(image if kind.deep else image.convert("L" if kind.channels == 1 else "RGB"))
    if image.format == "PPM" and kind.type_range:  # Pillow has brought its largest value, such as 4095, to 65535
        values = np.rint(values * (kind.type_range[1] / _16_BITS)).astype(values.dtype)
    return upright(np.atleast_3d(values), _orientation(image))


def _orientation(image: Image.Image) -> int:
    """Return the one entry of an image's EXIF that is used; 1, which is upright, where EXIF cannot be parsed."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # of any type, as the block may hold any bytes
        return 1
