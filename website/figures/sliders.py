"""The HTML of a figure with sliders: what docs/assets/figures.js needs to draw it, and the numbers that it looks up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from website.figures.svg import WIDTH


@dataclass(frozen=True)
class Slider:
    """A control of a figure.

    Attributes:
        key: its name in the script.
        label: its name on the page.
        values: what it can be set to, as shown.
        start: index of the value that it has at first.
    """

    key: str
    label: str
    values: Sequence[str]
    start: int = 0


def interactive(
    name: str,
    description: str,
    height: int,
    sliders: Sequence[Slider],
    data: Mapping[str, object],
    caption: str,
) -> str:
    """A figure with sliders.

    Args:
        name: the figure's name; `figures.js` has a function of this name that draws it.
        description: what it shows, for readers who do not see it.
        height: of the drawing, which is `WIDTH` wide.
        sliders: the controls. Where `data` has a table by all of them, its first axis is the first slider's.
        data: what the function draws and shows.
        caption: the text below, as HTML.
    """
    controls = "\n".join(
        f'<label>{escape(slider.label)} <input type="range" min="0" max="{len(slider.values) - 1}" '
        f'value="{slider.start}" data-key="{slider.key}" data-values="{escape(json.dumps(slider.values))}"> '
        "<span></span></label>"
        for slider in sliders
    )
    return f"""<figure class="drawing interactive" data-figure="{name}" data-search-exclude>
<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}"></svg>
<div class="controls">
{controls}
</div>
<output aria-live="polite"></output>
<noscript>This figure needs JavaScript.</noscript>
<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script>
<figcaption>{caption} Every number is computed by the operator, in <code>website/figures/{name}.py</code>.</figcaption>
</figure>"""
