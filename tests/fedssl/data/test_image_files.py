"""Every kind of image file: what is read of it, or the reason why it is not; what the values of a TIFF mean."""

import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.image_files import image_kind, read_pixels
from fedssl.data.image_kinds import BrokenImageError
from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from tests.fedssl.data.data_files import write_image
from tests.fedssl.data.image_samples import bomb_png, encoded, halves, ramp, table_rows, tiff

RED, BLUE = (254, 0, 0), (0, 0, 254)
GRAY = halves(40, 200, "L")
COLOUR = halves(RED, BLUE, "RGB")


def load_with(folder: Path, name: str, content: bytes, gray: bool = False, **options: object) -> Dataset:
    """A dataset whose second training image is a file of that content; the others are plain."""
    for split in ("train", "test"):
        write_image(folder / split / "a" / "0.png", 90, "L" if gray else "RGB")
    (folder / "train" / "a" / name).write_bytes(content)
    return load_dataset(DataOptions(name="folder", path=folder, image_size=16, **options), 0)


@pytest.mark.parametrize(
    ("name", "content", "lost"),
    [
        ("1.png", encoded(COLOUR, "PNG"), 0),
        ("1.webp", encoded(COLOUR, "WEBP", lossless=True), 0),
        ("1.bmp", encoded(COLOUR, "BMP"), 0),
        ("1.tif", encoded(COLOUR, "TIFF"), 0),
        ("1.TIFF", encoded(COLOUR, "TIFF", compression="tiff_lzw"), 0),
        ("1.ppm", encoded(COLOUR, "PPM"), 0),
        ("1.gif", encoded(COLOUR, "GIF"), 0),
        ("1.jpg", encoded(COLOUR, "PNG"), 0),  # the content decides, not the name
        ("palette.png", encoded(COLOUR.quantize(4), "PNG"), 0),
        ("alpha.png", encoded(COLOUR.convert("RGBA"), "PNG"), 0),
        ("transparent.png", encoded(Image.merge("RGBA", (*COLOUR.split(), Image.new("L", (16, 16)))), "PNG"), 0),
        ("cmyk.tif", encoded(COLOUR.convert("CMYK"), "TIFF"), 0),
        ("1.jpeg", encoded(COLOUR, "JPEG", quality=98, subsampling=0), 8),
        ("1.jfif", encoded(COLOUR, "JPEG", quality=98, subsampling=0), 8),
        ("cmyk.jpg", encoded(COLOUR.convert("CMYK"), "JPEG", quality=98), 8),
        ("gray.png", encoded(GRAY, "PNG"), 0),
        ("gray_alpha.png", encoded(GRAY.convert("LA"), "PNG"), 0),
        ("gray.pgm", encoded(GRAY, "PPM"), 0),
    ],
)
def test_kinds_that_are_read_and_gray_ones_have_one_channel(tmp_path, name, content, lost):
    gray = name.startswith("gray")
    image = load_with(tmp_path, name, content, gray).train_images[1].int()
    for column, colour in ((2, (40,) if gray else RED), (13, (200,) if gray else BLUE)):
        assert image.shape == (len(colour), 16, 16)
        assert (image[:, 5, column] - image.new_tensor(colour)).abs().max() <= lost


def exif_of(orientation: int) -> bytes:
    entries = Image.Exif()
    entries[274], entries[282] = orientation, 72.5
    return entries.tobytes()


@pytest.mark.parametrize(("orientation", "corner"), [(1, (2, 5)), (3, (13, 5)), (6, (5, 2)), (8, (5, 13))])
def test_photos_are_turned_upright(tmp_path, orientation, corner):
    """The left half is red as the file is stored; the camera's entry says where that half belongs."""
    entry = exif_of(orientation)
    column, row = corner
    for kind in ("PNG", "JPEG"):
        pixels = load_with(tmp_path / kind, f"1.{kind}", encoded(COLOUR, kind, exif=entry)).train_images[1]
        assert pixels[0, row, column] > 200 > pixels[2, row, column]
    deep = encoded(Image.fromarray(ramp(0, 255, "u2")), "PNG", exif=entry)
    pixels = load_with(tmp_path / "deep", "1.png", deep, gray=True, window=(0, 255)).train_images[1, 0]
    assert pixels[row, column] < 80


RATIONAL, TEXT = b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x02"  # the type of the entry 282


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("damaged", "turned"),
    [
        pytest.param(exif_of(6).replace(RATIONAL, TEXT), True, id="another entry"),
        pytest.param(exif_of(6).replace(b"MM", b"??"), False, id="byte order"),
        pytest.param(exif_of(6)[:12], False, id="cut"),
        pytest.param(exif_of(9), False, id="orientation 9"),
        pytest.param(exif_of(0), False, id="orientation 0"),
    ],
)
def test_a_damaged_exif_breaks_no_picture(tmp_path, kind, damaged, turned):
    content = encoded(COLOUR, kind, exif=damaged, icc_profile=b"no profile")
    image = load_with(tmp_path, f"1.{kind}", content).train_images[1]
    column, row = (5, 2) if turned else (2, 5)
    assert image[0, row, column] > 200 > image[2, row, column]


def test_a_bitmap_of_16_bits_a_pixel_has_no_deep_colours(tmp_path):
    """Five bits of red, six of green, five of blue."""
    masks = (0xF800, 0x07E0, 0x001F)
    pixels = np.tile(np.array([0xF800, 0x001F], "<u2").repeat(8), 16).tobytes()
    header = struct.pack("<IiiHHIIiiII3I", 40, 16, 16, 1, 16, 3, len(pixels), 0, 0, 0, 0, *masks)
    content = b"BM" + struct.pack("<IHHI", 66 + len(pixels), 0, 0, 66) + header + pixels
    image = load_with(tmp_path, "1.bmp", content).train_images[1]
    assert image[:, 5, [2, 13]].T.tolist() == [[255, 0, 0], [0, 0, 255]]


BROKEN = [
    pytest.param("1.png", b"", "the file is empty", id="empty"),
    pytest.param("1.png", b"not an image", "not an image of a known format", id="text"),
    pytest.param("1.jpg", encoded(Image.effect_noise((64, 64), 90), "JPEG")[:2000], "truncated", id="truncated JPEG"),
    pytest.param("1.jpg", encoded(COLOUR, "JPEG")[:400], "Truncated", id="cut JPEG header"),
    pytest.param("1.png", encoded(COLOUR, "PNG")[:20], "Truncated|truncated|not an image", id="cut PNG header"),
    pytest.param("1.tif", encoded(COLOUR, "TIFF")[:60], ".", id="truncated TIFF"),
    pytest.param("1.webp", encoded(COLOUR, "WEBP")[:40], ".", id="truncated WebP"),
    pytest.param("1.gif", encoded(COLOUR, "GIF")[:30], ".", id="truncated GIF"),
    pytest.param("1.png", bomb_png(), r"30000 x 30000 pixels, more than|decompression bomb", id="bomb"),
    pytest.param("1.png", bomb_png(10_000), r"10000 x 10000 pixels, more than", id="small bomb"),
    pytest.param("1.png", encoded(Image.new("RGB", (90, 1)), "PNG"), "90 x 1 pixels, expected at least 2", id="line"),
    pytest.param("1.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known format", id="PostScript"),
    pytest.param("1.tif", encoded(Image.fromarray(np.full((8, 8), np.nan, "f4")), "TIFF"), "NaN or infinite", id="NaN"),
]


@pytest.mark.parametrize(("name", "content", "reason"), BROKEN)
def test_broken_files_are_named_or_skipped(tmp_path, caplog, name, content, reason):
    says = rf"train/a/{name} cannot be read as an image \(.*({reason}).*data\.broken=skip"
    with pytest.raises(UserError, match=says):
        load_with(tmp_path, name, content, window=(0, 255))
    with caplog.at_level(logging.WARNING):
        images = load_with(tmp_path, name, content, window=(0, 255), broken="skip").train_images
    assert images[:, 0, 5, 5].tolist() == [90]
    assert f"train/a/{name} cannot be read as an image" in caplog.text
    assert "skipped" in caplog.text


def test_all_broken_files_are_counted(tmp_path):
    for number in range(9):
        write_image(tmp_path / "train" / "a" / f"{number}.png", 90)
        (tmp_path / "train" / "a" / f"{number}x.png").write_bytes(b"x" * number)
    says = r"^9 of 19 files cannot be read as images: .*/0x\.png \(the file is empty\), .*4x"
    with pytest.raises(UserError, match=says):
        load_with(tmp_path, "0x.png", b"")


def test_a_split_without_a_readable_file_is_refused(tmp_path):
    write_image(tmp_path / "test" / "a" / "0.png", 1)
    write_image(tmp_path / "train" / "a" / "0.png", 1)
    (tmp_path / "test" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the test images in .* can be read"):
        load_dataset(DataOptions(name="folder", path=tmp_path, broken="skip"), 0)
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 2 files .* no image is left"):
        load_dataset(DataOptions(name="folder", path=tmp_path, broken="skip"), 0)


def test_several_images_in_one_file_are_told(tmp_path, caplog):
    frames = encoded(COLOUR, "GIF", save_all=True, append_images=[COLOUR.rotate(90)])
    image = load_with(tmp_path, "1.gif", frames).train_images[1]
    assert image[:, 5, 2].tolist() == list(RED)
    assert "1 file holds several images, of which the first is used" in caplog.text


# TIFFs: the rows of a table in docs/image_files.md

WHITE, BLACK = 0, 1
RISING = np.array([0, 85, 170, 255])
FOUR = np.array([[254, 0, 0], [0, 254, 0], [0, 0, 254], [10, 20, 30]])
ALL_RED = np.array([RED] * 4)
ONE_BIT = b"\x10" * 4  # 0 0 0 1
SIGNED, FLOAT = {"t339": [2]}, {"t339": [3]}
RGB, RGBA, GRAY_ALPHA, PLANES = {"t277": [3]}, {"t277": [4]}, {"t277": [2]}, {"t284": [2]}
ASSOCIATED, UNASSOCIATED = {"t338": [1]}, {"t338": [2]}
PALETTE = {"t320": (FOUR.T * 257).ravel().tolist()}


def rows(values: Any, dtype: str) -> bytes:
    return np.tile(np.asarray(values).astype(dtype), (4, 1)).tobytes()


def planes(colours: np.ndarray, dtype: str) -> bytes:
    return b"".join(rows(channel, dtype) for channel in colours.T)


def compressed() -> bytes:
    rising = Image.fromarray(np.tile(RISING * 257, (4, 1)).astype("u2"))
    return encoded(rising, "TIFF", compression="tiff_lzw", tiffinfo={262: WHITE})


def with_alpha(values: np.ndarray, alpha: int) -> np.ndarray:
    return np.concatenate([values, np.full((4, 1), alpha)], 1)


# a row's name: the file, the window, what one line of pixels is; None where the file is refused
CASES: dict[str, tuple[bytes, Any, np.ndarray | None]] = {
    "zero is white (0), 1 bit": (tiff(ONE_BIT, WHITE, 1), None, np.array([255, 255, 255, 0])),
    "zero is white (0), 4 bits": (tiff(b"\x05\xaf" * 4, WHITE, 4), None, 255 - RISING),
    "zero is white (0), 8 bits": (tiff(rows(RISING, "u1"), WHITE, 8), None, 255 - RISING),
    "zero is white (0), 16 bits": (tiff(rows(RISING * 257, "<u2"), WHITE, 16), "full", 255 - RISING),
    "zero is white (0), 16 bits, compressed": (compressed(), "full", 255 - RISING),
    "zero is white (0), 32-bit floats": (tiff(rows(RISING / 255, "<f4"), WHITE, 32, **FLOAT), (0, 1), 255 - RISING),
    "zero is white (0), 16 bits, big-endian": (tiff(rows(RISING * 257, ">u2"), WHITE, 16, ">"), "full", None),
    "zero is black (1), 1 bit": (tiff(ONE_BIT, BLACK, 1), None, np.array([0, 0, 0, 255])),
    "zero is black (1), 2 bits": (tiff(b"\x1b" * 4, BLACK, 2), None, RISING),
    "zero is black (1), 4 bits": (tiff(b"\x05\xaf" * 4, BLACK, 4), None, RISING),
    "zero is black (1), 8 bits": (tiff(rows(RISING, "u1"), BLACK, 8), None, RISING),
    "zero is black (1), 8 bits, signed": (tiff(rows(RISING - 128, "i1"), BLACK, 8, **SIGNED), "full", RISING),
    "zero is black (1), 12 bits": (tiff(bytes.fromhex("000555aaafff") * 4, BLACK, 12), "full", RISING),
    "zero is black (1), 16 bits": (tiff(rows(RISING * 257, "<u2"), BLACK, 16), "full", RISING),
    "zero is black (1), 16 bits, big-endian": (tiff(rows(RISING * 257, ">u2"), BLACK, 16, ">"), "full", RISING),
    "zero is black (1), 16 bits, signed": (
        *(tiff(rows(RISING * 257 - 2**15, "<i2"), BLACK, 16, **SIGNED), "full", RISING),
    ),
    "zero is black (1), 32 bits": (tiff(rows(RISING * (2**32 - 1) // 255, "<u4"), BLACK, 32), "full", RISING),
    "zero is black (1), 32 bits, signed": (
        *(tiff(rows(RISING * (2**32 - 1) // 255 - 2**31, "<i4"), BLACK, 32, **SIGNED), "full", RISING),
    ),
    "zero is black (1), 32-bit floats": (tiff(rows(RISING / 255, "<f4"), BLACK, 32, **FLOAT), (0, 1), RISING),
    "zero is black (1), 64-bit floats": (tiff(rows(RISING / 255, "<f8"), BLACK, 64, **FLOAT), (0, 1), None),
    "gray with alpha": (
        *(tiff(rows(with_alpha(RISING[:, None], 9), "u1"), BLACK, 8, **GRAY_ALPHA, **UNASSOCIATED), None, RISING),
    ),
    "gray with associated alpha": (
        *(tiff(rows(with_alpha(RISING[:, None] // 5, 51), "u1"), BLACK, 8, **GRAY_ALPHA, **ASSOCIATED), None, RISING),
    ),
    "RGB (2), 8 bits": (tiff(rows(FOUR, "u1"), 2, 8, **RGB), None, FOUR),
    "RGB (2), 8 bits, a plane a colour": (tiff(planes(FOUR, "u1"), 2, 8, **RGB, **PLANES), None, FOUR),
    "RGB (2) with alpha": (tiff(rows(with_alpha(FOUR, 9), "u1"), 2, 8, **RGBA, **UNASSOCIATED), None, FOUR),
    "RGB (2) with associated alpha": (
        *(tiff(rows(with_alpha(FOUR // 2, 127), "u1"), 2, 8, **RGBA, **ASSOCIATED), None, FOUR // 2 * 255 // 127),
    ),
    "RGB (2), 16 bits": (tiff(rows(FOUR * 257, "<u2"), 2, 16, **RGB), "full", FOUR),
    "RGB (2), 16 bits, a plane a colour": (tiff(planes(FOUR * 257, "<u2"), 2, 16, **RGB, **PLANES), "full", None),
    "palette (3), 2 bits": (tiff(b"\x1b" * 4, 3, 2, **PALETTE), None, FOUR),
    "mask (4), 1 bit": (tiff(ONE_BIT, 4, 1), None, None),
    "CMYK (5), 8 bits": (tiff(rows(255 - with_alpha(FOUR, 255), "u1"), 5, 8, **RGBA), None, FOUR),
    "CMYK (5), 16 bits": (tiff(rows(65535 - with_alpha(FOUR, 255) * 257, "<u2"), 5, 16, **RGBA), "full", FOUR),
    "YCbCr (6), 8 bits": (tiff(rows([[76, 85, 255]] * 4, "u1"), 6, 8, **RGB), None, ALL_RED),
    "CIELab (8), 8 bits": (tiff(rows([[138, 81, 70]] * 4, "u1"), 8, 8, **RGB), None, ALL_RED),
    "ICCLab (9), a colour filter (32803)": (tiff(rows(FOUR, "u1"), 9, 8, **RGB), None, None),
}


def test_the_table_has_these_rows():
    assert table_rows("image_files.md", "TIFF") == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table(tmp_path, name):
    content, window, expected = CASES[name]
    if int(PIL.__version__.split(".")[0]) < 13 and name in ("gray with associated alpha", "YCbCr (6), 8 bits"):
        expected = None
    file = tmp_path / "a.tif"
    file.write_bytes(content)
    if expected is None:
        with pytest.raises(
            BrokenImageError, match=r"of one that is not read|plane each, which are not|this Pillow mixes"
        ):
            image_kind(file)
        return
    kind = image_kind(file)
    assert (kind.deep == "no") == (window is None)
    pixels = read_pixels(file, 4, 4, 1 if kind.gray else 3, window).astype(int)
    wanted = expected.reshape(4, 1, -1).T  # the same in each line
    assert np.abs(pixels - wanted).max() <= (6 if "CIELab" in name else 0)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("orientation", "wanted"), [(3, [255, 170]), (6, [0, 0]), (8, [255, 255])])
def test_a_tiff_is_turned_upright_once(tmp_path, bits, orientation, wanted):
    """Half as high as wide, so that an image that is turned before its rows are known is another one."""
    content = rows(RISING * (257 if bits == 16 else 1), f"<u{bits // 8}")[:bits]
    (tmp_path / "a.tif").write_bytes(tiff(content, BLACK, bits, t274=[orientation], t257=[2], t278=[2]))
    width, height = image_kind(tmp_path / "a.tif").size
    assert (width, height) == ((4, 2) if orientation == 3 else (2, 4))
    pixels = read_pixels(tmp_path / "a.tif", height, width, 1, None if bits == 8 else "full")
    assert pixels[0, 0, :2].tolist() == wanted
