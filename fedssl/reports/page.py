"""HTML pages that need no network, no scripts and no other file, from the templates in `templates/`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.figure import Figure

from .plots import png_bytes


@dataclass(frozen=True)
class PageTable:
    """A table on a page; each row is as long as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    text_columns: int = 1  # how many, from the left, hold text; the others hold numbers, aligned right
    row_classes: Mapping[int, str] = field(default_factory=dict)  # CSS classes by the row's index


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page: a short description, the image as a data URI, and a caption that may be empty."""

    description: str
    source: str
    caption: str = ""


def page_figure(figure: Figure, description: str, caption: str = "", png: bool = False) -> PageFigure:
    """Return a matplotlib figure as part of a page. The same figure always gives the same bytes.

    `description` is for readers who do not see it. With `png`, for figures of many pixels, PNG replaces SVG.
    """
    if png:
        kind, content = "png", png_bytes(figure)
    else:
        data = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "fedssl"}):  # ids that are not random
            figure.savefig(data, format="svg", metadata={"Date": None})
        kind, content = "svg+xml", data.getvalue()
    return PageFigure(description, f"data:image/{kind};base64,{base64.b64encode(content).decode()}", caption)
