"""One image file: its header, and its pixels at a given size.

Pillow reads all formats but DICOM, that of medical imaging, numpy's arrays and TIFFs of several bands; only such a
file's pixels are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .dicom_files import dicom_kind, dicom_pixels, dicom_values
from .files import first_line, is_dicom
from .image_kinds import BrokenImageError, ImageKind, require_size
from .options import MOST_CHANNELS
from .pixels import Window, apply_window, apply_windows, channel_axis, wholly_outside, windows_of
from .tiff_bands import band_values, read_bands

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow may take a file for, whatever its name ends with. Its other formats include some that start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
_TIFF_BEGINS = (b"II*\0", b"MM\0*", b"II+\0")
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLES, _TIFF_PLANES, _TIFF_SAMPLE_FORMAT = 258, 262, 277, 284, 339
_SIGNED = 2  # as a TIFF's sample format
_YCBCR = 6  # as a TIFF's photometric interpretation
_16_BITS = (0.0, 65535.0)
_ORIENTATION = 274  # EXIF's


def image_kind(file: Path, channels: int | None = None) -> ImageKind:
    """Read a file's header alone; BrokenImageError is raised for what is no image, or too large or too small.

    `channels` is `data.channels`: the bands or pages of a TIFF are its channels if there are as many.
    """
    with _named_as_broken(file):
        if is_dicom(file):
            return dicom_kind(file)
        stored = _stored_channels(file, channels)
    if stored is not None:
        return stored.kind
    with _opened(file) as image:
        return _kind(image)


def read_pixels(
    file: Path, height: int, width: int, channels: int, window: Window | None, asked_for: int | None = None
) -> NDArray[np.uint8]:
    """Read an image, upright by its EXIF entry, its centre cropped and resized, as uint8 [channels, height, width].

    Transparency is left out: the colours are used as they are stored. `image_kind`, whose `channels` are `asked_for`
    here, says if a window is needed. A file that is no image, is damaged, has another number of channels or, of floats,
    no value in the window raises BrokenImageError.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling, fromarray

    colours = channels in (1, 3)
    with _named_as_broken(file):
        stored = None if is_dicom(file) else _stored_channels(file, asked_for if colours else channels)
        if stored is not None:
            shown = _shown(stored.read(), stored.kind, window)
            if not (colours and stored.kind.channels in (1, 3)):
                if stored.kind.channels != channels:
                    raise BrokenImageError(f"{stored.kind.channels} channels, expected {channels}")
                parts = [fromarray(shown[:, :, channel]) for channel in range(channels)]
                return np.stack(
                    [np.asarray(ImageOps.fit(part, (width, height), Resampling.BILINEAR)) for part in parts]
                )
            upright = fromarray(shown if shown.shape[2] == 3 else shown[:, :, 0])
        elif not colours:
            raise BrokenImageError(f"{image_kind(file).channels} channels, expected {channels}")
        else:
            upright = fromarray(dicom_pixels(file, window)) if is_dicom(file) else _read_upright(file, window)
        converted = upright.convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(ImageOps.fit(converted, (width, height), Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def stored_values(file: Path, channels: int | None = None) -> NDArray[Any]:
    """Return the values [k, C] of an image that needs a window, or raise BrokenImageError; see `image_kind`."""
    with _named_as_broken(file):
        if is_dicom(file):
            return dicom_values(file)[:, None]
        stored = _stored_channels(file, channels)
        if stored is not None:
            return _finite(stored.read()).reshape(-1, stored.kind.channels)
    with _opened(file) as image:
        return _stored_values(image).reshape(-1, 1)


@dataclass(frozen=True)
class _StoredChannels:
    """A file whose channels are read one by one, as values [H, W, C]."""

    kind: ImageKind
    read: Callable[[], NDArray[Any]]


def _stored_channels(file: Path, channels: int | None) -> _StoredChannels | None:
    """Return what reads an array, or a TIFF of as many bands or pages as asked for or of bands that Pillow cannot read.

    None is returned for all other files, which Pillow reads.
    """
    if file.suffix.lower() == ".npy":
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:  # whose messages propose to run what the file holds
            raise BrokenImageError("no array of numbers that numpy.save has written whole") from error
        if array.dtype.kind not in "iubf" or not 2 <= array.ndim <= 3:
            raise BrokenImageError(
                f"an array {list(array.shape)} of {array.dtype}, expected numbers [H, W] or [H, W, C]"
            )
        try:
            if array.ndim == 3 and channel_axis((1, *array.shape), file.name, channels) == 1:
                array = array.transpose(1, 2, 0)
        except UserError as error:
            raise BrokenImageError(
                f"an array {list(array.shape)}, expected [H, W, C] or [C, H, W] of {channels or '1 to 32'} channels; "
                "where both fit, set data.channels"
            ) from error
        values = array if array.ndim == 3 else array[:, :, None]
        return _StoredChannels(_kind_of_values(values.shape, values.dtype), lambda: np.array(values))
    with open(file, "rb") as stream:
        if stream.read(4) not in _TIFF_BEGINS:
            return None
        from PIL import Image

        stream.seek(0)
        with suppress(Image.UnidentifiedImageError), Image.open(stream, formats=["TIFF"]) as image:
            samples = _tiff_tag(image, _TIFF_SAMPLES, 1)
            if channels in (None, 1) or channels != (samples if samples > 1 else getattr(image, "n_frames", 1)):
                return None
            if samples == 1:
                require_size(image.size[0] * channels, image.size[1])
                kind = replace(_kind(image), channels=channels, frames=1)
                return _StoredChannels(kind, lambda: _pages(file))
            if samples == 3 and _tiff_tag(image, _TIFF_BITS, 1) == 8:
                return None  # colours in any of their forms
        bands = read_bands(stream)
    if bands is None:
        return None

    def read() -> NDArray[Any]:
        with open(file, "rb") as stream:
            return band_values(stream, bands)

    return _StoredChannels(_kind_of_values((bands.height, bands.width, bands.count), bands.dtype), read)


def _kind_of_values(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ImageKind:
    height, width, channels = shape
    require_size(width, height)
    if not 1 <= channels <= MOST_CHANNELS:
        raise BrokenImageError(f"{channels} channels, expected 1 to {MOST_CHANNELS}")
    if dtype == np.uint8 or dtype.kind == "b":
        return ImageKind((width, height), channels, "no", None, 1)
    limits = None if dtype.kind == "f" else (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))
    return ImageKind((width, height), channels, "gray", limits, 1)


def _pages(file: Path) -> NDArray[Any]:
    """Return the gray pages of a TIFF as channels, [H, W, pages]."""
    with _opened(file) as image:
        pages = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            kind = _kind(image)
            if not kind.gray or kind.inverted:
                raise BrokenImageError(f"page {number + 1} is in colour, or its zero is white, expected a gray channel")
            pages.append(_stored_values(image) if kind.deep == "gray" else np.asarray(image.convert("L")))
    if len({(page.shape, page.dtype) for page in pages}) > 1:
        raise BrokenImageError("pages of different sizes or types, expected one for each channel")
    return np.stack(pages, 2)


def _shown(values: NDArray[Any], kind: ImageKind, window: Window | None) -> NDArray[np.uint8]:
    """Return values [H, W, C] as 0..255."""
    if kind.deep == "no":
        return values.astype(np.uint8) * np.uint8(255 if values.dtype.kind == "b" else 1)
    assert window is not None
    _require_inside(_finite(values), window, 2)
    return apply_windows(values[None], window, 3, kind.type_range)[0]


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    return values


def _require_inside(values: NDArray[Any], window: Window, axis: int | None = None) -> None:
    """Raise a BrokenImageError for floats [H, W, ...] that would be all black or white; channels lie along `axis`."""
    if values.dtype.kind == "f" and wholly_outside(values[None], window, None if axis is None else axis + 1)[0]:
        raise BrokenImageError(f"all values, {values.min():g} to {values.max():g}, lie outside data.window")


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
        return ImageKind(image.size, 1, "gray", limits, frames, inverted=inverted)
    channels = 1 if image.mode in ("1", "L", "LA", "La") else 3
    if _has_deep_colours(image):
        return ImageKind(image.size, channels, "colour", _16_BITS, frames)
    return ImageKind(image.size, channels, "no", None, frames)


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
            values, window = _stored_values(image), windows_of(window, 1)[0]
            _require_inside(values, window)
            shown = apply_window(values[None], window, kind.type_range)[0]
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
    values = _finite(np.asarray(image))
    if image.mode == "L":
        return values.view(np.int8)
    if image.format == "TIFF" and image.mode == "I" and not _is_signed(image):
        return values.view(np.uint32)
    return values
