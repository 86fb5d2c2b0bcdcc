"""HTML pages that need no network, no scripts and no other file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #222; background: #fff;
       max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
h2 { border-bottom: 1px solid #ddd; padding-bottom: .25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .8rem 0; }
th, td { text-align: left; padding: .28rem .75rem .28rem 0; border-bottom: 1px solid #e5e5e5; vertical-align: top; }
thead th { border-bottom: 2px solid #999; } td:first-child { white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.mean td { font-weight: 600; border-bottom: 2px solid #bbb; } tr.method td { font-weight: 600; background: #eef5fb; }
.note { color: #666; font-size: .92rem; } .warning { background: #fff4dd; padding: .5rem .8rem; }
.wide { overflow-x: auto; } .wide tr > :first-child { position: sticky; left: 0; background: #fff; }
.wide tr.method > :first-child { background: #eef5fb; } img { max-width: 100%; height: auto; }
figure { margin: .6rem 0; } figcaption { color: #666; font-size: .88rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem 2rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .82rem; }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document around an already escaped body."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def escape(text: object) -> str:
    """Text as it may stand in HTML, also inside an attribute."""
    return html.escape(str(text), quote=True)


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    text_columns: int = 1,
    classes: Mapping[int, str] | None = None,
    groups: Sequence[tuple[str, int]] = (),
) -> str:
    """A table; all cells are escaped. Columns from `text_columns` on are numbers and set to the right.

    `classes` by row; `groups` are titles above the header, each with its number of columns.
    """

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i >= text_columns else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    lines = []
    for i, row in enumerate(rows):
        mark = f" class={classes[i]}" if classes and i in classes else ""
        lines.append(f"<tr{mark}>{cells('td', row)}</tr>")
    body = "\n".join(lines)
    above = "".join(f"<th colspan={columns}>{escape(title)}</th>" for title, columns in groups)
    head = (f"<tr>{above}</tr>" if above else "") + f"<tr>{cells('th', header)}</tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>\n{body}</tbody></table></div>'


def html_figure(figure: Figure, description: str, caption: str = "", png: bool = False) -> str:
    """A figure inside the page: SVG, or PNG for a figure that holds many pixels anyway."""
    data = io.BytesIO()
    if png:
        figure.savefig(data, format="png", dpi=150)
    else:
        # fixed ids and no date: the same runs give the same page
        with matplotlib.rc_context({"svg.hashsalt": "fedssl"}):
            figure.savefig(data, format="svg", metadata={"Date": None})
    kind = "png" if png else "svg+xml"
    source = f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{escape(description)}" src="{source}">{below}</figure>'
