"""DICOM files: what their values mean, by the formulas of the standard (docs/image_files.md), and their window."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from fedssl.data.datasets import load_dataset
from fedssl.data.image_files import image_kind, read_pixels, stored_values
from fedssl.data.image_kinds import BrokenImageError
from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import refused, save
from tests.fedssl.data.image_samples import encoded, ramp, save_array, table_rows

pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed: pip install .[dicom]")


def dataset(elements: dict[str, Any]) -> Any:
    """A data set of elements by name; a list of dictionaries is a sequence, a tuple has a type; None is left out."""
    made = pydicom.Dataset()
    for name, value in elements.items():
        if isinstance(value, tuple):
            made.add_new(name, *value)
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            value = pydicom.Sequence([dataset(item) for item in value])
        if value is not None:
            setattr(made, name, value)
    return made


def write_dicom(path: Path, pixels: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **elements: Any) -> Path:
    """Write pixels [H, W], [n, H, W] or [H, W, 3]; elements are added, or replace those that the pixels need."""
    stored = dataset({"SOPClassUID": pydicom.uid.SecondaryCaptureImageStorage})
    stored.file_meta = pydicom.dataset.FileMetaDataset()
    stored.set_pixel_data(pixels, "RGB" if pixels.shape[-1] == 3 else "MONOCHROME2", 8 * pixels.itemsize)
    for name in elements.keys() & set(stored.dir()):
        delattr(stored, name)
    stored.update(dataset(elements))
    stored.file_meta.TransferSyntaxUID = syntax
    stored.file_meta.MediaStorageSOPClassUID = stored.SOPClassUID
    path.parent.mkdir(parents=True, exist_ok=True)
    stored.save_as(path, enforce_file_format=True)
    return path


def options_of(folder: Path, **options: object) -> DataOptions:
    return DataOptions(name="images", path=folder, image_size=16, **options)


BYTES = ramp(0, 255, "u1")
TWELVE = ramp(0, 4095, "u2")
SIGNED = ramp(-1000, 3000, "i2")
HOUNSFIELD = {"RescaleSlope": 1, "RescaleIntercept": -1024}
ABDOMEN = {"WindowCenter": 40.5, "WindowWidth": 401}  # from 40.5 - 0.5 - 400 / 2 to 40.5 - 0.5 + 400 / 2
GROUPS = {"PixelValueTransformationSequence": [HOUNSFIELD], "FrameVOILUTSequence": [ABDOMEN]}
OTHER = {"PixelValueTransformationSequence": [{"RescaleSlope": 9, "RescaleIntercept": 9}], "FrameVOILUTSequence": [{}]}
SHARED, PER_FRAME = {"SharedFunctionalGroupsSequence": [GROUPS]}, {"PerFrameFunctionalGroupsSequence": [GROUPS, OTHER]}
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
WINDOWED, WHOLE = scaled(TWELVE, -160, 240), scaled(SIGNED, -1000, 3000)
QUADRATIC = (np.arange(4096) ** 2) >> 12  # 12 bits to 12 bits
SQUARED, VOI = scaled(QUADRATIC[TWELVE], 0, 4095), {"VOILUTSequence": table(QUADRATIC, 0, 12)}
ONE_BIT = ramp(0, 1.99, "u1")
PACKED = {"BitsAllocated": 1, "PixelData": np.packbits(ONE_BIT.ravel(), bitorder="little").tobytes()}
TWO_BITS, SEVEN_BITS = ramp(0, 3, "u1"), ramp(0, 127, "u1")
FLOATS = ramp(0, 1, "f4")
FLOAT: dict[str, Any] = dict.fromkeys(("BitsStored", "HighBit", "PixelRepresentation", "PixelData"))
FLOAT |= {"FloatPixelData": FLOATS.tobytes(), "BitsAllocated": 32}
PADDED = np.where(TWELVE < 1000, -2000, TWELVE.astype("i2"))
INDICES = np.tile(np.arange(16, dtype=np.uint8) // 4, (16, 1))
PAIRS = ycbcr(COLOUR).reshape(16, 8, 2, 3)  # two pixels share their colour: Y Y Cb Cr
HALVED = {
    "PhotometricInterpretation": "YBR_FULL_422",
    "PixelData": np.concatenate([PAIRS[..., 0], PAIRS[:, :, 0, 1:]], 2).tobytes(),
}
PLANAR = {"PlanarConfiguration": 1, "PixelData": COLOUR.transpose(2, 0, 1).tobytes()}
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
    "1 bit, packed, as in a segmentation": (BYTES, stored_bits(1) | PACKED, None, ONE_BIT * 255),
    "1 of 8 bits stored": (ONE_BIT, stored_bits(1), None, ONE_BIT * 255),
    "7 of 8 bits stored": (SEVEN_BITS, stored_bits(7), None, scaled(SEVEN_BITS, 0, 127)),
    "8 bits or fewer, a window given": (BYTES, {}, (50, 200), scaled(BYTES, 50, 200)),
    "8 bits or fewer, its own window": (BYTES, ABDOMEN, FILE, scaled(BYTES, -160, 240)),
    "8 bits or fewer, no window of its own": (BYTES, {}, FILE, BYTES),
    "12 of 16 bits stored": (TWELVE, BITS_12, "full", scaled(TWELVE, 0, 4095)),
    "12 of 16 bits, an overlay above them": (TWELVE | 0x8000, BITS_12, "full", scaled(TWELVE, 0, 4095)),
    "12 of 16 bits, the upper ones": (TWELVE << 4 | 3, stored_bits(12, 15), "full", scaled(TWELVE, 0, 4095)),
    "13 of 16 bits, signed, the upper ones": (SIGNED << 3, stored_bits(13, 15), (-1000, 3000), WHOLE),
    "16 bits, signed": (SIGNED, {}, "full", scaled(SIGNED, -32768, 32767)),
    "32-bit floats": (BYTES, FLOAT, (0, 1), scaled(FLOATS, 0, 1)),
    "rescale slope and intercept": (TWELVE, BITS_12 | HOUNSFIELD, (-160, 240), ABDOMINAL),
    "rescale and window in the shared groups": (TWELVE, BITS_12 | SHARED, FILE, ABDOMINAL),
    "rescale and window in each image's groups": (np.stack([TWELVE, -TWELVE]), BITS_12 | PER_FRAME, FILE, ABDOMINAL),
    "rescale and polarity in an enhanced object": (TWELVE, BITS_12 | INVERSE | SHARED, (-160, 240), 255 - ABDOMINAL),
    "modality lookup table": (TWELVE, BITS_12 | {"ModalityLUTSequence": table(QUADRATIC, 0, 16)}, (0, 4095), SQUARED),
    "modality lookup table, signed": (
        *(SIGNED, {"ModalityLUTSequence": table(np.arange(2000) * 2, -500, 16)}),
        *((0, 4000), scaled(np.clip(SIGNED.astype(int) + 500, 0, 1999) * 2, 0, 4000)),
    ),
    "window, LINEAR": (TWELVE, BITS_12 | ABDOMEN, FILE, WINDOWED),
    "window, LINEAR, of width 1": (
        *(TWELVE, BITS_12 | {"WindowCenter": 1092.5, "WindowWidth": 1}, FILE, np.where(TWELVE > 1092, 255, 0)),
    ),
    "window, LINEAR_EXACT": (TWELVE, BITS_12 | EXACT, FILE, scaled(TWELVE, 1500, 2500)),
    "window, SIGMOID": (TWELVE, BITS_12 | SIGMOID, FILE, np.rint(255 / (1 + np.exp(-4 * (TWELVE - 2000.0) / 1000)))),
    "several windows": (TWELVE, BITS_12 | {"WindowCenter": [40.5, 2000], "WindowWidth": [401, 9]}, FILE, WINDOWED),
    "VOI lookup table": (TWELVE, BITS_12 | VOI, FILE, SQUARED),
    "VOI lookup table, 8-bit entries, rescale, MONOCHROME1": (
        *(TWELVE, BITS_12 | HOUNSFIELD | MONOCHROME1 | {"VOILUTSequence": table(np.arange(256), 100, 8)}),
        *(FILE, 255 - np.clip(TWELVE.astype(int) - 1124, 0, 255)),
    ),
    "window and VOI lookup table": (TWELVE, BITS_12 | ABDOMEN | VOI, FILE, WINDOWED),
    "padding around the image": (
        *(PADDED, {"PixelPaddingValue": -2000}, "per_image", scaled(TWELVE, TWELVE[TWELVE >= 1000].min(), 4095)),
    ),
    "RGB": (COLOUR, {}, None, COLOUR),
    "RGB, planar configuration 1": (COLOUR, PLANAR, None, COLOUR),
    "YBR_FULL": (ycbcr(COLOUR), {"PhotometricInterpretation": "YBR_FULL"}, None, COLOUR),
    "YBR_FULL_422": (COLOUR, HALVED, None, COLOUR),
    "PALETTE COLOR, 8-bit entries": (INDICES, palette(8, 1), None, COLOUR),
    "PALETTE COLOR, 16-bit entries": (INDICES, palette(16, 256), None, COLOUR),
}


def read(file: Path, window: Any) -> np.ndarray:
    kind = image_kind(file)
    width, height = kind.size
    pixels = read_pixels(file, height, width, kind.channels, window)
    return pixels[0] if kind.channels == 1 else pixels.transpose(1, 2, 0)


def test_the_table_has_these_rows():
    assert table_rows("image_files.md", "DICOM") == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table(tmp_path, name):
    pixels, elements, window, expected = CASES[name]
    read_as = read(write_dicom(tmp_path / "a.dcm", pixels, **elements), window)
    assert np.abs(read_as.astype(int) - expected).max() <= (1 if name.startswith("YBR") else 0)


@pytest.mark.parametrize(("inverted", "polarity"), [(False, "MONOCHROME2"), (True, "MONOCHROME1")])
def test_a_grey_image_is_read_through_three_windows_as_colours_are(tmp_path, inverted, polarity):
    file, windows = tmp_path / "a.dcm", ((0.0, 4095.0), (100.0, 900.0), (2000.0, 4000.0))
    write_dicom(file, TWELVE, **BITS_12, PhotometricInterpretation=polarity)
    wanted = [255 - one if inverted else one for one in (scaled(TWELVE, *window) for window in windows)]
    assert np.array_equal(read_pixels(file, 16, 16, 3, windows), wanted)


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2", "1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.5"])
def test_transfer_syntaxes(tmp_path, syntax):
    """Implicit, deflated, and compressed by run lengths."""
    file = tmp_path / "a.dcm"
    if syntax.endswith(".5"):
        stored = pydicom.dcmread(write_dicom(file, TWELVE, **BITS_12, **HOUNSFIELD))
        stored.compress(syntax)
        stored.save_as(file)
    else:
        write_dicom(file, TWELVE, syntax, **BITS_12, **HOUNSFIELD)
    assert np.array_equal(read(file, (-160, 240)), ABDOMINAL)


def test_a_deflated_file_is_bounded_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("fedssl.data.dicom_files._MOST_UNPACKED", 2**20)
    bomb = write_dicom(tmp_path / "b.dcm", BYTES, "1.2.840.10008.1.2.1.99", ImageComments="0" * 2**21)
    assert bomb.stat().st_size < 2**16
    monkeypatch.setattr("zlib.decompress", None)
    for read in (image_kind, lambda file: read_pixels(file, 16, 16, 1, None)):
        with pytest.raises(BrokenImageError, match=r"it unpacks to more than 1,048,576 bytes"):
            read(bomb)


def jpeg_2000(pixels: np.ndarray, **options: Any) -> bytes:
    return imagecodecs.jpeg2k_encode(pixels, codecformat="j2k", **options)


def jpeg_lossless(pixels: np.ndarray) -> bytes:
    return imagecodecs.jpeg8_encode(pixels, lossless=True, colorspace="RGB", outcolorspace="RGB")


def compressed(number: int, content: bytes, **elements: Any) -> dict[str, Any]:
    """What compressed data add to a header; `number` is the end of their transfer syntax."""
    syntax = f"1.2.840.10008.1.2.4.{number}"
    return {"syntax": syntax, "PixelData": pydicom.encaps.encapsulate([content])} | elements


YBR = {"PhotometricInterpretation": "YBR_FULL"}


def bare_jpeg(subsampling: str, adobe: bool = False) -> bytes:
    """A JPEG of luma and chroma without JFIF's marker, as GDCM writes it; with `adobe` that marker tells of them."""
    content = imagecodecs.jpeg8_encode(COLOUR, level=98, subsampling=subsampling)
    assert content[2:4] == b"\xff\xe0"
    rest = content[4 + int.from_bytes(content[4:6], "big") :]
    return content[:2] + (b"\xff\xee\0\x0eAdobe\0d\0\0\0\0\1" if adobe else b"") + rest


@pytest.mark.parametrize("planar", [0, 1])
@pytest.mark.parametrize(
    ("number", "content", "elements", "lost"),
    [
        (50, encoded(Image.fromarray(COLOUR), "JPEG", quality=98, subsampling=0), YBR, 3),
        (50, bare_jpeg("420"), {}, 30),
        (50, bare_jpeg("422"), {}, 30),
        (50, bare_jpeg("444", adobe=True), {}, 3),
        (51, bare_jpeg("420"), {}, 30),
        (57, jpeg_lossless(COLOUR), {}, 0),
        (70, jpeg_lossless(COLOUR), {}, 0),
        (80, imagecodecs.jpegls_encode(COLOUR), {}, 0),
        (80, imagecodecs.jpegls_encode(ycbcr(COLOUR)), YBR, 1),
        (90, jpeg_2000(COLOUR, reversible=True, level=0), {}, 0),
        (90, jpeg_2000(COLOUR, reversible=True, level=0, mct=True), YBR, 0),
        (90, jpeg_2000(ycbcr(COLOUR), reversible=True, level=0, mct=False), YBR, 1),
        (91, jpeg_2000(COLOUR, reversible=False, level=90), {}, 2),
        (201, imagecodecs.htj2k_encode(COLOUR, reversible=True), {}, 0),
    ],
)
def test_compressed_colours_do_not_follow_a_contradicting_header(tmp_path, planar, number, content, elements, lost):
    """JPEG 2000 with transformed colours gives red, green and blue, and no compressed image has planes.

    A JPEG with fewer pixels of chroma than of luma, or with Adobe's marker, is no RGB, though GDCM writes so.
    """
    file = write_dicom(
        tmp_path / "a.dcm", COLOUR, PlanarConfiguration=planar, **compressed(number, content), **elements
    )
    assert np.abs(read(file, None).astype(int) - COLOUR).max() <= lost


@pytest.mark.parametrize(
    ("pixels", "number", "content"),
    [
        (BYTES, 50, encoded(Image.fromarray(COLOUR), "JPEG")),
        (BYTES, 50, encoded(Image.new("L", (17, 16)), "JPEG")),
        (BYTES, 70, imagecodecs.ljpeg_encode(TWELVE, bitspersample=12)),
        (BYTES, 80, imagecodecs.jpegls_encode(TWELVE)),
        (BYTES, 90, jpeg_2000(np.zeros((3000, 3000), "u1"))),
        (COLOUR, 90, jpeg_2000(BYTES)),
        (TWELVE, 50, encoded(Image.fromarray(BYTES), "JPEG")),
    ],
)
def test_compressed_data_of_another_size_is_not_decoded(tmp_path, monkeypatch, pixels, number, content):
    file = write_dicom(tmp_path / "a.dcm", pixels, **compressed(number, content))
    monkeypatch.setattr("pydicom.pixels.decoders.base.Decoder.as_array", None)
    with pytest.raises(BrokenImageError, match=r"its header says 16 x 16 pixels with .* bits .*, its compressed data"):
        read(file, None)


NEGATIVE, DEEP = ramp(-2000, 2000, "i2"), ramp(0, 65535, "u2")
UNSIGNED = (NEGATIVE & 0xFFF).astype("u2")
ljpeg = imagecodecs.ljpeg_encode


@pytest.mark.parametrize(
    ("number", "values", "content", "bits", "lost"),
    [
        # what Pillow does not read
        (51, TWELVE, imagecodecs.jpeg8_encode(TWELVE, level=100, bitspersample=12), 12, 4),
        (57, TWELVE, ljpeg(TWELVE, bitspersample=12), 12, 0),
        # compressed data without a sign of their own, or of fewer bits than the header allocates
        (70, NEGATIVE, ljpeg(UNSIGNED, bitspersample=12), 12, 0),
        (80, NEGATIVE, imagecodecs.jpegls_encode(UNSIGNED), 12, 0),
        (90, NEGATIVE, jpeg_2000(UNSIGNED, reversible=True, bitspersample=12), 12, 0),
        (201, NEGATIVE, imagecodecs.htj2k_encode(UNSIGNED, reversible=True), 12, 0),
        # bits above those of the header, which are not dropped
        (70, DEEP, ljpeg(DEEP, bitspersample=16), 12, 0),
        (90, DEEP, jpeg_2000(DEEP, reversible=True), 12, 0),
        # few bits
        (70, TWO_BITS, ljpeg(TWO_BITS, bitspersample=2), 2, 0),
        (70, SEVEN_BITS, ljpeg(SEVEN_BITS, bitspersample=7), 7, 0),
    ],
)
def test_compressed_values(tmp_path, number, values, content, bits, lost):
    file = write_dicom(tmp_path / "a.dcm", values, **compressed(number, content), **stored_bits(bits))
    assert np.abs(stored_values(file)[:, 0] - values.ravel()).max() <= lost


@pytest.mark.parametrize("places", ["none", "basic", "extended"])
def test_the_first_of_several_compressed_images_in_fragments(tmp_path, places):
    """Each is in two parts, and their places stand in a table, or nowhere."""
    images = [imagecodecs.jpegls_encode(image) for image in (BYTES, 255 - BYTES)]
    elements: dict[str, Any] = {"NumberOfFrames": 2}
    if places == "extended":
        data, elements["ExtendedOffsetTable"], elements["ExtendedOffsetTableLengths"] = (
            pydicom.encaps.encapsulate_extended(images)
        )
    else:
        data = pydicom.encaps.encapsulate(images, fragments_per_frame=2, has_bot=places == "basic")
    file = write_dicom(tmp_path / "a.dcm", BYTES, "1.2.840.10008.1.2.4.80", PixelData=data, **elements)
    assert image_kind(file).frames == 2
    assert np.array_equal(read(file, None), BYTES)


COMPRESSED = {
    50: encoded(Image.fromarray(BYTES), "JPEG"),
    57: imagecodecs.ljpeg_encode(BYTES, bitspersample=8),
    80: imagecodecs.jpegls_encode(BYTES),
    90: jpeg_2000(BYTES, reversible=True),
}


@pytest.mark.parametrize("number", COMPRESSED)
def test_damaged_compressed_data_end_no_process(tmp_path, number):
    """They are named as broken, or decoded to something."""
    for seed in (32, 34, 59, 72, *range(5)):  # the first four ended it
        random, content = np.random.default_rng(seed), bytearray(COMPRESSED[number])
        for _ in range(1 + seed % 5):
            content[random.integers(2, len(content))] = random.integers(256)
        with suppress(BrokenImageError):
            read(write_dicom(tmp_path / "a.dcm", BYTES, **compressed(number, bytes(content))), None)


@pytest.mark.parametrize("number", COMPRESSED)
def test_cut_compressed_data_are_named(tmp_path, number):
    says = r"cut; export|cannot be decoded \(.*\); export|do not begin as JPEG"
    for part in (0.1, 0.5, 0.9):
        content = COMPRESSED[number][: int(part * len(COMPRESSED[number]))]
        file = write_dicom(tmp_path / "a.dcm", BYTES, **compressed(number, content))
        with pytest.raises(BrokenImageError, match=says):
            read(file, None)


# how the values of padding are written: the header's bits and sign, the value and its other end
PADDINGS = {
    "a negative number as an unsigned one": ("i2", 16, {"PixelPaddingValue": ("US", 63536)}),
    "a negative number in 12 bits": ("i2", 12, {"PixelPaddingValue": ("US", 2096)}),
    "a negative number in 12 bits, with the bits above them": ("i2", 12, {"PixelPaddingValue": ("US", 63536)}),
    "an unsigned number as a negative one": ("u2", 16, {"PixelPaddingValue": ("SS", -2000)}),
    "a range as unsigned numbers": (
        *("i2", 16, {"PixelPaddingValue": ("US", 63036), "PixelPaddingRangeLimit": ("US", 63636)}),
    ),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_is_read_as_the_pixels_are(tmp_path, name):
    dtype, bits, elements = PADDINGS[name]
    tissue = ramp(-900 if dtype == "i2" else 0, 1500, dtype)
    pixels = tissue.copy()
    pixels[:, :2] = np.array(-2000, "i2").astype(dtype)
    file = write_dicom(tmp_path / "a.dcm", pixels, **stored_bits(bits), **elements)
    assert np.array_equal(np.unique(stored_values(file)), np.unique(tissue[:, 2:]))
    assert np.array_equal(read(file, "per_image")[:, 2:], scaled(tissue[:, 2:], tissue[:, 2:].min(), tissue.max()))


def test_padding_of_floats(tmp_path):
    floats = np.where(BYTES < 100, np.float32(-7), FLOATS)
    elements = FLOAT | {"FloatPixelData": floats.tobytes(), "FloatPixelPaddingValue": -7.0}
    assert stored_values(write_dicom(tmp_path / "a.dcm", BYTES, **elements)).min() == FLOATS[BYTES >= 100].min()


def test_a_table_that_begins_at_a_negative_value_written_as_an_unsigned_one(tmp_path):
    """No pixel of this image is negative, but others of the series are."""
    [entries] = table(np.arange(2000) * 2, -500, 16)
    entries["LUTDescriptor"] = ("US", [2000, 65036, 16])
    file = write_dicom(tmp_path / "a.dcm", np.abs(SIGNED), ModalityLUTSequence=[entries])
    assert np.array_equal(stored_values(file)[:, 0], np.clip(np.abs(SIGNED).astype(int) + 500, 0, 1999).ravel() * 2)


MPEG = "1.2.840.10008.1.2.4.100"
HSV = {"PhotometricInterpretation": "HSV", "SamplesPerPixel": 3, "PlanarConfiguration": 0}


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        ({"Rows": None, "SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11"}, "without pixels: Basic Text SR Storage"),
        ({"syntax": MPEG, "PixelData": b"\xfe\xff\x00\xe0" + bytes(12)}, "as MPEG2 Main Profile .*, which is not read"),
        (HSV, "colours as HSV"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "a palette that is missing or in segments"),
        (palette(8, 1) | {"BluePaletteColorLookupTableDescriptor": [9, 0, 8]}, "of 8 entries, .* announces 9"),
        ({"RescaleSlope": 0, "RescaleIntercept": 5}, "a rescale slope of 0"),
        (ABDOMEN | {"VOILUTFunction": "CUBIC"}, "a window of the function CUBIC"),
        (HOUNSFIELD, "names no window of its own"),
        ({"PixelData": b""}, r"its header does not suit its pixels \(.*\); export it again"),
        ({"Rows": 99}, r"its header does not suit its pixels \(.* less than expected .*\); export it again"),
        (FLOAT | {"FloatPixelData": np.full((16, 16), np.nan, "f4").tobytes()}, "NaN or infinite"),
        (compressed(90, imagecodecs.jpegxl_encode(BYTES)), "not begin as JPEG, JPEG-LS or JPEG 2000; export it again"),
        (compressed(80, imagecodecs.jpegls_encode(COLOUR), **HSV), "colours as HSV, which are not read"),
        ({"RescaleSlope": 9.5}, r"element RescaleSlope is no number \(.*'9,5'\); write it with a point"),
        ({"WindowCenter": 9.5, "WindowWidth": 1}, r"element WindowCenter is no number"),
        ({"PhotometricInterpretation": None}, r"element PhotometricInterpretation is missing"),
        ({"Columns": None, "SamplesPerPixel": None}, r"element Columns, SamplesPerPixel is missing"),
        ({"SamplesPerPixel": [1, 3], "BitsStored": 0}, r"element SamplesPerPixel, BitsStored is missing, 0 or a list"),
    ],
)
@pytest.mark.filterwarnings("ignore:Invalid value for VR DS")
def test_what_is_not_read_is_named(tmp_path, elements, reason):
    pixels = COLOUR if elements.get("SamplesPerPixel") == 3 else BYTES
    file = write_dicom(tmp_path / "a.dcm", pixels, **elements)
    file.write_bytes(file.read_bytes().replace(b"9.5", b"9,5"))
    with pytest.raises(BrokenImageError, match=reason):
        read(file, FILE if "BitsStored" not in elements else (0, 1))


def first(options: DataOptions) -> np.ndarray:
    images = load_dataset(options, 0).train_images
    assert images.shape[1] == 1
    return images[0, 0].numpy()


def test_a_window_is_in_the_units_of_the_file(tmp_path):
    """A computed tomography: stored values 0 to 3000 stand for -1000 to 5000 Hounsfield units."""
    stored = ramp(0, 3000, "u2")
    write_dicom(tmp_path / "a.dcm", stored, **BITS_12, RescaleSlope=2, RescaleIntercept=-1000)
    says = r"a\.dcm has pixels of more than 8 bits, .*values -1000 to 5000 .*data\.window=\[-1000,5000\]"
    refused(says, options_of(tmp_path))
    assert np.array_equal(first(options_of(tmp_path, window=(-1000, 200))), scaled(stored, 0, 600))
    assert np.array_equal(first(options_of(tmp_path, window="full")), scaled(stored, 0, 4095))


def test_files_without_a_window_of_their_own(tmp_path):
    write_dicom(tmp_path / "a.dcm", TWELVE, **ABDOMEN)
    refused(r"or data\.window=file \(what each DICOM file names\)", options_of(tmp_path))
    write_dicom(tmp_path / "b.dcm", TWELVE)
    refused(r"b\.dcm .*it names no window of its own; set data\.window=\[LOW,HIGH\]", options_of(tmp_path, window=FILE))
    save_array(tmp_path / "png" / "a.png", ramp(0, 4000, "u2"))
    refused(r"a\.png .*these pixels have no window of their own", options_of(tmp_path / "png", window=FILE))
    path = save(tmp_path / "p.npz", x=ramp(0, 4000, "u2")[None])
    refused(r"x in .*: these pixels have no window of their own", DataOptions(name="npz", path=path, window=FILE))


def test_broken_files_are_named(tmp_path):
    whole = write_dicom(tmp_path / "a.dcm", BYTES).read_bytes()
    for name, content in (("cut", whole[:-20]), ("header", whole[:200]), ("text", b"text" * 99), ("empty", b"")):
        (tmp_path / f"{name}.dcm").write_bytes(content)
    says = r"^4 of 5 files cannot be read as images: .*cut\.dcm .*empty\.dcm \(the file is empty\), "
    refused(says + r".*text\.dcm \(no DICOM file: the letters DICM are missing", options_of(tmp_path))
    assert len(load_dataset(options_of(tmp_path, broken="skip"), 0).train_images) == 1


def test_without_pydicom_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_dicom(tmp_path / "a.dcm", BYTES)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    refused(r"a\.dcm is a DICOM file, which needs pydicom: pip install", options_of(tmp_path))
    refused(r"needs pydicom", options_of(tmp_path, broken="skip"))


def test_a_file_needs_no_suffix(tmp_path, caplog):
    """As on a disc: IM_0001, or an identifier with dots; the list of its files is no image, and not broken."""
    content = write_dicom(tmp_path / "a.DCM", BYTES).read_bytes()
    for name in ("IM_0001", "1.2.840.113619.2.55", "a.IMA", "DICOMDIR", "misnamed.jpg"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes").write_bytes(b"\0" * 200)
    images = load_dataset(options_of(tmp_path), 0).train_images
    assert images.shape == (5, 1, 16, 16)
    assert (images == images[0]).all()
    assert "2 files are left out of" in caplog.text
    assert "DICOMDIR, notes; images end with" in caplog.text
