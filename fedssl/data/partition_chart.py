"""A chart of how many samples of each class each client has."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ..untrusted.printable import plot_text
from .partition_table import checked_shape

_MOST_LEGEND_ENTRIES = 20


def draw_partition(counts: Tensor, class_names: Sequence[str]) -> Figure:
    """A chart of `counts` [clients, classes]: one stacked horizontal bar a client, one colour a class.

    The figure needs no display and no global state; save it with `figure.savefig`.
    """
    clients, classes = checked_shape(counts, class_names)
    colours = _class_colours(classes)
    legend_entries = classes if classes <= _MOST_LEGEND_ENTRIES else 0
    height = max(3, min(1 + 0.45 * clients, 40), 0.8 + 0.22 * legend_entries)  # inches
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    sizes = counts.cpu().numpy()
    ends = sizes.cumsum(1)
    for client in range(clients):
        held = np.flatnonzero(sizes[client])
        pieces = [(ends[client, index] - sizes[client, index], sizes[client, index]) for index in held]
        axes.broken_barh(pieces, (client - 0.4, 0.8), facecolors=[colours[index] for index in held])
        total = int(ends[client, -1])
        axes.annotate(f"{total:,}", (total, client), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, max(1, 1.08 * ends[:, -1].max()))
    axes.set_ylim(clients - 0.5, -0.5)
    axes.set_yticks(range(0, clients, max(1, clients // 50)))
    axes.set(xlabel="training samples", ylabel="client")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend_entries:
        handles = [
            Patch(color=colour, label=plot_text(name)) for colour, name in zip(colours, class_names, strict=True)
        ]
        figure.legend(handles=handles, title="class", loc="outside right upper", fontsize=9)
    else:
        scale = ScalarMappable(Normalize(-0.5, classes - 0.5), ListedColormap(colours))
        figure.colorbar(scale, ax=axes, label="class number", pad=0.02)
    return figure


def _class_colours(classes: int) -> list[tuple[float, float, float, float]]:
    if classes <= 10:
        return [colormaps["tab10"](index) for index in range(classes)]
    if classes <= _MOST_LEGEND_ENTRIES:
        return [colormaps["tab20"](index) for index in range(classes)]
    return [colormaps["turbo"](index / (classes - 1)) for index in range(classes)]
