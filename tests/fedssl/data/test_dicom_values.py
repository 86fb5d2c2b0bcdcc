"""What the values of a DICOM file mean: the rows of a table in docs/image_files.md, by the formulas of the standard."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.data.datasets import load_dataset
from fedssl.data.image_files import image_kind, read_pixels, value_range
from fedssl.data.image_kinds import BrokenImageError
from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from tests.fedssl.data.dicom_samples import write_dicom
from tests.fedssl.data.image_samples import ramp, table_rows

pytest.importorskip("pydicom", reason="pydicom is not installed: pip install .[dicom]")

BYTES = ramp(0, 255, "u1")
TWELVE = ramp(0, 4095, "u2")
SIGNED = ramp(-1000, 3000, "i2")
HOUNSFIELD = {"RescaleSlope": 1, "RescaleIntercept": -1024}
ABDOMEN = {"WindowCenter": 40.5, "WindowWidth": 401}  # from 40.5 - 0.5 - 400 / 2 to 40.5 - 0.5 + 400 / 2
GROUPS = {"PixelValueTransformationSequence": [HOUNSFIELD], "FrameVOILUTSequence": [ABDOMEN]}
OTHER = {"PixelValueTransformationSequence": [{"RescaleSlope": 9, "RescaleIntercept": 9}], "FrameVOILUTSequence": [{}]}
COLOURS = np.array([[200, 100, 50], [0, 0, 0], [255, 255, 255], [10, 200, 30]], np.uint8)[np.arange(16) // 4]
COLOUR = np.tile(COLOURS, (16, 1, 1))


def scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 255)


def stored_bits(count: int, high: int | None = None) -> dict[str, int]:
    return {"BitsStored": count, "HighBit": count - 1 if high is None else high}


def table(entries: np.ndarray, first: int, bits: int) -> list[dict[str, Any]]:
    return [{"LUTDescriptor": [len(entries), first, bits], "LUTData": entries.astype("<u2").tobytes()}]


def ycbcr(colours: np.ndarray) -> np.ndarray:
    """PS3.3, C.7.6.3.1.2, YBR_FULL."""
    matrix = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])
    return np.clip(np.rint(colours @ matrix.T + [0, 128, 128]), 0, 255).astype(np.uint8)


def palette(bits: int, scale: int) -> dict[str, Any]:
    elements: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, entries in zip(("Red", "Green", "Blue"), COLOURS[::4].T, strict=True):
        elements[f"{name}PaletteColorLookupTableDescriptor"] = [4, 0, bits]
        elements[f"{name}PaletteColorLookupTableData"] = (entries.astype("<u2") * scale).tobytes()
    return elements


BITS_12 = stored_bits(12)
ABDOMINAL = scaled(TWELVE - 1024.0, -160, 240)
QUADRATIC = (np.arange(4096) ** 2) >> 12  # 12 bits to 12 bits
ONE_BIT = ramp(0, 1.99, "u1")
SEVEN_BITS = ramp(0, 127, "u1")
FLOATS = ramp(0, 1, "f4")
FLOAT = dict.fromkeys(("BitsStored", "HighBit", "PixelRepresentation", "PixelData")) | {
    "FloatPixelData": FLOATS.tobytes()
}
PADDED = np.where(TWELVE < 1000, -2000, TWELVE.astype("i2"))
INDICES = np.tile(np.arange(16, dtype=np.uint8) // 4, (16, 1))
PAIRS = ycbcr(COLOUR).reshape(16, 8, 2, 3)  # two pixels share their colour: Y Y Cb Cr
HALVED = np.concatenate([PAIRS[..., 0], PAIRS[:, :, 0, 1:]], 2)
MONOCHROME1 = {"PhotometricInterpretation": "MONOCHROME1"}
INVERSE = {"PresentationLUTShape": "INVERSE"}
EXACT = {"WindowCenter": 2000, "WindowWidth": 1000, "VOILUTFunction": "LINEAR_EXACT"}
SIGMOID = EXACT | {"VOILUTFunction": "SIGMOID"}
FILE = "file"

# a row's name: pixels, elements, window, what is read
CASES: dict[str, tuple[np.ndarray, dict[str, Any], Any, np.ndarray]] = {
    "8 bits, MONOCHROME2": (BYTES, {}, None, BYTES),
    "8 bits, MONOCHROME1": (BYTES, MONOCHROME1, None, 255 - BYTES),
    "8 bits, Presentation LUT Shape INVERSE": (BYTES, INVERSE, None, 255 - BYTES),
    "8 bits, MONOCHROME1 and INVERSE": (BYTES, MONOCHROME1 | INVERSE, None, 255 - BYTES),
    "1 bit, packed, as in a segmentation": (
        BYTES,
        {"BitsAllocated": 1, **stored_bits(1), "PixelData": np.packbits(ONE_BIT.ravel(), bitorder="little").tobytes()},
        None,
        ONE_BIT * 255,
    ),
    "1 of 8 bits stored": (ONE_BIT, stored_bits(1), None, ONE_BIT * 255),
    "7 of 8 bits stored": (SEVEN_BITS, stored_bits(7), None, scaled(SEVEN_BITS, 0, 127)),
    "8 bits or fewer, a window given": (BYTES, {}, (50, 200), scaled(BYTES, 50, 200)),
    "8 bits or fewer, its own window": (BYTES, ABDOMEN, FILE, scaled(BYTES, -160, 240)),
    "8 bits or fewer, no window of its own": (BYTES, {}, FILE, BYTES),
    "12 of 16 bits stored": (TWELVE, BITS_12, "full", scaled(TWELVE, 0, 4095)),
    "12 of 16 bits, an overlay above them": (TWELVE | 0x8000, BITS_12, "full", scaled(TWELVE, 0, 4095)),
    "12 of 16 bits, the upper ones": (TWELVE << 4 | 3, stored_bits(12, 15), "full", scaled(TWELVE, 0, 4095)),
    "13 of 16 bits, signed, the upper ones": (
        *(SIGNED << 3, stored_bits(13, 15), (-1000, 3000), scaled(SIGNED, -1000, 3000)),
    ),
    "16 bits, signed": (SIGNED, {}, "full", scaled(SIGNED, -32768, 32767)),
    "32-bit floats": (FLOATS, FLOAT, (0, 1), scaled(FLOATS, 0, 1)),
    "rescale slope and intercept": (TWELVE, BITS_12 | HOUNSFIELD, (-160, 240), ABDOMINAL),
    "rescale and window in the shared groups": (
        *(TWELVE, BITS_12 | {"SharedFunctionalGroupsSequence": [GROUPS]}, FILE, ABDOMINAL),
    ),
    "rescale and window in each image's groups": (
        *(np.stack([TWELVE, TWELVE]), BITS_12 | {"PerFrameFunctionalGroupsSequence": [GROUPS, OTHER]}, FILE, ABDOMINAL),
    ),
    "rescale and polarity in an enhanced object": (
        *(TWELVE, BITS_12 | INVERSE | {"SharedFunctionalGroupsSequence": [GROUPS]}, (-160, 240), 255 - ABDOMINAL),
    ),
    "modality lookup table": (
        *(TWELVE, BITS_12 | {"ModalityLUTSequence": table(QUADRATIC, 0, 16)}),
        *((0, 4095), scaled(QUADRATIC[TWELVE], 0, 4095)),
    ),
    "modality lookup table, signed": (
        *(SIGNED, {"ModalityLUTSequence": table(np.arange(2000) * 2, -500, 16)}),
        *((0, 4000), scaled(np.clip(SIGNED.astype(int) + 500, 0, 1999) * 2, 0, 4000)),
    ),
    "window, LINEAR": (TWELVE, BITS_12 | ABDOMEN, FILE, scaled(TWELVE, -160, 240)),
    "window, LINEAR, of width 1": (
        *(TWELVE, BITS_12 | {"WindowCenter": 1092.5, "WindowWidth": 1}, FILE, np.where(TWELVE > 1092, 255, 0)),
    ),
    "window, LINEAR_EXACT": (TWELVE, BITS_12 | EXACT, FILE, scaled(TWELVE, 1500, 2500)),
    "window, SIGMOID": (TWELVE, BITS_12 | SIGMOID, FILE, np.rint(255 / (1 + np.exp(-4 * (TWELVE - 2000.0) / 1000)))),
    "several windows": (
        *(TWELVE, BITS_12 | {"WindowCenter": [40.5, 2000], "WindowWidth": [401, 9]}, FILE, scaled(TWELVE, -160, 240)),
    ),
    "VOI lookup table": (
        *(TWELVE, BITS_12 | {"VOILUTSequence": table(QUADRATIC, 0, 12)}, FILE, scaled(QUADRATIC[TWELVE], 0, 4095)),
    ),
    "VOI lookup table, 8-bit entries, rescale, MONOCHROME1": (
        *(TWELVE, BITS_12 | HOUNSFIELD | MONOCHROME1 | {"VOILUTSequence": table(np.arange(256), 100, 8)}),
        *(FILE, 255 - np.clip(TWELVE.astype(int) - 1124, 0, 255)),
    ),
    "window and VOI lookup table": (
        *(TWELVE, BITS_12 | ABDOMEN | {"VOILUTSequence": table(QUADRATIC, 0, 12)}, FILE, scaled(TWELVE, -160, 240)),
    ),
    "padding around the image": (
        *(PADDED, {"PixelPaddingValue": -2000}, "per_image", scaled(TWELVE, TWELVE[TWELVE >= 1000].min(), 4095)),
    ),
    "RGB": (COLOUR, {}, None, COLOUR),
    "RGB, planar configuration 1": (
        *(COLOUR, {"PlanarConfiguration": 1, "PixelData": COLOUR.transpose(2, 0, 1).tobytes()}, None, COLOUR),
    ),
    "YBR_FULL": (ycbcr(COLOUR), {"PhotometricInterpretation": "YBR_FULL"}, None, COLOUR),
    "YBR_FULL_422": (
        *(COLOUR, {"PhotometricInterpretation": "YBR_FULL_422", "PixelData": HALVED.tobytes()}, None, COLOUR),
    ),
    "PALETTE COLOR, 8-bit entries": (INDICES, palette(8, 1), None, COLOUR),
    "PALETTE COLOR, 16-bit entries": (INDICES, palette(16, 256), None, COLOUR),
}


def read(file: Path, window: Any) -> np.ndarray:
    kind = image_kind(file)
    width, height = kind.size
    pixels = read_pixels(file, height, width, 1 if kind.gray else 3, window)
    return pixels[0] if kind.gray else pixels.transpose(1, 2, 0)


def test_the_table_has_these_rows():
    assert table_rows("image_files.md", "DICOM") == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table(tmp_path, name):
    pixels, elements, window, expected = CASES[name]
    read_as = read(write_dicom(tmp_path / "a.dcm", pixels, **elements), window)
    assert np.abs(read_as.astype(int) - expected).max() <= (1 if name.startswith("YBR") else 0)


def test_every_file_has_its_own_slope(tmp_path):
    """Positron emission tomography: a file's largest value is stored as the largest number."""
    for number, slope in enumerate((0.5, 2.0)):
        file = write_dicom(tmp_path / f"{number}.dcm", TWELVE, RescaleSlope=slope, RescaleIntercept=0)
        assert value_range(file) == (0, 4095 * slope)
        assert np.array_equal(read(file, (0, 8190)), scaled(TWELVE * slope, 0, 8190))


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2", "1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.5"])
def test_transfer_syntaxes(tmp_path, syntax):
    """Implicit, deflated, and compressed by run lengths."""
    from pydicom import dcmread

    file = write_dicom(tmp_path / "a.dcm", TWELVE, **BITS_12, **HOUNSFIELD)
    stored = dcmread(file)
    if syntax.endswith(".5"):
        stored.compress(syntax)
    else:
        stored.file_meta.TransferSyntaxUID = syntax
    stored.save_as(file)
    assert np.array_equal(read(file, (-160, 240)), ABDOMINAL)


JPEG_LOSSLESS, JPEG_EXTENDED, MPEG = (f"1.2.840.10008.1.2.4.{number}" for number in (70, 51, 100))


@pytest.mark.parametrize(
    ("syntax", "says"),
    [
        (JPEG_LOSSLESS, r"a\.dcm is compressed as JPEG Lossless.* needs a decoder: pip install '.*\[dicom\]'"),
        (JPEG_EXTENDED, r"compressed as JPEG Extended .*: pip install pylibjpeg pylibjpeg-libjpeg"),
    ],
)
def test_a_missing_decoder_is_no_broken_file(tmp_path, monkeypatch, syntax, says):
    from pydicom.encaps import encapsulate
    from pydicom.pixels import get_decoder

    monkeypatch.setattr(get_decoder(syntax), "_available", {"pillow": None} if syntax == JPEG_EXTENDED else {})
    file = write_dicom(tmp_path / "a.dcm", TWELVE, syntax, **BITS_12, PixelData=encapsulate([b"\xff\xd8"]))
    for options in ({}, {"broken": "skip", "window": (0, 4095)}):
        with pytest.raises(UserError, match=says):
            load_dataset(DataOptions(name="images", path=tmp_path, image_size=16, **options), 0)
    with pytest.raises(UserError, match=says):
        read_pixels(file, 16, 16, 1, (0, 4095))


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        ({"Rows": None, "SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11"}, "without pixels: Basic Text SR Storage"),
        ({"Rows": None, "SOPClassUID": "1.2.840.10008.5.1.4.1.1.104.1"}, "without pixels: Encapsulated PDF Storage"),
        (
            {"syntax": MPEG, "PixelData": b"\xfe\xff\x00\xe0" + bytes(12)},
            "compressed as MPEG2 Main Profile .*, which is not read",
        ),
        ({"PhotometricInterpretation": "HSV", "SamplesPerPixel": 3, "PlanarConfiguration": 0}, "colours as HSV"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "a palette that is missing or in segments"),
        (palette(8, 1) | {"BluePaletteColorLookupTableDescriptor": [9, 0, 8]}, "of 8 entries, .* announces 9"),
        ({"RescaleSlope": 0, "RescaleIntercept": 5}, "a rescale slope of 0"),
        (ABDOMEN | {"VOILUTFunction": "CUBIC"}, "a window of the function CUBIC"),
        (HOUNSFIELD, "names no window of its own"),
        (FLOAT | {"FloatPixelData": np.full((16, 16), np.nan, "f4").tobytes(), "BitsAllocated": 32}, "NaN or infinite"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, elements, reason):
    pixels = COLOUR if elements.get("SamplesPerPixel") == 3 else BYTES
    with pytest.raises(BrokenImageError, match=reason):
        read(write_dicom(tmp_path / "a.dcm", pixels, **elements), FILE if "BitsStored" not in elements else (0, 1))
