"""HTML pages that need no network, no scripts and no other file, from the templates in `templates/`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from .plots import png_bytes

_TEMPLATES = Environment(
    loader=PackageLoader("fedssl.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class PageTable:
    """A table on a page.

    Attributes:
        header: the columns' titles.
        rows: the cells; each row is as long as the header.
        text_columns: the number of columns, from the left, that hold text; the others are numbers, aligned right.
        row_classes: CSS classes by the row's index.
        groups: titles above the header, each with its number of columns.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    text_columns: int = 1
    row_classes: Mapping[int, str] = field(default_factory=dict)
    groups: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page: a short description, the image as a data URI, and a caption that may be empty."""

    description: str
    source: str
    caption: str = ""


@dataclass(frozen=True)
class PageSection:
    """A section of a page.

    Attributes:
        warnings: the methods that are not shown, each with the reason.
        figures: the charts and pictures.
        table: the table above the figures, if there is one.
        images: the number of test images in the table; several numbers if methods differ.
    """

    warnings: Sequence[str]
    figures: Sequence[PageFigure] = ()
    table: PageTable | None = None
    images: str = ""


def page_figure(figure: Figure, description: str, caption: str = "", png: bool = False) -> PageFigure:
    """Return a matplotlib figure as part of a page. The same figure always gives the same bytes.

    Args:
        description: the figure's content, for readers who do not see it.
        png: embed PNG instead of SVG, for a figure that holds many pixels anyway.
    """
    if png:
        return embedded_image("png", png_bytes(figure), description, caption)
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedssl"}):  # ids that are not random
        figure.savefig(data, format="svg", metadata={"Date": None})
    return embedded_image("svg+xml", data.getvalue(), description, caption)


def embedded_image(kind: str, data: bytes, description: str, caption: str) -> PageFigure:
    """Return the content of an image file of the MIME type image/`kind` as part of a page."""
    return PageFigure(description, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", caption)


def render_page(template: str, **values: object) -> str:
    """Fill a template of `templates/`, with every value escaped, and return the page.

    Raises:
        jinja2.UndefinedError: the template uses a value that is missing.
    """
    return _TEMPLATES.get_template(template).render(values)
