"""TIFFs of several bands, which Pillow does not read: each becomes gray images that it does read.

Bands that lie pixel by pixel in a strip have the bytes of a gray image of 8 bits that is as many times as wide, and so
has a plane of one band. So another directory for the same strips lets Pillow decode them, in any lossless compression.
"""

import io
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .image_kinds import BrokenImageError, require_size

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_SAMPLES, _PREDICTOR, _FORMAT = 277, 317, 339
_STRIPS, _STRIP_BYTES, _STRIP_ROWS = 273, 279, 278
_TILES, _TILE_BYTES, _TILE_WIDTH, _TILE_HEIGHT = 324, 325, 322, 323
_PLANES = 284
_SHORTS = (_BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PREDICTOR, _FORMAT)  # 16 bits, all others have 32
_LOSSLESS = (1, 5, 8, 32773, 32946, 34925, 50000)  # none, LZW, deflate, PackBits, deflate, LZMA, Zstandard
_DIFFERENCES = 2  # predictor: each value is stored as its difference from the one to the left
#: by the sample format (1 unsigned, 2 signed, 3 float) and the bits
_TYPES = {(1, 8): "u1", (1, 16): "u2", (1, 32): "u4", (2, 8): "i1", (2, 16): "i2", (2, 32): "i4", (3, 32): "f4"}


@dataclass(frozen=True)
class Bands:
    """The first image of a TIFF: its size in pixels, its number of bands, and the type of their values.

    Attributes:
        tags: the numbers of its directory by tag, a tuple each.
        order: `<` or `>`, the byte order of the file.
    """

    width: int
    height: int
    count: int
    dtype: np.dtype[Any]
    tags: dict[int, tuple[int, ...]]
    order: Literal["<", ">"]


def read_bands(stream: IO[bytes]) -> Bands | None:
    """Read a TIFF's directory; None is returned for a single band, and for colours of a kind other than RGB.

    BrokenImageError is raised for values that are not read, other errors for what is no TIFF.
    """
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    stream.seek(0)
    header = stream.read(8)
    if 43 in header[2:4]:  # a TIFF for files of more than 4 GB
        header += stream.read(8)
    directory: Any = ImageFileDirectory_v2(header)
    stream.seek(directory.next)
    directory.load(stream)
    numbers = {_WIDTH, _HEIGHT, *_SHORTS, _STRIPS, _STRIP_BYTES, _STRIP_ROWS}
    numbers |= {_TILES, _TILE_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _PLANES}
    tags = {tag: directory[tag] for tag in numbers if tag in directory}
    tags = {tag: value if isinstance(value, tuple) else (value,) for tag, value in tags.items()}
    count, sample_format, bits = (tags.get(tag, (1,)) for tag in (_SAMPLES, _FORMAT, _BITS))
    if count[0] == 1 or tags.get(_PHOTOMETRIC, (1,))[0] not in (1, 2):
        return None
    if len({*bits}) > 1 or len({*sample_format}) > 1 or (sample_format[0], bits[0]) not in _TYPES:
        kinds = {1: "integers", 2: "signed integers", 3: "floats"}.get(sample_format[0], "values of an unknown kind")
        raise BrokenImageError(
            f"bands of {', '.join(map(str, dict.fromkeys(bits)))} bits ({kinds}), which are not read; store "
            "integers of 8, 16 or 32 bits, or floats of 32"
        )
    width, height = tags[_WIDTH][0], tags[_HEIGHT][0]
    require_size(width, height)
    dtype = np.dtype(_TYPES[sample_format[0], bits[0]])
    return Bands(width, height, count[0], dtype, tags, "<" if header[:1] == b"I" else ">")


def band_values(stream: IO[bytes], bands: Bands) -> NDArray[Any]:
    """Return the values [H, W, bands] of a TIFF, of the type that its directory names."""
    compression, predictor = (bands.tags.get(tag, (1,))[0] for tag in (_COMPRESSION, _PREDICTOR))
    if compression not in _LOSSLESS or predictor not in (1, _DIFFERENCES):
        what = f"compression {compression}" if compression not in _LOSSLESS else f"predictor {predictor}"
        raise BrokenImageError(f"bands with {what}, which are not read; store them with LZW, deflate or none")
    require_size(bands.width * bands.count * bands.dtype.itemsize, bands.height)
    stream.seek(0)
    content = stream.read()
    by_pixel = bands.tags.get(_PLANES, (1,))[0] == 1
    planes = [_values_of_gray(image, bands) for image in _gray_tiffs(content, bands, by_pixel)]
    values = np.concatenate(planes, 2)
    if predictor == _DIFFERENCES:
        step = bands.tags.get(_TILE_WIDTH, (bands.width,))[0]
        for start in range(0, bands.width, step):
            part = values[:, start : start + step]
            np.cumsum(part, axis=1, dtype=part.dtype, out=part)
    return values


def _values_of_gray(content: bytes, bands: Bands) -> NDArray[Any]:
    """Return the values [H, W, bands or 1] of a gray image of their bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["TIFF"]) as image:
        values = np.array(image).view(bands.dtype.newbyteorder(bands.order)).astype(bands.dtype)
    return values.reshape(bands.height, bands.width, -1)


def _gray_tiffs(content: bytes, bands: Bands, by_pixel: bool) -> Iterator[bytes]:
    """Yield a file of each plane, with a directory that calls it a gray image of one byte a pixel."""
    tags, factor = bands.tags, bands.dtype.itemsize * (bands.count if by_pixel else 1)
    places, sizes = (_TILES, _TILE_BYTES) if _TILES in tags else (_STRIPS, _STRIP_BYTES)
    own: dict[int, tuple[int, ...]] = {
        tag: tags[tag] for tag in (_COMPRESSION, _STRIP_ROWS, _TILE_HEIGHT) if tag in tags
    }
    own |= {_PHOTOMETRIC: (1,), _SAMPLES: (1,), _BITS: (8,), _HEIGHT: (bands.height,), _WIDTH: (bands.width * factor,)}
    if _TILE_WIDTH in tags:
        own[_TILE_WIDTH] = (tags[_TILE_WIDTH][0] * factor,)
    planes = 1 if by_pixel else bands.count
    count = len(tags[places]) // planes
    magic = b"II*\0" if bands.order == "<" else b"MM\0*"
    for plane in range(planes):
        part = slice(plane * count, (plane + 1) * count)
        stored_at = zip(tags[places][part], tags[sizes][part], strict=True)
        pieces = [content[place : place + size] for place, size in stored_at]
        starts = tuple(itertools.accumulate(map(len, pieces[:-1]), initial=8))
        body = b"".join(pieces)  # of this plane alone
        header = magic + struct.pack(f"{bands.order}I", 8 + len(body))
        stored = own | {places: starts, sizes: tuple(map(len, pieces))}
        yield header + body + _directory(bands.order, 8 + len(body), stored)


def _directory(order: str, start: int, tags: dict[int, tuple[int, ...]]) -> bytes:
    """Return a TIFF's directory that lies at `start` of its file."""
    entries, more = b"", b""
    behind = start + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        letter, kind = ("H", 3) if tag in _SHORTS else ("I", 4)
        packed = struct.pack(f"{order}{len(values)}{letter}", *values)
        if len(packed) > 4:
            packed, more = struct.pack(f"{order}I", behind + len(more)), more + packed
        entries += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    return struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + more
