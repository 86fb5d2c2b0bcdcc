"""What the values of a TIFF mean: the rows of a table in docs/image_files.md."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedssl.data.image_files import image_kind, read_pixels
from fedssl.data.image_kinds import BrokenImageError
from tests.fedssl.data.image_samples import table_rows, tiff

WHITE, BLACK = 0, 1
RISING = np.array([0, 85, 170, 255])
COLOURS = np.array([[254, 0, 0], [0, 254, 0], [0, 0, 254], [10, 20, 30]])
RED = np.array([[254, 0, 0]] * 4)
ONE_BIT = b"\x10" * 4  # 0 0 0 1
SIGNED, FLOAT = {"t339": [2]}, {"t339": [3]}
RGB, RGBA, GRAY_ALPHA, PLANES = {"t277": [3]}, {"t277": [4]}, {"t277": [2]}, {"t284": [2]}
ASSOCIATED, UNASSOCIATED = {"t338": [1]}, {"t338": [2]}
PALETTE = {"t320": (COLOURS.T * 257).ravel().tolist()}


def rows(values: Any, dtype: str) -> bytes:
    return np.tile(np.asarray(values).astype(dtype), (4, 1)).tobytes()


def compressed() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.tile(RISING * 257, (4, 1)).astype("u2")).save(
        content, "TIFF", compression="tiff_lzw", tiffinfo={262: WHITE}
    )
    return content.getvalue()


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
    "RGB (2), 8 bits": (tiff(rows(COLOURS, "u1"), 2, 8, **RGB), None, COLOURS),
    "RGB (2), 8 bits, a plane a colour": (
        tiff(b"".join(rows(COLOURS[:, channel], "u1") for channel in range(3)), 2, 8, **RGB, **PLANES),
        None,
        COLOURS,
    ),
    "RGB (2) with alpha": (*(tiff(rows(with_alpha(COLOURS, 9), "u1"), 2, 8, **RGBA, **UNASSOCIATED), None, COLOURS),),
    "RGB (2) with associated alpha": (
        *(tiff(rows(with_alpha(COLOURS // 2, 127), "u1"), 2, 8, **RGBA, **ASSOCIATED), None, COLOURS // 2 * 255 // 127),
    ),
    "RGB (2), 16 bits": (tiff(rows(COLOURS * 257, "<u2"), 2, 16, **RGB), "full", COLOURS),
    "RGB (2), 16 bits, a plane a colour": (
        tiff(b"".join(rows(COLOURS[:, channel] * 257, "<u2") for channel in range(3)), 2, 16, **RGB, **PLANES),
        "full",
        None,
    ),
    "palette (3), 2 bits": (tiff(b"\x1b" * 4, 3, 2, **PALETTE), None, COLOURS),
    "mask (4), 1 bit": (tiff(ONE_BIT, 4, 1), None, None),
    "CMYK (5), 8 bits": (tiff(rows(255 - with_alpha(COLOURS, 255), "u1"), 5, 8, **RGBA), None, COLOURS),
    "CMYK (5), 16 bits": (tiff(rows(65535 - with_alpha(COLOURS, 255) * 257, "<u2"), 5, 16, **RGBA), "full", COLOURS),
    "YCbCr (6), 8 bits": (tiff(rows([[76, 85, 255]] * 4, "u1"), 6, 8, **RGB), None, RED),
    "CIELab (8), 8 bits": (tiff(rows([[138, 81, 70]] * 4, "u1"), 8, 8, **RGB), None, RED),
    "ICCLab (9), a colour filter (32803)": (tiff(rows(COLOURS, "u1"), 9, 8, **RGB), None, None),
}


def test_the_table_has_these_rows():
    assert table_rows("image_files.md", "TIFF") == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_the_table(tmp_path, name):
    content, window, expected = CASES[name]
    (tmp_path / "a.tif").write_bytes(content)
    if expected is None:
        with pytest.raises(
            BrokenImageError, match=r"or a TIFF of one that is not read|in a plane each, which are not read"
        ):
            image_kind(tmp_path / "a.tif")
        return
    read = one_line(tmp_path / "a.tif", window)
    assert np.abs(read.reshape(expected.shape) - expected).max() <= (6 if "CIELab" in name else 0)


def one_line(file: Path, window: Any) -> np.ndarray:
    kind = image_kind(file)
    assert (kind.deep == "no") == (window is None)
    pixels = read_pixels(file, 4, 4, 1 if kind.gray else 3, window)
    assert (pixels == pixels[:, :1]).all()
    return pixels[:, 0].T.astype(int)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("orientation", "wanted"), [(3, [255, 170]), (6, [0, 0]), (8, [255, 255])])
def test_a_tiff_is_turned_upright_once(tmp_path, bits, orientation, wanted):
    """Half as high as wide, so that an image that is turned before its rows are known is another one."""
    low = tiff(
        rows(RISING * (257 if bits == 16 else 1), f"<u{bits // 8}")[:bits],
        BLACK,
        bits,
        t274=[orientation],
        t257=[2],
        t278=[2],
    )
    (tmp_path / "a.tif").write_bytes(low)
    width, height = image_kind(tmp_path / "a.tif").size
    assert (width, height) == ((4, 2) if orientation == 3 else (2, 4))
    pixels = read_pixels(tmp_path / "a.tif", height, width, 1, None if bits == 8 else "full")
    assert pixels[0, 0, :2].tolist() == wanted
