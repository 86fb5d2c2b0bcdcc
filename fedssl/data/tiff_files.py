"""TIFF files: what the stored values of the first image mean. tifffile reads the directories and decodes the values.

Pages, and what ImageJ and OME store as a stack behind one directory, are planes of one size. Of a pyramid the largest
level that is not too large is read.
"""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .files import first_line
from .image_kinds import MOST_PIXELS, BrokenImageError, ImageKind, kind_of_values, read_codestream, require_size
from .pixels import upright

_WHITE_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR, _CIELAB = 0, 2, 3, 5, 6, 8  # photometric interpretations
_SAMPLES = {_WHITE_IS_ZERO: 1, 1: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3, _CIELAB: 3}  # without further bands
_ASSOCIATED, _UNASSOCIATED = 1, 2  # what a further band is: alpha, by which colours are multiplied or not
_NOT_CONVERTED = (1, 5, 8, 32773, 32946, 34925, 34926, 50000)  # compressions that leave YCbCr as it is
_OWN_SIZE = (6, 7, 33003, 33004, 33005, 33007, 34712, 34892)  # JPEG and JPEG 2000
_READ = (*_NOT_CONVERTED, *_OWN_SIZE, 2, 3, 4, 34927, 50001)  # and fax and WebP; JPEG XR's decoder may end the process
_ORIENTATION = 274
_MOST_DIRECTORIES = 20_000  # reading these takes some ten seconds

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # what matters of its warnings is raised below


@dataclass(frozen=True)
class _Layout:
    """How a file is read: its planes as channels (`stacked`), its bands as channels, or as a gray or colour image."""

    planes: Any
    page: Any
    stacked: bool
    bands: bool
    kind: ImageKind


def read_tiff(file: Path, channels: int | None, header_only: bool) -> tuple[ImageKind, NDArray[Any]]:
    """Return what a file's directories say, and the values [H, W, C] of its first image; none with `header_only`.

    Its bands or planes are its channels if there are as many as `channels`. Values are upright and without alpha,
    colours are red, green and blue. What is not deep is 0 to 255, or of type bool. Deep gray whose zero is white stays
    as it is stored.
    """
    from tifffile import TiffFile

    try:
        # Not with what lies in files beside it: whoever made the file may name any.
        with TiffFile(file, _multifile=False, is_mmstack=False, is_ndtiff=False) as tiff:
            with suppress(IndexError):  # it would follow a circle for ever
                _ = tiff.pages[_MOST_DIRECTORIES]
                raise BrokenImageError(f"its directories lead in a circle, or are more than {_MOST_DIRECTORIES:,}")
            layout = _layout_of(tiff.series, channels)
            return layout.kind, np.empty(0) if header_only else _values(layout, file)
    except (BrokenImageError, MemoryError):
        raise
    except Exception as error:  # damaged directories and data make tifffile and its decoders raise errors of any type
        raise BrokenImageError(f"a damaged TIFF, or one of a kind that is not read ({first_line(error)})") from error


def _values(layout: _Layout, file: Path) -> NDArray[Any]:
    page = layout.page
    _require_bounded(page, file)
    if layout.stacked:
        stack = layout.planes.asarray(maxworkers=1)
        values = np.moveaxis(stack.reshape(-1, *stack.shape[-2:]), 0, 2)
    else:
        values = page.asarray(maxworkers=1)  # the images are read in threads already
        values = np.moveaxis(values, page.axes.index("S"), -1) if "S" in page.axes else values[..., None]
        values = values.reshape(-1, *values.shape[-3:])[0]
    if not layout.bands:
        values = _picture(values, page)
    return upright(values, page.tags.valueof(_ORIENTATION, 1))


def _require_bounded(page: Any, file: Path) -> None:
    """Refuse a page whose parts lie beyond the end of the file, or unpack to far more than the page."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        for start, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            if start + count > size:
                raise BrokenImageError("the file is cut: its values lie beyond its end")
            if page.compression in _OWN_SIZE:
                stream.seek(start)
                found = read_codestream(stream.read(count))
                if count and found is None:
                    raise BrokenImageError("a part whose size its compressed data does not say")
                if found is not None:
                    require_size(found.width * max(1, found.samples // 4), found.height)


def _layout_of(series: Any, channels: int | None) -> _Layout:
    levels = series[0].levels
    small = [level for level in levels if level.keyframe.imagewidth * level.keyframe.imagelength <= MOST_PIXELS]
    planes = (small or levels)[0]
    page = planes.keyframe
    require_size(page.imagewidth, page.imagelength)
    if page.compression not in _READ:
        name = getattr(page.compression, "name", page.compression)
        raise BrokenImageError(f"compressed as {name}, which is not read; store it with LZW or uncompressed")
    count = math.prod(planes.shape) // max(1, math.prod(page.shape))
    stacked = count > 1 and channels == count and page.samplesperpixel == 1 and page.imagedepth == 1
    bands = stacked or _are_bands(page, channels)
    values = (count if stacked else 1) * page.size // (page.imagewidth * page.imagelength)
    require_size(page.imagewidth * max(1, values // 4), page.imagelength)
    if page.is_tiled and page.tilewidth * page.tilelength > MOST_PIXELS:
        raise BrokenImageError(f"tiles of {page.tilewidth} x {page.tilelength} pixels, more than {MOST_PIXELS:,}")
    frames = 1 if stacked else count + len(series) - 1
    read_as = count if stacked else page.samplesperpixel if bands else 1 if _SAMPLES[page.photometric] == 1 else 3
    return _Layout(planes, page, stacked, bands, _kind(page, read_as, bands, frames))


def _are_bands(page: Any, channels: int | None) -> bool:
    """Return True if the samples of a page are channels, and False if they are a gray or colour image."""
    samples, usual = page.samplesperpixel, _SAMPLES.get(page.photometric)
    if usual is None or page.dtype is None or page.dtype.kind not in "iubf":
        what = f"photometric interpretation {int(page.photometric)}" if usual is None else f"{page.bitspersample} bits"
        raise BrokenImageError(f"values of {what}, which are not read; store gray or RGB, of integers or floats")
    if channels == samples and channels not in (None, 1, 3):
        return True
    rest = tuple(page.extrasamples[:1]) if samples == usual + 1 else ()
    if samples == usual or rest in ((_ASSOCIATED,), (_UNASSOCIATED,)) or (samples == 4 and page.photometric == _RGB):
        return False
    if page.photometric not in (1, _RGB):
        raise BrokenImageError(f"{samples} bands of photometric interpretation {int(page.photometric)}, not read")
    return True


def _kind(page: Any, channels: int, bands: bool, frames: int) -> ImageKind:
    size = (page.imagewidth, page.imagelength)
    plain = page.photometric in (_PALETTE, _CMYK, _YCBCR, _CIELAB)
    alpha = not bands and page.samplesperpixel == _SAMPLES[page.photometric] + 1
    if plain and not bands:
        if page.photometric in (_YCBCR, _CIELAB) and page.dtype != np.uint8:
            raise BrokenImageError(f"colours of {page.dtype} that are not RGB, which are not read; store RGB")
        return ImageKind(size, 3, False, None, frames, alpha=alpha)
    inverted = page.photometric == _WHITE_IS_ZERO
    return kind_of_values(size, channels, page.dtype, frames, page.bitspersample, inverted=inverted, alpha=alpha)


def _picture(values: NDArray[Any], page: Any) -> NDArray[Any]:
    """Return gray or colours [H, W, 1 or 3] of the values [H, W, samples] of a page."""
    samples, bits = _SAMPLES[page.photometric], page.bitspersample
    if samples < values.shape[2] and page.extrasamples[:1] == (_ASSOCIATED,):
        most = 1 if values.dtype.kind == "f" else 2**bits - 1
        alpha = np.maximum(values[:, :, -1:].astype(np.float64), 1e-9)
        values = np.minimum(values * (most / alpha), most).astype(values.dtype)
    values = values[:, :, :samples]
    if page.photometric == _PALETTE:
        return (page.colormap[:, values[:, :, 0]] >> 8).astype(np.uint8).transpose(1, 2, 0)
    if bits < 8 and values.dtype == np.uint8:
        values = (values.astype(np.uint16) * 255 // (2**bits - 1)).astype(np.uint8)
    if page.photometric == _WHITE_IS_ZERO and values.dtype in (np.uint8, np.bool_):
        return ~values
    if page.photometric == _CMYK:
        return _converted(values if values.dtype == np.uint8 else (values >> 8).astype(np.uint8), "CMYK")
    if page.photometric == _YCBCR and page.compression in _NOT_CONVERTED:
        return _converted(values, "YCbCr")
    if page.photometric == _CIELAB:
        return _converted(values, "LAB")
    return values


def _converted(values: NDArray[np.uint8], mode: str) -> NDArray[np.uint8]:
    """Return the red, green and blue of colours that Pillow knows by a mode."""
    return np.asarray(Image.frombytes(mode, values.shape[1::-1], values.tobytes(), "raw").convert("RGB"))
