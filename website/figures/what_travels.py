"""What travels between a client and the server, for each family of methods, read from the recipes."""

from __future__ import annotations

import textwrap

import yaml

from website.figures.svg import arrow, box, drawing, text
from website.figures.svg import figure as figure_element
from website.methods import PAGES
from website.repository_files import ROOT

_WEIGHTS = ("weights", "weights")
#: by aggregator: what a client sends, and what it receives
TRAVELS = {
    "weighted_mean": _WEIGHTS,
    "eua": _WEIGHTS,
    "l_dawa": _WEIGHTS,
    "trimmed_mean": _WEIGHTS,
    "representation_mean": ("representations of public images", "the mean of their kernels"),
    "dictionary": ("projections of own images", "all clients' projections"),
    "base_model": ("", "a base model, once"),
    "orchestra_clusters": ("target network, cluster centres", "their means, global centres"),
}


def families() -> dict[tuple[str, str], list[str]]:
    """The recipes of the site's methods by what travels: (what a client sends, what it receives), "" for nothing."""
    result: dict[tuple[str, str], list[str]] = {}
    for recipe in PAGES:
        values = yaml.safe_load((ROOT / "fedssl" / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
        travels = [TRAVELS[part["name"]] for part in values.get("aggregators") or []]
        up = "; ".join(sent for sent, _ in travels if sent)
        down = "; ".join(received for _, received in travels)
        if values["schedule"]["name"] == "layer_wise":
            up = down = "weights of the newest layers"
        elif values["schedule"]["name"] == "progressive":
            up = down = "weights of the layers so far"
        result.setdefault((up, down), []).append(recipe)
    return result


def _family(up: str, down: str, recipes: list[str], top: float) -> tuple[list[str], float]:
    """A family's pieces, and where the next one begins."""
    lines = textwrap.wrap(", ".join(recipes), 48)
    pieces = [text(8, top + 14 + 16 * index, line, "strong", "start") for index, line in enumerate(lines)]
    y = top + 16 * len(lines) + 8
    pieces += [
        box(8, y, 50, 54, "accent"),
        text(33, y + 31, "client", "small"),
        box(282, y, 50, 54, "accent"),
        text(307, y + 31, "server", "small"),
    ]
    line = y
    for words, begin, end in ((up, 62, 278), (down, 278, 62)):
        for part in textwrap.wrap(words, 36):
            line += 14
            pieces.append(text(170, line, part, "small"))
        if words:
            line += 6
            pieces.append(arrow(begin, line, end, line))
            line += 6
    if not up and not down:
        pieces.append(text(170, y + 31, "nothing", "small"))
    return pieces, max(y + 54, line) + 16


def figure() -> str:
    pieces, told, top = [], [], 0.0
    for (up, down), recipes in families().items():
        drawn, top = _family(up, down, recipes, top)
        pieces += drawn
        told.append(f"{', '.join(recipes)}: up {up or 'nothing'}, down {down or 'nothing'}")
    svg = drawing(f"What travels in a round. {'. '.join(told)}.", top, *pieces)
    return figure_element(
        svg,
        "What travels in a round, read from the recipes. Every message also has the number of a client's samples.",
        "website/figures/what_travels.py",
    )
