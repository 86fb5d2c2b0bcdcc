"""Every kind of image file: what is read of it, or the reason why it is not."""

import logging
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from tests.fedssl.data.data_files import write_image
from tests.fedssl.data.image_samples import bomb_png, encoded, halves, ramp

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
    ],
)
def test_kinds_that_are_read(tmp_path, name, content, lost):
    image = load_with(tmp_path, name, content).train_images[1].int()
    for column, colour in ((2, RED), (13, BLUE)):
        assert (image[:, 5, column] - image.new_tensor(colour)).abs().max() <= lost


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1.png", encoded(GRAY, "PNG")),
        ("alpha.png", encoded(GRAY.convert("LA"), "PNG")),
        ("1.pgm", encoded(GRAY, "PPM")),
        ("1.tif", encoded(GRAY, "TIFF")),
    ],
)
def test_gray_kinds_have_one_channel(tmp_path, name, content):
    images = load_with(tmp_path, name, content, gray=True).train_images
    assert images.shape == (2, 1, 16, 16)
    assert images[1, 0, 5].tolist() == [40] * 8 + [200] * 8


@pytest.mark.parametrize(("orientation", "corner"), [(1, (2, 5)), (3, (13, 5)), (6, (5, 2)), (8, (5, 13))])
def test_photos_are_turned_upright(tmp_path, orientation, corner):
    """The left half is red as the file is stored; the camera's entry says where that half belongs."""
    entry = Image.Exif()
    entry[274] = orientation
    column, row = corner
    for kind in ("PNG", "JPEG"):
        pixels = load_with(tmp_path / kind, f"1.{kind}", encoded(COLOUR, kind, exif=entry)).train_images[1]
        assert pixels[0, row, column] > 200 > pixels[2, row, column]
    deep = encoded(Image.fromarray(ramp(0, 255, "u2")), "PNG", exif=entry)
    pixels = load_with(tmp_path / "deep", "1.png", deep, gray=True, window=(0, 255)).train_images[1, 0]
    assert pixels[row, column] < 80


def exif_of(orientation: int) -> bytes:
    entries = Image.Exif()
    entries[274], entries[282] = orientation, 72.5
    return entries.tobytes()


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
    image = load_with(tmp_path, f"1.{kind.lower()}", content).train_images[1]
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
    pytest.param("1.png", encoded(Image.effect_noise((64, 64), 90), "PNG")[:2000], "truncated", id="truncated PNG"),
    pytest.param("1.jpg", encoded(COLOUR, "JPEG")[:400], "Truncated", id="cut JPEG header"),
    pytest.param("1.png", encoded(COLOUR, "PNG")[:20], "Truncated|truncated|not an image", id="cut PNG header"),
    pytest.param("1.tif", encoded(COLOUR, "TIFF")[:60], ".", id="truncated TIFF"),
    pytest.param("1.webp", encoded(COLOUR, "WEBP")[:40], ".", id="truncated WebP"),
    pytest.param("1.gif", encoded(COLOUR, "GIF")[:30], ".", id="truncated GIF"),
    pytest.param("1.bmp", encoded(COLOUR, "BMP")[:80], "truncated", id="truncated BMP"),
    pytest.param("1.png", bomb_png(), r"30000 x 30000 pixels, more than|decompression bomb", id="bomb"),
    pytest.param("1.png", bomb_png(10_000), r"10000 x 10000 pixels, more than", id="small bomb"),
    pytest.param("1.png", encoded(Image.new("RGB", (1, 1)), "PNG"), "1 x 1 pixels, expected at least 2", id="1 pixel"),
    pytest.param("1.png", encoded(Image.new("RGB", (90, 1)), "PNG"), "90 x 1 pixels", id="one line"),
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
