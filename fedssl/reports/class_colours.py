"""A colour for each class, and a legend of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..untrusted.printable import plot_text

#: more classes than these have no legend: their colours cannot be told apart
MOST_NAMED_CLASSES = 20


def class_colours(classes: int) -> NDArray[np.float64]:
    """One colour a class, [classes, 4]."""
    if classes <= 10:
        return np.array([colormaps["tab10"](index) for index in range(classes)])
    if classes <= MOST_NAMED_CLASSES:
        return np.array([colormaps["tab20"](index) for index in range(classes)])
    return np.array([colormaps["turbo"](index / (classes - 1)) for index in range(classes)])


def class_legend(figure: Figure, class_names: Sequence[str], marks: Sequence[Line2D] = ()) -> None:
    """Name marks and, where they are few, the classes' colours, at the upper right outside the axes."""
    handles = list(marks)
    if len(class_names) <= MOST_NAMED_CLASSES:
        handles += [
            Line2D([], [], marker="o", ls="", ms=6, color=colour, label=plot_text(name))
            for colour, name in zip(class_colours(len(class_names)), class_names, strict=True)
        ]
    if handles:
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10)
