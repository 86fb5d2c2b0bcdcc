"""Image files of every kind that a user's folder may hold, written by tests."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def ramp(low: float, high: float, dtype: str, size: int = 16) -> np.ndarray:
    """A gray image that rises from left to right, [size, size]."""
    return np.tile(np.linspace(low, high, size), (size, 1)).astype(dtype)


def save_array(path: Path, pixels: np.ndarray, kind: str | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, kind, **options)
    return path


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def write_two_classes(folder: Path) -> Path:
    """Sixty gray images of noise and of two sizes, in two folders."""
    for number in range(60):
        pixels = np.random.default_rng(number).integers(0, 256, (8 + number % 2, 9), dtype=np.uint8)
        save_array(folder / "ab"[number // 2 % 2] / f"{number:02}.png", pixels)
    return folder


def table_rows(page: str, heading: str) -> list[str]:
    """The first column of the table under a heading of a page in docs/."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    lines = text.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    return rows[2:]


def tiff(rows: bytes, photometric: int, bits: int, order: str = "<", **tags: list[int]) -> bytes:
    """A TIFF of 4 x 4 pixels as they stand in a file of the byte order; `tags` by number, as t338."""
    content = bytearray(rows)
    entries = {256: [4], 257: [4], 258: [bits], 259: [1], 262: [photometric], 273: [8], 278: [4], 279: [len(rows)]}
    entries |= {int(name[1:]): values for name, values in tags.items()}
    samples = entries.setdefault(277, [1])[0]
    entries[258] *= samples
    if entries.get(284) == [2]:
        entries[273] = [8 + plane * len(rows) // samples for plane in range(samples)]
        entries[279] = [len(rows) // samples] * samples
    written = []
    for tag, values in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}H", *values)
        if len(packed) > 4:
            packed, content = struct.pack(f"{order}I", 8 + len(content)), content + packed
        written.append(struct.pack(f"{order}HHI", tag, 3, len(values)) + packed.ljust(4, b"\0"))
    start = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(f"{order}H", len(written)) + b"".join(written) + bytes(4)
    return start + struct.pack(f"{order}I", 8 + len(content)) + bytes(content) + directory
