"""DICOM files, the format of medical imaging, read by pydicom. Nothing of a file but its pixels is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, install_command
from .files import printable

DICOM_SUFFIXES = (".dcm", ".dicom")


class UnsupportedDicomError(Exception):
    """A valid file that holds what is not read here; the message says what."""


@dataclass(frozen=True)
class DicomHeader:
    """What a file says of its image.

    Attributes:
        height, width: in pixels.
        gray: whether it has one channel.
        deep: whether its values need a window: more than 8 bits, or values with a unit (Hounsfield's).
        type_range: the smallest and largest value that its bits can hold, with its unit.
        own_window: the range that its author chose to be shown; None where the file names none.
        inverted: whether small values are bright (MONOCHROME1).
        frames: how many images it holds.
    """

    height: int
    width: int
    gray: bool
    deep: bool
    type_range: tuple[float, float]
    own_window: tuple[float, float] | None
    inverted: bool
    frames: int


def is_dicom(file: Path) -> bool:
    """Whether a file's name says that it is DICOM."""
    return file.name.lower().endswith(DICOM_SUFFIXES)


def read_dicom_header(file: Path) -> DicomHeader:
    """Read all but the pixels.

    Raises:
        UserError: pydicom is not installed.
        UnsupportedDicomError: the file needs a palette or a window that is not linear.
        Exception: of any type, from pydicom, for a damaged file.
    """
    return _header(_pydicom(file).dcmread(file, stop_before_pixels=True))


def read_dicom_pixels(file: Path) -> tuple[DicomHeader, NDArray[Any]]:
    """The header and the first image: gray values with their unit, float64 [H, W], or colours, uint8 [H, W, 3].

    A gray image of 8 bits without a unit is uint8 [H, W].

    Raises:
        see `read_dicom_header`.
    """
    stored = _pydicom(file).dcmread(file)
    header = _header(stored)
    pixels = np.asarray(stored.pixel_array)
    if header.frames > 1:
        pixels = pixels[0]
    if header.deep:
        slope, intercept = _rescale(stored)
        pixels = pixels.astype(np.float64) * slope + intercept
    return header, pixels


def _header(stored: Any) -> DicomHeader:
    kind = str(stored.PhotometricInterpretation)
    if kind == "PALETTE COLOR":
        raise UnsupportedDicomError("colours by a palette, which are not read")
    bits, signed = int(stored.BitsStored), bool(stored.PixelRepresentation)
    gray = int(stored.SamplesPerPixel) == 1
    if not gray and bits > 8:
        raise UnsupportedDicomError(f"colours of {bits} bits, which are not read")
    slope, intercept = _rescale(stored)
    smallest, largest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    low, high = sorted((smallest * slope + intercept, largest * slope + intercept))
    return DicomHeader(
        int(stored.Rows),
        int(stored.Columns),
        gray,
        gray and (bits > 8 or signed or (slope, intercept) != (1.0, 0.0)),
        (low, high),
        _own_window(stored),
        kind == "MONOCHROME1",
        int(stored.get("NumberOfFrames") or 1),
    )


def _rescale(stored: Any) -> tuple[float, float]:
    slope, intercept = stored.get("RescaleSlope"), stored.get("RescaleIntercept")
    return 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)


def _own_window(stored: Any) -> tuple[float, float] | None:
    """The values that the file's first window shows darkest and brightest, by DICOM PS3.3, C.11.2.1.2."""
    centres, widths = stored.get("WindowCenter"), stored.get("WindowWidth")
    if centres is None or widths is None:
        return None
    centre, width = (float(np.atleast_1d(np.asarray(values, dtype=float))[0]) for values in (centres, widths))
    function = str(stored.get("VOILUTFunction") or "LINEAR")
    if function == "SIGMOID":
        raise UnsupportedDicomError("a sigmoid window, which is not read")
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1.0
    return (centre - width / 2, centre + width / 2) if width > 0 else None


def _pydicom(file: Path) -> Any:
    try:
        import pydicom
    except ImportError as error:
        raise UserError(
            f"{printable(file)} is a DICOM file, which needs pydicom: {install_command('dicom')}"
        ) from error
    return pydicom
