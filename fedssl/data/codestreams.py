"""What JPEG, JPEG-LS or JPEG 2000 data in a DICOM file or a TIFF says of itself: its header may contradict."""

from dataclasses import dataclass

_JPEG_2000_BEGINS = b"\xff\x4f\xff\x51"
_CODING_STYLE = b"\xff\x52"
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # the markers from C0 to CF that do not begin a JPEG's frame
_JPEG_LS_FRAME = 0xF7


@dataclass(frozen=True)
class Codestream:
    """The form, the size in pixels, the samples a pixel and the bits a sample of compressed data.

    `colours` is what decoding gives where the data say so, whatever a header says: RGB where JPEG 2000 stores its
    colours transformed, YBR_FULL where JPEG has Adobe's marker of it, or fewer pixels of a sample than of another.
    """

    form: str
    width: int
    height: int
    samples: int
    bits: int
    colours: str | None = None


def read_codestream(data: bytes) -> Codestream | None:
    """Read the headers of compressed data alone; None is returned for other data."""
    start = data.find(_JPEG_2000_BEGINS, 0, 2**10)  # boxes may lie before it
    if start >= 0 and len(data) > start + 42:  # ISO 15444-1, A.5.1 and A.6.1
        right, lower, left, upper = (_number(data, start + place, 4) for place in (8, 12, 16, 20))
        style = data.find(_CODING_STYLE, start + 4 + _number(data, start + 4, 2))
        colours = "RGB" if style >= 0 and data[style + 8 : style + 9] == b"\1" else None
        samples, bits = _number(data, start + 40, 2), (data[start + 42] & 127) + 1
        return Codestream("JPEG 2000", right - left, lower - upper, samples, bits, colours)
    place = 2 if data[:2] == b"\xff\xd8" else len(data)
    transformed = False
    while place + 9 < len(data) and data[place] == 0xFF:  # ISO 10918-1, B.2.2
        marker = data[place + 1]
        transformed |= data[place + 4 : place + 9] == b"Adobe" and data[place + 15 : place + 16] == b"\1"
        if marker == _JPEG_LS_FRAME or (0xC0 <= marker <= 0xCF and marker not in _NO_FRAME):
            transformed |= len({*data[place + 11 : place + 18 : 3]}) > 1
            colours = "YBR_FULL" if transformed and data[place + 9] == 3 else None
            form = "JPEG-LS" if marker == _JPEG_LS_FRAME else "JPEG"
            width, height = _number(data, place + 7, 2), _number(data, place + 5, 2)
            return Codestream(form, width, height, data[place + 9], data[place + 4], colours)
        place += 2 + _number(data, place + 2, 2) if marker != 0xFF else 1
    return None


def _number(data: bytes, place: int, size: int) -> int:
    return int.from_bytes(data[place : place + size], "big")
