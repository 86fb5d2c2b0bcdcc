"""The site's figures: `<!-- generated: figure NAME -->` stands for one of them.

`round`, `travels` and `stages` are drawings. `cka`, `fur` and `eua` have sliders: this code computes every number that
they show with the operators themselves, and docs/assets/figures.js only looks it up and draws.
"""

from __future__ import annotations

from website.figures import cka, eua, fur, round_of_training, stages, what_travels

DRAWINGS = {
    "round": round_of_training.figure,
    "travels": what_travels.figure,
    "stages": stages.figure,
    "cka": cka.figure,
    "fur": fur.figure,
    "eua": eua.figure,
}


def html(name: str) -> str:
    """A figure as HTML without blank lines, which would end it for Markdown.

    Raises:
        ValueError: there is no such figure.
    """
    if name not in DRAWINGS:
        raise ValueError(f"there is no figure {name!r}; expected one of {', '.join(DRAWINGS)}")
    return "\n".join(line for line in DRAWINGS[name]().splitlines() if line.strip())
