"""Charts of collapse analyses, one method or several in a chart: singular values, the sphere, and t-SNE."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..evaluation.spectrum import log_covariance_singular_values
from ..untrusted.printable import plot_text
from .class_colours import class_colours, class_legend
from .collapse import Collapse
from .plots import MUTED, TEXT, method_styles, name_lines, tidy

_PANEL = 3.3  # inches


def draw_log_singular_values(analyses: Mapping[str, Collapse]) -> Figure:
    """FedU2's Figure 3: the largest singular values of the covariance, of the global and of the local models.

    A line is one method's; that of the local models is their mean. The dashed one is what as many points drawn
    uniformly from the sphere of the first method's dimension have.

    Args:
        analyses: by method.
    """
    styles = method_styles(list(analyses))
    shared = any(analysis.shared for analysis in analyses.values())
    titles = ("global model", "local models, mean") if shared else ("local models, mean",)
    figure = Figure(figsize=(5.0 * len(titles) + 0.6, 3.7 + 0.1 * len(analyses)), layout="constrained")
    grid = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    first = next(iter(analyses.values()))
    dimension = next(iter(first.models.values())).dimension
    uniform = torch.randn(len(first.labels), dimension, generator=torch.Generator().manual_seed(0))
    reference = log_covariance_singular_values(uniform).numpy()
    for axes, title in zip(grid, titles, strict=True):
        for label, analysis in analyses.items():
            is_global = title == "global model"
            geometries = ([analysis.shared] if analysis.shared else []) if is_global else analysis.local
            lines = [geometry.log_singular_values for geometry in geometries]
            if lines:
                fewest = min(map(len, lines))
                mean = np.mean([line[:fewest] for line in lines], axis=0)
                style = styles[label]
                axes.plot(
                    np.arange(1, fewest + 1), mean, color=style.colour, ls=style.line, lw=1.9, label=plot_text(label)
                )
        axes.plot(np.arange(1, len(reference) + 1), reference, color=MUTED, ls=(0, (4, 3)), lw=1.2)
        axes.set_title(title, fontsize=12, loc="left", color=TEXT)
        axes.set_xlabel("index of the singular value", fontsize=11)
        tidy(axes)
    grid[0].set_ylabel("log of the singular value", fontsize=11)
    grid[0].annotate(
        "uniform on the sphere", (len(reference), reference[len(reference) // 2]), (0, 4),
        textcoords="offset points", ha="right", va="bottom", size=9.5, color=MUTED,
    )  # fmt: skip
    name_lines(figure, grid[-1], len(styles))
    return figure


def draw_spheres(analyses: Mapping[str, Collapse]) -> Figure:
    """FedU2's Figure 4: the representations on the unit sphere; the more of it is blank, the worse the collapse.

    A method has two spheres: the global model's and a local one's, or two local ones' where there is no global one.
    From four methods on, two stand in a row. A sphere is seen from the side of the cloud's middle; points on its far
    side are pale.

    Args:
        analyses: by method.
    """
    width = max(len(_first_models(analysis)) for analysis in analyses.values())
    beside = 1 if len(analyses) <= 3 else 2
    rows = -(-len(analyses) // beside)
    figure = Figure(figsize=(_PANEL * width * beside + 1.9, _PANEL * rows + 0.25), layout="constrained")
    grid = figure.subplots(rows, width * beside, squeeze=False).reshape(-1, width)
    for line, (label, analysis) in zip(grid, analyses.items(), strict=False):
        colours = class_colours(len(analysis.class_names))[analysis.labels]
        for axes, who in zip(line, _first_models(analysis), strict=False):
            _draw_sphere(axes, np.array(analysis.models[who].sphere), colours)
            covered = 100 * analysis.models[who].coverage
            axes.set_title(f"{_model_name(who)}: {covered:.0f} % covered", fontsize=11, color=TEXT)
        if len(analyses) > 1:
            line[0].text(
                -1.25, 0, plot_text(label), rotation=90, ha="center", va="center", size=12, weight="bold", color=TEXT
            )
    for axes in grid.ravel():
        if not axes.has_data():
            axes.set_axis_off()
    class_legend(figure, next(iter(analyses.values())).class_names)
    return figure


def draw_tsne(analyses: Mapping[str, Collapse]) -> Figure | None:
    """FedU2's Figure 5: the global model's representations (circles) and a local model's (crosses) in one plane.

    Args:
        analyses: by method; those without a global model are left out.

    Returns:
        None where no method has a global model.
    """
    shown = {label: analysis for label, analysis in analyses.items() if analysis.tsne}
    if not shown:
        return None
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    size = _PANEL + 0.9
    figure = Figure(figsize=(size * columns + 1.6, size * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (label, analysis) in zip(grid, shown.items(), strict=False):
        (_, shared), (who, local) = analysis.tsne.items()
        colours = class_colours(len(analysis.class_names))[analysis.labels[: len(shared)]]
        points, others = np.array(shared), np.array(local)
        axes.scatter(points[:, 0], points[:, 1], s=16, facecolors="none", edgecolors=colours, lw=0.9)
        axes.scatter(others[:, 0], others[:, 1], s=15, c=colours, marker="x", lw=0.9)
        axes.set_title(
            plot_text(label) if len(shown) > 1 else f"global model and client {who}", fontsize=11, color=TEXT
        )
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color("#CCCCCC")
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    marks = [
        Line2D([], [], marker="o", ls="", ms=5, mfc="none", mec=TEXT, label="global model"),
        Line2D([], [], marker="x", ls="", ms=5, color=TEXT, label="a local model"),
    ]
    class_legend(figure, next(iter(shown.values())).class_names, marks)
    return figure


def _first_models(analysis: Collapse) -> list[str]:
    """The global model and a local one; two local ones where there is no global one."""
    return list(analysis.models)[:2]


def _model_name(who: str) -> str:
    return f"client {who}" if who.isdigit() else f"{who} model"


def _draw_sphere(axes: Axes, points: NDArray[np.float64], colours: NDArray[np.float64]) -> None:
    """Seen from the first axis, so the cloud's middle faces the eye; the grid is tilted only to look round."""
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-1.06, 1.06)
    axes.set_ylim(-1.06, 1.06)
    circle = np.linspace(0, 2 * np.pi, 241)
    axes.fill(np.cos(circle), np.sin(circle), facecolor="#F7F7F7", edgecolor="#999999", lw=1.0)
    for line in _graticule(circle):
        towards, right, up = line.T
        axes.plot(right, np.where(towards >= 0, up, np.nan), color="#D8D8D8", lw=0.7, zorder=1.5)
    far = points[:, 0] < 0
    axes.scatter(points[far, 1], points[far, 2], s=7, c=colours[far], alpha=0.18, lw=0, zorder=2)
    axes.scatter(points[~far, 1], points[~far, 2], s=9, c=colours[~far], alpha=0.85, lw=0, zorder=3)


def _graticule(circle: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Lines of latitude and longitude every 30 degrees, [241, 3] each: towards the eye, to the right, up."""
    lines = []
    for angle in np.deg2rad((-60, -30, 0, 30, 60)):
        rim = np.cos(angle)
        lines.append(np.stack([rim * np.cos(circle), rim * np.sin(circle), np.full_like(circle, np.sin(angle))], 1))
    for angle in np.deg2rad(range(0, 180, 30)):
        lines.append(np.stack([np.cos(circle) * np.cos(angle), np.cos(circle) * np.sin(angle), np.sin(circle)], axis=1))
    tilt = np.deg2rad(22.0)
    turn = np.array([[np.cos(tilt), 0, -np.sin(tilt)], [0, 1, 0], [np.sin(tilt), 0, np.cos(tilt)]])
    return [line @ turn for line in lines]
