"""DICOM files: what the stored values of the first image mean, in the order of the standard's part 3.

Stored bits become values (C.7.6.3), values get their unit (modality transform, C.11.1), a window or a lookup table
chooses what is shown (C.11.2), and the polarity says which end is bright (C.7.6.3.1.2, C.11.6). Objects with functional
groups (C.7.6.16) keep unit and window there, for each image or for all. pydicom reads and decodes the files.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, install_command
from ..untrusted import printable
from .files import first_line
from .image_kinds import BrokenImageError, ImageKind, read_codestream, require_size
from .pixels import Window, apply_window

_GROUPS = ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence")
_MOST_UNPACKED = 2**29  # bytes of a deflated file: three times the largest image of 16 bits that is read
_WHOLE_TABLE = 65536  # entries, which a lookup table writes as 0
_NEEDED = ("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated")
_DECODED = {"YBR_FULL_422": "YBR_FULL", "YBR_ICT": "RGB", "YBR_RCT": "RGB"}  # what compressed colours become
_LOSSY_JPEG = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51")  # decoders give no more bytes than these need


def dicom_kind(file: Path) -> ImageKind:
    """Read a file's header alone."""
    stored = _read(file, stop_before_pixels=True)
    kind = _kind(stored)
    _decoder(stored)
    return kind


def dicom_pixels(file: Path, window: Window | None) -> NDArray[np.uint8]:
    """Read the first image: gray [H, W] through a window, or colours [H, W, 3], also gray through three windows.

    Without a window of the user's or, for `file`, of its own, an image that `dicom_kind` calls not deep is shown from
    the smallest to the largest value that its bits can store.
    """
    stored = _read(file)
    kind = _kind(stored)
    pixels, interpretation = _decoded(stored)
    if kind.channels == 3:
        return _colours(stored, pixels, interpretation)
    values = _with_unit(stored, pixels)
    own = _own_view(stored) if window == "file" else None
    if own is not None:
        shown = _through(own, values, stored)
    else:
        if window == "per_image":
            inside = _inside(stored, values)
            window = float(inside.min()), float(inside.max())
        elif window == "file" and kind.deep:
            raise BrokenImageError("it names no window of its own; set data.window=[LOW,HIGH]")
        elif window is None or window == "file":
            window = "full"
        shown = apply_window(values[None], window, kind.type_range)[0]
    return 255 - shown if kind.inverted else shown


def dicom_values(file: Path) -> NDArray[np.float64]:
    """Return the values [k] of the first image, which is gray, in its unit and without padding."""
    stored = _read(file)
    return _inside(stored, _with_unit(stored, _decoded(stored)[0]))


def _read(file: Path, **options: Any) -> Any:
    try:
        from pydicom import dcmread
        from pydicom.errors import InvalidDicomError
    except ImportError as error:
        raise UserError(
            f"{printable(file)} is a DICOM file, which needs pydicom: {install_command('dicom')}"
        ) from error
    try:
        _require_bounded(file)
        return dcmread(file, **options)
    except InvalidDicomError as error:
        raise BrokenImageError(
            "no DICOM file: the letters DICM are missing after its first 128 bytes; export it as DICOM part 10"
        ) from error


def _require_bounded(file: Path) -> None:
    """Refuse a file in the deflated transfer syntax (PS3.5, A.5) that unpacks to too much: pydicom unpacks it whole."""
    from pydicom.filereader import _read_file_meta_info, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    with open(file, "rb") as stream:
        read_preamble(stream, force=False)
        if _read_file_meta_info(stream).get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
            return
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        if len(unpacker.decompress(stream.read(), _MOST_UNPACKED + 1)) > _MOST_UNPACKED:
            raise BrokenImageError(f"it unpacks to more than {_MOST_UNPACKED:,} bytes: store it uncompressed")


def _kind(stored: Any) -> ImageKind:
    if "Rows" not in stored:
        kind = stored.get("SOPClassUID") or stored.file_meta.get("MediaStorageSOPClassUID")
        what = printable(kind.name) if kind else "of no class, or cut"
        raise BrokenImageError(f"a DICOM object without pixels: {what}")
    wrong = [name for name in _NEEDED if not (isinstance(stored.get(name), (int, str)) and stored.get(name))]
    wrong += ["BitsStored"] if stored.get("BitsStored") == 0 else []
    wrong += [] if "TransferSyntaxUID" in stored.file_meta else ["TransferSyntaxUID"]
    if wrong:
        raise BrokenImageError(f"its element {', '.join(wrong)} is missing, 0 or a list; export it again")
    require_size(int(stored.Columns), int(stored.Rows))
    interpretation = str(stored.PhotometricInterpretation)
    bits = stored.get("BitsStored")  # missing where the pixels are floats
    one_sample = int(stored.SamplesPerPixel) == 1
    gray = one_sample and interpretation != "PALETTE COLOR"
    if not one_sample and (bits is None or bits > 8):
        raise BrokenImageError(f"colours of {bits or stored.BitsAllocated} bits, which are not read")
    signed = _is_signed(stored)
    has_unit = bool(stored.get("ModalityLUTSequence")) or _rescale(stored) != (1.0, 0.0)
    return ImageKind(
        (int(stored.Columns), int(stored.Rows)),
        1 if gray else 3,
        gray and (bits is None or bits > 8 or signed or has_unit),
        None if bits is None or not gray else _type_range(stored, int(bits), signed),
        int(stored.get("NumberOfFrames") or 1),
        gray and _own_view(stored) is not None,
        interpretation == "MONOCHROME1" or stored.get("PresentationLUTShape") == "INVERSE",
    )


def _type_range(stored: Any, bits: int, signed: bool) -> tuple[float, float]:
    if table := stored.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** int(table[0].LUTDescriptor[2]) - 1
    slope, intercept = _rescale(stored)
    smallest, largest = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    low, high = sorted((smallest * slope + intercept, largest * slope + intercept))
    return low, high


def _places(stored: Any, macro: str) -> list[Any]:
    """Return the data sets that may hold a macro's elements for the first image, those of that image alone first."""
    groups = [stored.get(name) for name in _GROUPS]
    macros = [group[0].get(macro) for group in groups if group]
    return [*(items[0] for items in macros if items), stored]


def _rescale(stored: Any) -> tuple[float, float]:
    for place in _places(stored, "PixelValueTransformationSequence"):
        slope, intercept = _number(place, "RescaleSlope"), _number(place, "RescaleIntercept")
        if slope is not None or intercept is not None:
            if slope == 0:
                raise BrokenImageError("a rescale slope of 0, which makes all pixels equal")
            return 1.0 if slope is None else slope, intercept or 0.0
    return 1.0, 0.0


def _own_view(stored: Any) -> Any:
    """Return the first window (function, centre and width), or else the first lookup table, or None: C.11.2.1.1."""
    for place in _places(stored, "FrameVOILUTSequence"):
        centre, width = (_number(place, name) for name in ("WindowCenter", "WindowWidth"))
        function = str(place.get("VOILUTFunction") or "LINEAR")
        if centre is not None and width is not None and (width >= 1 if function == "LINEAR" else width > 0):
            return function, centre, width
        if place.get("VOILUTSequence"):
            return place.VOILUTSequence[0]
    return None


def _number(place: Any, name: str) -> float | None:
    """Return the first number of an element, or None where there is none."""
    try:
        values = place.get(name)
        return None if values is None else float(np.atleast_1d(np.asarray(values, dtype=float))[0])
    except (ValueError, TypeError, OverflowError, IndexError) as error:
        raise BrokenImageError(
            f"its element {name} is no number ({first_line(error)}); write it with a point, such as 0.5"
        ) from error


def _decoder(stored: Any) -> Any:
    from pydicom.pixels import get_decoder

    syntax = stored.file_meta.TransferSyntaxUID
    try:
        return get_decoder(syntax)
    except NotImplementedError as error:
        raise BrokenImageError(f"compressed as {printable(syntax.name)}, which is not read") from error


def _decoded(stored: Any) -> tuple[NDArray[Any], str]:
    """Decode the first image: stored values [H, W] or [H, W, 3] without unused bits, and how they stand for colours."""
    from pydicom.uid import RLELossless

    syntax = stored.file_meta.TransferSyntaxUID
    options: dict[str, Any] = {}
    unused = 0
    try:
        if syntax.is_encapsulated and syntax != RLELossless:
            _decompress(stored)
        if stored.get("BitsStored") is not None:
            unused = max(0, int(stored.get("HighBit") or 0) + 1 - int(stored.BitsStored))
            options["bits_stored"] = int(stored.BitsStored) + unused  # pydicom drops the bits above these
        pixels, properties = _decoder(stored).as_array(stored, index=0, **options)
    except RuntimeError as error:
        raise BrokenImageError(f"it cannot be decoded ({first_line(error)}); export it again") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise BrokenImageError(f"its header does not suit its pixels ({first_line(error)}); export it again") from error
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise BrokenImageError("pixels that are NaN or infinite")
    return pixels >> unused if unused else pixels, str(properties["photometric_interpretation"])


def _decompress(stored: Any) -> None:
    """Put the first image's values in place of its compressed data, and what that says in place of the header.

    What the header says of the order of colours (PS3.5, 8.2.1), of their kind and of unused bits means nothing there. A
    header that has another size is refused before anything is decoded: the data may be of any size.
    """
    from imagecodecs import jpeg2k_decode, jpeg_decode, jpegls_decode
    from pydicom.encaps import get_frame
    from pydicom.uid import ExplicitVRLittleEndian

    places = stored.get("ExtendedOffsetTable"), stored.get("ExtendedOffsetTableLengths")  # of the images, where given
    extended, images = None if None in places else places, int(stored.get("NumberOfFrames") or 1)
    data = get_frame(stored.PixelData, 0, number_of_frames=images, extended_offsets=extended)
    found = read_codestream(data)
    if found is None:
        raise BrokenImageError("its compressed data do not begin as JPEG, JPEG-LS or JPEG 2000; export it again")
    size, header = (found.width, found.height), (int(stored.Columns), int(stored.Rows))
    samples, allocated = int(stored.SamplesPerPixel), int(stored.BitsAllocated)
    wider = stored.file_meta.TransferSyntaxUID in _LOSSY_JPEG and allocated >= found.bits + 8
    if size != header or found.samples != samples or found.bits > allocated or wider:
        raise BrokenImageError(
            f"its header says {header[0]} x {header[1]} pixels with {samples} x {allocated} bits (Columns, Rows, "
            f"SamplesPerPixel, BitsAllocated), its compressed data {size[0]} x {size[1]} with {found.samples} x "
            f"{found.bits}; export it again"
        )
    if found.form == "JPEG":
        if not data.rstrip(b"\0").endswith(b"\xff\xd9"):  # the decoder would fill up what is missing
            raise BrokenImageError("its compressed data are cut; export it again")
        space = None if samples == 1 else "YCBCR"  # the same for both, so that colours stay as they are stored
        values = jpeg_decode(data, colorspace=space, outcolorspace=space)
    else:
        values = {"JPEG-LS": jpegls_decode, "JPEG 2000": jpeg2k_decode}[found.form](data)
    stored.PixelData, stored.NumberOfFrames = values.tobytes(), 1
    stored.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    stored.BitsAllocated = 8 * values.itemsize
    if samples > 1:
        stored.PlanarConfiguration = 0
        said = str(stored.PhotometricInterpretation)
        stored.PhotometricInterpretation = found.colours or _DECODED.get(said, said)
    if not stored.get("PixelRepresentation"):
        stored.BitsStored = max(int(stored.get("BitsStored") or 0), found.bits)  # or else the others are dropped
    stored.HighBit = int(stored.BitsStored) - 1


def _with_unit(stored: Any, pixels: NDArray[Any]) -> NDArray[np.float64]:
    if table := stored.get("ModalityLUTSequence"):
        values = _looked_up(pixels, table[0].LUTDescriptor, table[0].LUTData, stored, _is_signed(stored))
        return values.astype(np.float64)
    slope, intercept = _rescale(stored)
    return pixels.astype(np.float64) * slope + intercept


def _is_signed(stored: Any) -> bool:
    return bool(stored.get("PixelRepresentation"))


def _looked_up(values: NDArray[Any], descriptor: Any, data: Any, stored: Any, signed: bool) -> NDArray[np.int64]:
    """Replace values by a table's entries, those beyond its ends by its first or last, as in C.11.1.1.1.

    `signed` says whether values of this kind may be negative, as then the first one may be written as an unsigned one.
    """
    count, first, _ = map(int, descriptor)
    count = count or _WHOLE_TABLE
    if isinstance(data, bytes):
        words = "<u2" if stored.file_meta.TransferSyntaxUID.is_little_endian else ">u2"
        data = np.frombuffer(data, words if len(data) >= 2 * count else "u1")
    entries = np.atleast_1d(np.asarray(data)).astype(np.int64)[:count]
    if len(entries) < count:
        raise BrokenImageError(f"a lookup table of {len(entries)} entries, whose descriptor announces {count}")
    if first >= _WHOLE_TABLE // 2 and signed:
        first -= _WHOLE_TABLE
    return entries[np.clip(np.rint(values).astype(np.int64) - first, 0, count - 1)]


def _inside(stored: Any, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values [k] without the padding around the image (C.7.5.1.1.2); all where there is nothing else."""
    for kind in ("", "Float", "DoubleFloat"):
        limits = [stored.get(f"{kind}PixelPadding{end}") for end in ("Value", "RangeLimit")]
        if limits[0] is None:
            continue
        ends = [limit if kind else _as_stored(stored, limit) for limit in limits if limit is not None]
        low, high = np.sort(_with_unit(stored, np.array(ends)))[[0, -1]]
        inside = values[(values < low) | (values > high)]
        values = inside if inside.size else values
    return values.reshape(-1)


def _as_stored(stored: Any, value: Any) -> int:
    """Return a number of the header as the pixels would have it: it may be written without their sign (US for SS)."""
    bits = int(stored.BitsStored)
    value = int(value) % 2**bits
    return value - 2**bits if _is_signed(stored) and value >= 2 ** (bits - 1) else value


def _through(view: Any, values: NDArray[np.float64], stored: Any) -> NDArray[np.uint8]:
    """Show values through the file's own window (C.11.2.1.2 and C.11.2.1.3) or lookup table (C.11.2.1.1)."""
    if not isinstance(view, tuple):
        signed = _type_range(stored, int(stored.get("BitsStored") or 0), _is_signed(stored))[0] < 0
        entries = _looked_up(values, view.LUTDescriptor, view.LUTData, stored, signed)
        return apply_window(entries[None], (0.0, 2.0 ** int(view.LUTDescriptor[2]) - 1))[0]
    function, centre, width = view
    if function == "SIGMOID":  # 1 / (1 + exp(-4 (x - centre) / width)), which cannot overflow in this form
        return np.rint(127.5 * (1 + np.tanh(2 * (values - centre) / width))).astype(np.uint8)
    if function not in ("LINEAR", "LINEAR_EXACT"):
        raise BrokenImageError(f"a window of the function {printable(function)}, which is not read")
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1
    return apply_window(values[None], (centre - width / 2, centre + width / 2))[0]


def _colours(stored: Any, pixels: NDArray[Any], interpretation: str) -> NDArray[np.uint8]:
    if interpretation == "PALETTE COLOR":
        channels = []
        for colour in ("Red", "Green", "Blue"):
            descriptor, data = (stored.get(f"{colour}PaletteColorLookupTable{part}") for part in ("Descriptor", "Data"))
            if descriptor is None or data is None:
                raise BrokenImageError("colours by a palette that is missing or in segments, which is not read")
            entries = _looked_up(pixels, descriptor, data, stored, _is_signed(stored))
            channels.append(entries >> (int(descriptor[2]) - 8))
        return np.stack(channels, 2).astype(np.uint8)
    if interpretation != "RGB":  # what pydicom converts to RGB is called so by now
        raise BrokenImageError(f"colours as {printable(interpretation)}, which are not read")
    return apply_window(pixels[None], (0.0, 2.0 ** int(stored.BitsStored) - 1))[0]
