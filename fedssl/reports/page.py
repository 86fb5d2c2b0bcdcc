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
        text_columns: how many columns, from the left, hold text; the others are numbers and aligned to the right.
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
    """A figure on a page: what it shows in a few words, the image as a data URI, and a caption that may be empty."""

    description: str
    source: str
    caption: str = ""


def page_figure(figure: Figure, description: str, caption: str = "", png: bool = False) -> PageFigure:
    """A matplotlib figure as part of a page.

    Args:
        figure: the figure.
        description: what it shows, for readers who do not see it.
        caption: the text below it.
        png: PNG and not SVG, for a figure that holds many pixels anyway.
    """
    if png:
        kind, data = "png", png_bytes(figure)
    else:
        kind, data = "svg+xml", _svg_bytes(figure)
    return PageFigure(description, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", caption)


def _svg_bytes(figure: Figure) -> bytes:
    """The same bytes for the same figure: ids are not random, and there is no date."""
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedssl"}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()


def render_page(template: str, **values: object) -> str:
    """Fill a template of `templates/`. Every value is escaped.

    Args:
        template: the file's name.
        values: what the template names. A missing one raises `jinja2.UndefinedError`.
    """
    return _TEMPLATES.get_template(template).render(values)
