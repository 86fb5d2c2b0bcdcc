"""Charts of collapse analyses, one method or several in a chart: singular values, the sphere, and t-SNE."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ..errors import UserError
from ..evaluation.metrics import LARGEST_FIGURE
from ..evaluation.projections import log_covariance_singular_values
from ..federation import federation_of_run
from ..run.directory import RunDirectory
from ..run.storage import make_folder, write_atomically
from ..untrusted import plot_text, read_regular_file
from .collapse import FORMAT, Collapse, Geometry, analyse_collapse
from .page import PageFigure, PageTable, page_figure
from .plots import MUTED, TEXT, method_styles, name_lines, png_bytes, tidy

_FILE = "collapse.json"


_LARGEST_DIMENSION = 2**16  # of a stored analysis


def collapse_of_run(path: Path, trust: bool = False) -> Collapse | None:
    """The collapse analysis of a run's last round. It is made where it is not stored already.

    It is stored in the run's folder where that can be written.

    Args:
        path: the run's folder.
        trust: run the code of parts of one's own that the run's recipe names.

    Returns:
        The analysis; None where no round is finished.

    Raises:
        UserError: the run's data are no longer there, a state cannot be read, representations are not finite, or
            the recipe names code that is not trusted.
    """
    directory = RunDirectory.open(path)
    checkpoint = directory.checkpoint
    if checkpoint.round < 1 or not checkpoint.files:
        return None
    stored = _read(path / _FILE)
    if stored is not None and stored.round == checkpoint.round:
        return stored
    analysis = analyse_collapse(federation_of_run(directory, trust), directory)
    with suppress(UserError):  # a folder that cannot be written is read all the same
        _write(analysis, path)
    return analysis


def _read(path: Path) -> Collapse | None:
    """A stored analysis; None where there is none of this format, which somebody else may have written."""
    try:
        analysis = TypeAdapter(Collapse).validate_json(read_regular_file(path))
    except (OSError, ValueError):
        return None
    return analysis if analysis.format == FORMAT and _can_be_drawn(analysis) else None


def _can_be_drawn(analysis: Collapse) -> bool:
    """Whether all lists have the lengths that the charts rely on, and all figures are finite."""
    images, classes = len(analysis.labels), len(analysis.class_names)
    models, tsne = analysis.models, list(analysis.tsne.values())
    figures = [value for one in models.values() for value in (*chain(*one.sphere), *one.log_singular_values)]
    figures += [value for points in tsne for value in chain(*points)]
    figures += [value for one in models.values() for value in (one.alignment, one.uniformity, one.effective_rank)]
    return (
        images > 0
        and all(0 <= label < classes for label in analysis.labels)
        and len(models) > 0
        and all(re.fullmatch(r"global|[0-9]{1,9}", who) for who in models)
        and all(0 < one.dimension <= _LARGEST_DIMENSION and one.log_singular_values for one in models.values())
        and all(len(one.sphere) == images and all(len(point) == 3 for point in one.sphere) for one in models.values())
        and len(tsne) in (0, 2)
        and all(len(points) == len(tsne[0]) <= images and all(len(p) == 2 for p in points) for points in tsne)
        and all(math.isfinite(value) and abs(value) < LARGEST_FIGURE for value in figures)
        and all(math.isfinite(one.coverage) for one in models.values())
    )


def _write(analysis: Collapse, path: Path) -> None:
    folder = path / "figures"
    make_folder(folder)
    by_method = {path.name: analysis}
    for name, figure in (
        ("log_singular_values", draw_log_singular_values(by_method)),
        ("sphere", draw_spheres(by_method)),
        ("tsne", draw_tsne(by_method)),
    ):
        if figure is not None:
            write_atomically(folder / f"{name}.png", png_bytes(figure))
    # Written last: where collapse.json is there, so are the figures.
    write_atomically(path / _FILE, json.dumps(asdict(analysis)).encode())


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


_HEADER = ("method", "model", "alignment", "uniformity", "effective rank", "sphere covered (%)")


_SINGULAR_VALUES_CAPTION = (
    "The 100 largest singular values of the covariance matrix, natural logarithm. A line that falls off early means "
    "dimensional collapse; the dashed one is what uniform points on the sphere have."
)


_SPHERE_CAPTION = (
    "Representations projected onto their three main directions and onto the sphere again, coloured by class; points "
    "on the far side are pale. The more of the sphere is blank, the worse the collapse. An encoder that ends in a ReLU "
    "has no negative outputs, so even without collapse its points keep to one side."
)


_TSNE_CAPTION = (
    "t-SNE of the same test images as the global model (circles) and one local model (crosses) represent them. Where "
    "both mix, the models share one representation space; distances between groups mean nothing."
)


@dataclass(frozen=True)
class CollapseSection:
    """What the section shows.

    Attributes:
        warnings: which methods have no analysis, and why.
        images: the number of test images; several numbers where methods differ.
        table: the measures of each method's models; None where no method has an analysis.
        figures: the charts.
    """

    warnings: Sequence[str]
    images: str
    table: PageTable | None
    figures: Sequence[PageFigure]


def collapse_section(analyses: Mapping[str, Collapse | str]) -> CollapseSection | None:
    """The section; None where there is no analysis.

    Args:
        analyses: by method, its analysis, or a text that says why there is none.
    """
    if not analyses:
        return None
    warnings = [
        f"{name}: no collapse analysis: {problem}" for name, problem in analyses.items() if isinstance(problem, str)
    ]
    shown = {name: analysis for name, analysis in analyses.items() if not isinstance(analysis, str)}
    if not shown:
        return CollapseSection(warnings, "", None, ())
    images = ", ".join(dict.fromkeys(str(len(analysis.labels)) for analysis in shown.values()))
    return CollapseSection(warnings, images, PageTable(_HEADER, _rows(shown), text_columns=2), _figures(shown))


def _rows(analyses: Mapping[str, Collapse]) -> list[tuple[str, ...]]:
    rows = []
    for name, analysis in analyses.items():
        if analysis.shared:
            rows.append((name, "global model", *_mean_measures([analysis.shared])))
        count = len(analysis.local)
        if count:
            model = f"mean of {count} local models" if count > 1 else "a local model"
            rows.append((name, model, *_mean_measures(analysis.local)))
    return rows


def _mean_measures(models: Sequence[Geometry]) -> list[str]:
    """The means over the models, as the cells below `_HEADER`."""
    return [
        f"{fmean(model.alignment for model in models):.3f}",
        f"{fmean(model.uniformity for model in models):.2f}",
        f"{fmean(model.effective_rank for model in models):.1f}",
        f"{fmean(100 * model.coverage for model in models):.0f}",
    ]


def _figures(analyses: Mapping[str, Collapse]) -> list[PageFigure]:
    singular_values, spheres = draw_log_singular_values(analyses), draw_spheres(analyses)
    figures = [
        page_figure(singular_values, "Log singular values of the covariance", _SINGULAR_VALUES_CAPTION),
        page_figure(spheres, "Representations on the sphere", _SPHERE_CAPTION, png=True),
    ]
    tsne = draw_tsne(analyses)
    if tsne is not None:
        figures.append(page_figure(tsne, "t-SNE of global and local representations", _TSNE_CAPTION, png=True))
    return figures
