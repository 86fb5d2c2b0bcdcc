"""One image file: what its header says, and its pixels at a given size."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .dicom_files import DICOM_SUFFIXES, UnsupportedDicomError, is_dicom, read_dicom_header, read_dicom_pixels
from .files import first_line, listed, notify, printable
from .pixels import Window, apply_window

if TYPE_CHECKING:
    from PIL.Image import Image


#: the names that a file of images may end with, in small letters
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", *DICOM_SUFFIXES),
)


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
    """What a file's header says.

    Attributes:
        size: width and height as they are stored, in pixels.
        gray: whether it has one channel, apart from transparency.
        deep: whether pixels have more than 8 bits a channel, and whether those are gray or in colour. Pillow reads the
            upper 8 bits of deep colours and never the others.
        type_range: of a deep image, the smallest and largest value of its type; None for floats.
        frames: how many images the file holds; the first one is used.
        own_window: the window that a DICOM file names.
    """

    size: tuple[int, int]
    gray: bool
    deep: Literal["no", "gray", "colour"]
    type_range: tuple[float, float] | None
    frames: int
    own_window: tuple[float, float] | None = None


def image_kind(file: Path) -> ImageKind:
    """Read a file's header alone.

    Raises:
        BrokenImageError: it is no image, or one that is too large or too small.
        UserError: it is a DICOM file, and pydicom is not installed.
    """
    if is_dicom(file):
        with _named_as_broken(file):
            header = read_dicom_header(file)
            _require_size(header.width, header.height)
            return ImageKind(
                (header.width, header.height),
                header.gray,
                "gray" if header.deep else "no",
                header.type_range,
                header.frames,
                header.own_window,
            )
    with _opened(file) as image:
        return _kind(image)


def read_pixels(file: Path, height: int, width: int, channels: int, window: Window | None) -> NDArray[np.uint8]:
    """Read an image, turned upright by its EXIF entry, its centre cropped to the target's shape and resized.

    Transparency is left out: the colours are used as they are stored. `image_kind` tells whether a window is needed.

    Returns:
        uint8 [channels, height, width].

    Raises:
        BrokenImageError: the file is no image, or is damaged.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    with _named_as_broken(file):
        upright = _read_dicom(file, window) if is_dicom(file) else _read_upright(file, window)
        converted = upright.convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(ImageOps.fit(converted, (width, height), Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


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


def _read_dicom(file: Path, window: Window | None) -> "Image":
    from PIL.Image import fromarray

    header, pixels = read_dicom_pixels(file)
    if header.deep:
        chosen = header.own_window if window == "file" else window
        assert chosen is not None
        pixels = apply_window(pixels[None], chosen, header.type_range)[0]
    return fromarray(255 - pixels if header.inverted else pixels)


def value_range(file: Path) -> tuple[float, float]:
    """The smallest and largest pixel value of a deep gray image.

    Raises:
        BrokenImageError: the file is no image, or is damaged.
    """
    if is_dicom(file):
        with _named_as_broken(file):
            _, pixels = read_dicom_pixels(file)
    else:
        with _opened(file) as image:
            pixels = _finite_pixels(image)
    return float(pixels.min()), float(pixels.max())


@contextmanager
def _opened(file: Path) -> Iterator["Image"]:
    """A file as Pillow's image."""
    from PIL import Image

    with _named_as_broken(file), Image.open(file, formats=_FORMATS) as image:
        _require_size(*image.size)
        yield image


def _require_size(width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, more than {_MOST_PIXELS:,}: cut it into tiles")
    if min(width, height) < SMALLEST_SIDE:
        raise BrokenImageError(f"{width} x {height} pixels, expected at least {SMALLEST_SIDE} a side")


@contextmanager
def _named_as_broken(file: Path) -> Iterator[None]:
    """Whatever fails in this context is a broken file: Pillow's and pydicom's readers raise errors of any type."""
    from PIL import Image

    try:
        if file.stat().st_size == 0:
            raise BrokenImageError("the file is empty")
        yield
    except (BrokenImageError, UserError):
        raise
    except UnsupportedDicomError as error:
        raise BrokenImageError(str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise BrokenImageError("not an image of a known format") from error
    except Exception as error:
        raise BrokenImageError(first_line(error)) from error


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
    signed = sample_format == 2
    return (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)


def _has_deep_colours(image: "Image") -> bool:
    """Whether an image that Pillow gives 8 bits a channel is stored with more."""
    tiles: list[Any] = getattr(image, "tile", [])
    for tile in tiles:
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if any(isinstance(argument, str) and ";16" in argument for argument in arguments):  # such as RGB;16B
            return True
        if image.format == "PPM" and any(isinstance(argument, int) and argument > 255 for argument in arguments):
            return True
    return False


def _finite_pixels(image: "Image") -> NDArray[Any]:
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    return pixels


# What programs put beside images: macOS's archives, Synology's thumbnails, Windows's.
_FOLDERS_OF_PROGRAMS = ("__MACOSX", "@eaDir")


_FILES_OF_PROGRAMS = ("Thumbs.db", "desktop.ini")


_MOST_NAMED = 5


@dataclass(frozen=True)
class FileListing:
    """The files under a folder, in a fixed order.

    Attributes:
        images: those whose names end as an image's.
        others: those that are left out and that the user may have meant; programs' own and hidden files are not here.
    """

    images: list[Path]
    others: list[Path]


def list_files(folder: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> FileListing:
    """List a folder and the folders in it; links are followed, also to folders, and hidden names are left out.

    Only regular files count: opening a pipe would wait for ever.

    Raises:
        UserError: a folder cannot be read.
    """
    images: list[Path] = []
    others: list[Path] = []
    for inner, names in sorted(_walk(folder)):
        for name in sorted(names):
            file = Path(inner, name)
            is_image = name.lower().endswith(suffixes) and file.is_file()
            (images if is_image else others).append(file)
    return FileListing(images, others)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted by name, without hidden ones and those of programs.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(
            (entry for entry in folder.iterdir() if not _is_of_a_program(entry.name) and entry.is_dir()),
            key=lambda entry: entry.name,
        )
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read: {error.strerror or error}") from error


def notify_of_left_out(others: list[Path], root: Path, expected: str = "") -> None:
    """Name the first of the files that are left out, and say how many there are.

    Args:
        others: the files.
        root: the folder that the user named; the files' names are shown as they are in it.
        expected: where an image must be so that it counts, to follow "must be".
    """
    if others:
        names = [os.path.relpath(file, root) for file in others]
        kinds = ", ".join(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
        what = "1 file is" if len(others) == 1 else f"{len(others):,} files are"
        where = f", and each must be {expected}" if expected else ""
        notify(f"{what} left out of {printable(root)}: {listed(names, _MOST_NAMED)}; images end with {kinds}{where}")


def _walk(folder: Path) -> list[tuple[str, list[str]]]:
    """Each folder with the names of its files; a folder that links lead to twice is listed once."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{printable(error.filename)} cannot be read: {error.strerror or error}") from error

    listing: list[tuple[str, list[str]]] = []
    visited: set[str] = set()
    for inner, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(inner)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_of_a_program(name))
        listing.append((inner, [name for name in names if not _is_of_a_program(name)]))
    return listing


def _is_of_a_program(name: str) -> bool:
    return name.startswith(".") or name in _FOLDERS_OF_PROGRAMS or name in _FILES_OF_PROGRAMS
