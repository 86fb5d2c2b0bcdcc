"""Every kind of image file: what is read of it, or the reason why it is not; what the values of a TIFF mean."""

import io
import logging
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.image_files import image_kind, read_pixels, stored_values
from fedssl.data.image_kinds import BrokenImageError
from fedssl.data.options import DataOptions
from fedssl.data.summary import summarise
from fedssl.errors import UserError
from tests.fedssl.data.data_files import write_image
from tests.fedssl.data.image_samples import encoded, ramp, table_rows, tiff

RED, BLUE = (254, 0, 0), (0, 0, 254)
# their left and right halves have one colour each
GRAY = Image.fromarray(np.tile(np.array([40, 200], "u1").repeat(8), (16, 1)))
COLOUR = Image.fromarray(np.tile(np.array([RED, BLUE], "u1").repeat(8, 0), (16, 1, 1)))


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
    column, row = corner
    for kind in ("PNG", "JPEG"):
        content = encoded(COLOUR, kind, exif=exif_of(orientation))
        pixels = load_with(tmp_path / kind, f"1.{kind}", content).train_images[1]
        assert pixels[0, row, column] > 200 > pixels[2, row, column]


RATIONAL, TEXT = b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x02"  # the type of the entry 282


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("damaged", "turned"),
    [
        pytest.param(exif_of(6).replace(RATIONAL, TEXT), True, id="another entry"),
        pytest.param(exif_of(6).replace(b"MM", b"??"), False, id="byte order"),
        pytest.param(exif_of(6)[:12], False, id="cut"),
        pytest.param(exif_of(6).replace(b"\0\x08\0\x02", b"\0\x08\0\x09"), True, id="too many entries"),
        pytest.param(exif_of(9), False, id="orientation 9"),
        pytest.param(exif_of(0), False, id="orientation 0"),
    ],
)
def test_a_damaged_exif_breaks_no_picture(tmp_path, recwarn, kind, damaged, turned):
    content = encoded(COLOUR, kind, exif=damaged, icc_profile=b"no profile")
    image = load_with(tmp_path, f"1.{kind}", content).train_images[1]
    column, row = (5, 2) if turned else (2, 5)
    assert image[0, row, column] > 200 > image[2, row, column]
    assert summarise({"name": "folder", "path": str(tmp_path)}).images == 2
    assert not recwarn.list


def test_a_bitmap_of_16_bits_a_pixel_has_no_deep_colours(tmp_path):
    """Five bits of red, six of green, five of blue."""
    masks = (0xF800, 0x07E0, 0x001F)
    pixels = np.tile(np.array([0xF800, 0x001F], "<u2").repeat(8), 16).tobytes()
    header = struct.pack("<IiiHHIIiiII3I", 40, 16, 16, 1, 16, 3, len(pixels), 0, 0, 0, 0, *masks)
    content = b"BM" + struct.pack("<IHHI", 66 + len(pixels), 0, 0, 66) + header + pixels
    image = load_with(tmp_path, "1.bmp", content).train_images[1]
    assert image[:, 5, [2, 13]].T.tolist() == [[255, 0, 0], [0, 0, 255]]


@pytest.mark.parametrize("most", [1000, 4095, 65535])
@pytest.mark.parametrize("plain", [False, True])
def test_deep_gray_of_a_pixmap_has_the_values_of_the_file(tmp_path, most, plain):
    values = ramp(0, most, ">u2")
    content = " ".join(map(str, values.ravel())).encode() if plain else values.tobytes()
    (tmp_path / "a.pgm").write_bytes(f"P{2 if plain else 5} 16 16 {most}\n".encode() + content)
    assert np.array_equal(stored_values(tmp_path / "a.pgm")[:, 0], values.ravel())
    wanted = np.rint(values / most * 255)
    for window in ("full", (0, most)):
        assert np.array_equal(read_pixels(tmp_path / "a.pgm", 16, 16, 1, window)[0], wanted)


def bomb_png(side: int = 30_000) -> bytes:
    """A few bytes that announce 900 million pixels."""
    content = encoded(Image.new("L", (1, 1)), "PNG")
    header = b"IHDR" + struct.pack(">II", side, side) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


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


def test_a_split_without_a_readable_file_is_refused(tmp_path):
    write_image(tmp_path / "test" / "a" / "0.png", 1)
    write_image(tmp_path / "train" / "a" / "0.png", 1)
    (tmp_path / "test" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the test images in .* can be read"):
        load_dataset(DataOptions(name="folder", path=tmp_path, broken="skip"), 0)
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 2 files .* no image is left"):
        load_dataset(DataOptions(name="folder", path=tmp_path), 0)


def test_several_images_in_one_file_are_told(tmp_path, caplog):
    frames = encoded(COLOUR, "GIF", save_all=True, append_images=[COLOUR.rotate(90)])
    image = load_with(tmp_path, "1.gif", frames).train_images[1]
    assert image[:, 5, 2].tolist() == list(RED)
    assert "1 file holds several images, of which the first is used" in caplog.text


# TIFFs: the rows of a table in docs/image_files.md

WHITE, BLACK = 0, 1
RISING = np.array([0, 85, 170, 255])
WIDE = RISING * (2**32 - 1) // 255
FOUR = np.array([[254, 0, 0], [0, 254, 0], [0, 0, 254], [10, 20, 30]])
HALF = FOUR // 2
ALL_RED = np.array([RED] * 4)
ONE_BIT = b"\x10" * 4  # 0 0 0 1
SIGNED, FLOAT = {"t339": [2]}, {"t339": [3]}
RGB, RGBA, LA, PLANES = {"t277": [3]}, {"t277": [4]}, {"t277": [2]}, {"t284": [2]}
ASSOCIATED, UNASSOCIATED = {"t338": [1]}, {"t338": [2]}
PALETTE = {"t320": (FOUR.T * 257).ravel().tolist()}


def rows(values: Any, dtype: str) -> bytes:
    return np.tile(np.asarray(values).astype(dtype), (4, 1)).tobytes()


def of(values: Any, dtype: str, photometric: int, **tags: list[int]) -> bytes:
    """A TIFF whose lines are all alike; of colours [4, C], a plane a colour with the tags PLANES."""
    parts = np.asarray(values).T if tags.get("t284") == [2] else [values]
    content = b"".join(rows(part, dtype) for part in parts)
    return tiff(content, photometric, 8 * np.dtype(dtype).itemsize, ">" if dtype[0] == ">" else "<", **tags)


def compressed() -> bytes:
    rising = Image.fromarray(np.tile(RISING * 257, (4, 1)).astype("u2"))
    return encoded(rising, "TIFF", compression="tiff_lzw", tiffinfo={262: WHITE})


def with_alpha(values: np.ndarray, alpha: int) -> np.ndarray:
    return np.concatenate([values.reshape(4, -1), np.full((4, 1), alpha)], 1)


# a row's name: the file, the window, what one line of pixels is; None where the file is refused
CASES: dict[str, tuple[bytes, Any, np.ndarray | None]] = {
    "zero is white (0), 1 bit": (tiff(ONE_BIT, WHITE, 1), None, np.array([255, 255, 255, 0])),
    "zero is white (0), 4 bits": (tiff(b"\x05\xaf" * 4, WHITE, 4), None, 255 - RISING),
    "zero is white (0), 8 bits": (of(RISING, "u1", WHITE), None, 255 - RISING),
    "zero is white (0), 16 bits": (of(RISING * 257, "<u2", WHITE), "full", 255 - RISING),
    "zero is white (0), 16 bits, compressed": (compressed(), "full", 255 - RISING),
    "zero is white (0), 32-bit floats": (of(RISING / 255, "<f4", WHITE, **FLOAT), (0, 1), 255 - RISING),
    "zero is white (0), 16 bits, big-endian": (of(RISING * 257, ">u2", WHITE), "full", 255 - RISING),
    "zero is black (1), 1 bit": (tiff(ONE_BIT, BLACK, 1), None, np.array([0, 0, 0, 255])),
    "zero is black (1), 2 bits": (tiff(b"\x1b" * 4, BLACK, 2), None, RISING),
    "zero is black (1), 4 bits": (tiff(b"\x05\xaf" * 4, BLACK, 4), None, RISING),
    "zero is black (1), 8 bits": (of(RISING, "u1", BLACK), None, RISING),
    "zero is black (1), 8 bits, signed": (of(RISING - 128, "i1", BLACK, **SIGNED), "full", RISING),
    "zero is black (1), 12 bits": (tiff(bytes.fromhex("000555aaafff") * 4, BLACK, 12), "full", RISING),
    "zero is black (1), 16 bits": (of(RISING * 257, "<u2", BLACK), "full", RISING),
    "zero is black (1), 16 bits, big-endian": (of(RISING * 257, ">u2", BLACK), "full", RISING),
    "zero is black (1), 16 bits, signed": (of(RISING * 257 - 2**15, "<i2", BLACK, **SIGNED), "full", RISING),
    "zero is black (1), 32 bits": (of(WIDE, "<u4", BLACK), "full", RISING),
    "zero is black (1), 32 bits, signed": (of(WIDE - 2**31, "<i4", BLACK, **SIGNED), "full", RISING),
    "zero is black (1), 32-bit floats": (of(RISING / 255, "<f4", BLACK, **FLOAT), (0, 1), RISING),
    "zero is black (1), 16-bit floats": (of(RISING / 255, "<f2", BLACK, **FLOAT), (0, 1), RISING),
    "zero is black (1), 64-bit floats": (of(RISING / 255, "<f8", BLACK, **FLOAT), (0, 1), RISING),
    "gray with alpha": (of(with_alpha(RISING, 9), "u1", BLACK, **LA, **UNASSOCIATED), None, RISING),
    "gray with associated alpha": (of(with_alpha(RISING // 5, 51), "u1", BLACK, **LA, **ASSOCIATED), None, RISING),
    "RGB (2), 8 bits": (of(FOUR, "u1", 2, **RGB), None, FOUR),
    "RGB (2), 8 bits, a plane a colour": (of(FOUR, "u1", 2, **RGB, **PLANES), None, FOUR),
    "RGB (2) with alpha": (of(with_alpha(FOUR, 9), "u1", 2, **RGBA, **UNASSOCIATED), None, FOUR),
    "RGB (2) with associated alpha": (
        of(with_alpha(HALF, 127), "u1", 2, **RGBA, **ASSOCIATED),
        None,
        HALF * 255 // 127,
    ),
    "RGB (2), 16 bits": (of(FOUR * 257, "<u2", 2, **RGB), "full", FOUR),
    "RGB (2), 16 bits, a plane a colour": (of(FOUR * 257, "<u2", 2, **RGB, **PLANES), "full", FOUR),
    "palette (3), 2 bits": (tiff(b"\x1b" * 4, 3, 2, **PALETTE), None, FOUR),
    "mask (4), 1 bit": (tiff(ONE_BIT, 4, 1), None, None),
    "CMYK (5), 8 bits": (of(255 - with_alpha(FOUR, 255), "u1", 5, **RGBA), None, FOUR),
    "CMYK (5), 16 bits": (of(65535 - with_alpha(FOUR, 255) * 257, "<u2", 5, **RGBA), None, FOUR),
    "YCbCr (6), 8 bits": (of([[76, 85, 255]] * 4, "u1", 6, **RGB, t530=[1, 1]), None, ALL_RED),
    "CIELab (8), 8 bits": (of([[138, 81, 70]] * 4, "u1", 8, **RGB), None, ALL_RED),
    "ICCLab (9), a colour filter (32803)": (of(FOUR, "u1", 9, **RGB), None, None),
}


def test_the_table_has_these_rows():
    assert table_rows("image_files.md", "TIFF") == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table(tmp_path, name):
    content, window, expected = CASES[name]
    file = tmp_path / "a.tif"
    file.write_bytes(content)
    if expected is None:
        with pytest.raises(
            BrokenImageError, match=r"photometric interpretation \d, which are not read; store gray or RGB"
        ):
            image_kind(file)
        return
    kind = image_kind(file)
    assert (not kind.deep) == (window is None)
    pixels = read_pixels(file, 4, 4, 1 if kind.channels == 1 else 3, window).astype(int)
    wanted = expected.reshape(4, 1, -1).T  # the same in each line
    assert np.abs(pixels - wanted).max() <= (6 if "CIELab" in name else 0)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("orientation", "wanted"), [(3, [255, 170]), (6, [0, 0]), (8, [255, 255])])
def test_a_tiff_is_turned_upright_once(tmp_path, bits, orientation, wanted):
    """Half as high as wide, so that an image that is turned before its rows are known is another one."""
    content = rows(RISING * (257 if bits == 16 else 1), f"<u{bits // 8}")[:bits]
    (tmp_path / "a.tif").write_bytes(tiff(content, BLACK, bits, t274=[orientation], t257=[2], t278=[2]))
    assert image_kind(tmp_path / "a.tif").size == (4, 2)
    sides = (2, 4) if orientation == 3 else (4, 2)
    pixels = read_pixels(tmp_path / "a.tif", *sides, 1, None if bits == 8 else "full")
    assert pixels[0, 0, :2].tolist() == wanted


NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def tiff_of(pixels: np.ndarray, **options: Any) -> bytes:
    content = io.BytesIO()
    tifffile.imwrite(content, pixels, **options)
    return content.getvalue()


@pytest.mark.parametrize(
    ("dtype", "options", "lost"),
    [
        *(("u1", {"compression": kind}, 0) for kind in ("lzw", "deflate", "zstd", "lzma", "packbits")),
        *(("u1", {"compression": kind}, 4) for kind in ("jpeg", "webp")),
        *((dtype, {"compression": "jpeg2000"}, 0) for dtype in ("u1", "u2")),
        *(("f4", {"compression": "deflate", "predictor": predictor}, 0) for predictor in (None, 3)),
        *((dtype, {"compression": "lzw", "predictor": 3}, 0) for dtype in ("f2", "f8")),
        *(("u1", {"bigtiff": True, "byteorder": order}, 0) for order in "<>"),
        *(("u2", {"compression": "lzw", "planarconfig": "separate", "byteorder": order}, 0) for order in "<>"),
    ],
)
def test_compressions_of_a_tiff(tmp_path, dtype, options, lost):
    """Values of smooth colours and their types; `lost` is of 255."""
    smooth = np.stack([ramp(0, 255, "u1", 64), ramp(0, 255, "u1", 64).T, np.full((64, 64), 90, "u1")], 2)
    most = {"u1": 255, "u2": 65535}.get(dtype, 1)
    values = (smooth.astype(float) * most / 255).astype(dtype)
    planes = values.transpose(2, 0, 1) if "planarconfig" in options else values
    file = tmp_path / "a.tif"
    file.write_bytes(tiff_of(planes, photometric="rgb", **options))
    window = None if dtype == "u1" else (0.0, float(most))
    assert image_kind(file).deep == (window is not None)
    assert np.abs(read_pixels(file, 64, 64, 3, window).transpose(1, 2, 0).astype(int) - smooth).max() <= lost
    if lost == 0 and window is not None:
        assert np.array_equal(stored_values(file), values.reshape(-1, 3))


@pytest.mark.parametrize(
    "options", [{"imagej": True, "truncate": True}, {"truncate": True}, {"ome": True}, {"imagej": True}, {}]
)
def test_a_stack_is_read_by_channel_also_behind_one_directory(tmp_path, caplog, options):
    stack = np.random.default_rng(0).integers(0, 60_000, (3, 8, 9), dtype=np.uint16)
    file = tmp_path / "a.tif"
    file.write_bytes(tiff_of(stack, photometric="minisblack", **options))
    assert (image_kind(file, 3).channels, image_kind(file, 3).frames) == (3, 1)
    assert np.array_equal(stored_values(file, 3), stack.reshape(3, -1).T)
    assert (image_kind(file).channels, image_kind(file).frames) == (1, 3)
    assert np.array_equal(stored_values(file)[:, 0], stack[0].ravel())
    with pytest.raises(BrokenImageError, match="1 channels, expected 4"):
        read_pixels(file, 8, 9, 4, "full")
    load_dataset(DataOptions(name="images", path=tmp_path, window="full", image_size=8), 0)
    assert "1 file holds several images, of which the first is used" in caplog.text


def test_the_largest_level_of_a_pyramid_that_is_not_too_large(tmp_path, monkeypatch):
    file = tmp_path / "a.tif"
    with tifffile.TiffWriter(file) as writer:
        writer.write(NOISE, subifds=1, photometric="rgb")
        writer.write(NOISE[::2, ::2], subfiletype=1, photometric="rgb")
    assert np.array_equal(stored_values(file), NOISE.reshape(-1, 3))
    monkeypatch.setattr("fedssl.data.tiff_files.MOST_PIXELS", 100)
    assert image_kind(file).size == (8, 8)
    assert np.array_equal(stored_values(file), NOISE[::2, ::2].reshape(-1, 3))


@pytest.mark.parametrize(("channels", "alpha"), [(1, False), (3, False), (3, True), (1, True)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_all_bits_of_a_deep_png(tmp_path, channels, alpha, orientation):
    values = np.random.default_rng(0).integers(0, 65536, (8, 8, channels + alpha), dtype=np.uint16)
    content = imagecodecs.png_encode(values)
    exif = exif_of(orientation).removeprefix(b"Exif\0\0")
    chunk = b"eXIf" + exif
    content = content[:33] + struct.pack(">I", len(exif)) + chunk + struct.pack(">I", zlib.crc32(chunk)) + content[33:]
    (tmp_path / "a.png").write_bytes(content)
    turned = np.rot90(values[:, :, :channels], {1: 0, 3: 2, 6: -1, 8: 1}[orientation])
    kind = image_kind(tmp_path / "a.png")
    assert (kind.deep, kind.channels, kind.alpha) == (True, channels, alpha)
    assert np.array_equal(stored_values(tmp_path / "a.png"), turned.reshape(-1, channels))
    pixels = read_pixels(tmp_path / "a.png", 8, 8, channels, (1000.0, 1255.0)).transpose(1, 2, 0)
    assert np.array_equal(pixels, np.clip(turned.astype(int) - 1000, 0, 255))


def test_transparency_that_is_left_out_is_told_once(tmp_path, caplog):
    for name, kind in (("a.png", "PNG"), ("b.tif", "TIFF"), ("c.png", "PNG")):
        (tmp_path / name).write_bytes(encoded(COLOUR.convert("RGB" if name == "c.png" else "RGBA"), kind))
    load_dataset(DataOptions(name="images", path=tmp_path, image_size=16), 0)
    assert f"transparency is left out of 2 of 3 images: {tmp_path}/a.png, {tmp_path}/b.tif" in caplog.text


def directory(entries: dict[int, int | tuple[int, int, int]], after: bytes = bytes(99)) -> bytes:
    """A TIFF of one directory as no program writes it: tags by value or by type, count and value, then what follows."""
    usual = {256: 64, 257: 64, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 64, 279: 99}
    written = {tag: entry if isinstance(entry, tuple) else (4, 1, entry) for tag, entry in (usual | entries).items()}
    packed = b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(written.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(written)) + packed + bytes(4) + after


def holding(compression: int, content: bytes) -> bytes:
    return directory({259: compression, 273: 122, 279: len(content)}, content)


def jpeg_2000_of(side: int) -> bytes:
    """The header of a JPEG 2000 alone."""
    sizes = struct.pack(">8IH", side, side, 0, 0, side, side, 0, 0, 1) + b"\7\1\1"
    return b"\xff\x4f\xff\x51" + struct.pack(">HH", 41, 0) + sizes + bytes(99)


def empty_directories(count: int) -> bytes:
    """A TIFF of directories without tags; what is added is the place of one more."""
    return b"II*\0" + b"".join(struct.pack("<IH", 8 + 6 * number, 0) for number in range(count))


LONG = 2**31 - 16
HOSTILE = {
    "huge": (directory({256: LONG, 257: LONG}), "2147483632 x 2147483632 pixels, more than"),
    "empty": (directory({256: 0, 257: 0}), "0 x 0 pixels"),
    "many samples": (directory({277: (3, 1, 65535)}), "65535 channels, expected 1 to 32"),
    "deep": (directory({32997: 2**30}), "pixels, more than"),
    "huge tiles": (directory({322: LONG, 323: LONG, 324: 8, 325: 9}), "tiles of 2147"),
    "many tiles": (directory({322: 16, 323: 16, 324: (4, 2**31, 8), 325: (4, 2**31, 8)}), "damaged TIFF"),
    "too few tiles": (directory({322: 16, 323: 16, 324: 8, 325: 9}), "damaged TIFF"),
    "values beyond the end": (directory({273: LONG}), "the file is cut"),
    "longer than the file": (directory({279: 2**32 - 1}), "the file is cut"),
    "enormous count of strips": (directory({273: (4, 2**32 - 1, 8)}), "damaged TIFF"),
    "directory beyond the end": (b"II*\0" + struct.pack("<I", LONG) + bytes(99), "damaged TIFF"),
    "enormous count of tags": (b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**62) + bytes(99), "damaged TIFF"),
    "directories in a circle": (empty_directories(200) + struct.pack("<I", 8 + 6 * 150), "lead in a circle"),
    "many directories": (empty_directories(30_000), "more than 20,000"),
    "no palette": (directory({262: (3, 1, 3)}), "damaged TIFF|file is cut"),
    "cut": (tiff_of(NOISE, compression="lzw", photometric="rgb")[:-99], "the file is cut"),
    "garbage": (holding(5, b"\xff" * 99), "damaged TIFF"),
    "zlib bomb": (holding(8, zlib.compress(bytes(2**27))), "damaged TIFF"),
    "JPEG bomb": (holding(7, imagecodecs.jpeg8_encode(np.zeros((12_000, 8_000), "u1"))), "8000 x 12000 pixels"),
    "JPEG 2000 bomb": (holding(34712, jpeg_2000_of(30_000)), "30000 x 30000 pixels"),
    # damaged JPEG XR ends the process, LERC may ask for terabytes, and of JPEG XL the size is not known before
    **{
        name: (tiff_of(NOISE, compression=name.lower()), f"compressed as {name}, which is not read")
        for name in ("JPEGXR", "LERC", "PNG", "JPEGXL")
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tiffs_are_refused_in_little_memory(tmp_path, name):
    content, says = HOSTILE[name]
    (tmp_path / "a.tif").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"a\.tif cannot be read as an image \(.*({says})"):
            load_dataset(DataOptions(name="images", path=tmp_path, image_size=8), 0)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_part_of_a_tiff_that_points_at_its_own_directory_ends(tmp_path):
    (tmp_path / "a.tif").write_bytes(directory({330: (4, 1, 8)}))
    assert image_kind(tmp_path / "a.tif").size == (64, 64)


def test_a_tiff_reads_no_other_file(tmp_path):
    """OME's header may name files: of another TIFF only what is in it is read."""
    stack = np.arange(2 * 8 * 8, dtype=np.uint16).reshape(2, 8, 8)
    (tmp_path / "b.tif").write_bytes(tiff_of(stack, ome=True, photometric="minisblack"))
    names = b'<TiffData IFD="0" PlaneCount="2"><UUID FileName="b.tif">urn:uuid:1</UUID></TiffData>'
    header = (tmp_path / "b.tif").read_bytes()
    text = header[header.index(b"<?xml") : header.index(b"</OME>") + 6].decode()
    named = text.replace('<TiffData IFD="0" PlaneCount="2"/>', names.decode())
    (tmp_path / "a.tif").write_bytes(tiff_of(stack[0] * 0, metadata=None, description=named, photometric="minisblack"))
    assert not stored_values(tmp_path / "a.tif").any()
    assert not (image_kind(tmp_path / "a.tif", 2).channels == 2 and stored_values(tmp_path / "a.tif", 2).any())
