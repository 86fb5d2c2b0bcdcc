"""Pieces of SVG. Colours are CSS classes of docs/assets/book.css, so that a drawing fits the light and the dark theme.

Drawings are 340 units wide, as wide as the text of a telephone's page: a text of 12 units is 12 pixels high there.
"""

from __future__ import annotations

from html import escape

WIDTH = 340


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of text whose baseline is at y; `kind` is a CSS class such as `small` or `strong`."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    """A rectangle with round corners; `kind` is a CSS class such as `accent`."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="box {kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    """A straight arrow."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="arrow {kind}" marker-end="url(#arrow-head)"/>'


def drawing(description: str, height: float, *pieces: str, width: float = WIDTH, kind: str = "") -> str:
    """The `svg` element.

    Args:
        description: what it shows, for readers who do not see it.
        height, width: in units of the drawing.
        pieces: the elements, in the order in which they are drawn.
        kind: a CSS class of the element.
    """
    head = (
        '<defs><marker id="arrow-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>'
    )
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" class="{kind}" aria-label="{escape(description)}">'
        + "\n".join([head, *pieces])
        + "</svg>"
    )


def figure(svg: str, caption: str, code: str) -> str:
    """A drawing with its caption, which ends with the file of the repository that draws it."""
    return (
        f'<figure class="drawing" data-search-exclude>\n{svg}\n'
        f"<figcaption>{caption} Drawn by <code>{code}</code>.</figcaption>\n</figure>"
    )
