"""Charts of runs as matplotlib Figures, without pyplot, a display or global state.

The methods' colours are Okabe and Ito's, which colour-blind readers can tell apart; after eight the line style changes.
"""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.rcsetup import cycler
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..evaluation.metrics import LARGEST_FIGURE, METRICS, format_values, is_accuracy, mean_and_spread, metric_title
from ..untrusted import plot_text

TEXT, MUTED, GRID = "#222222", "#666666", "#E3E3E3"
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_LINE_STYLES = ("-", "--", ":", "-.")
_HATCH_COLOUR = "#8A6A2B"
#: colour, hatch and name in the legend of a table's rows, by their role
_ROLES = {
    "row": ("#0072B2", "", ""),
    "method": ("#0072B2", "", "the method"),
    "baseline": ("#E69F00", "", "baseline"),
    "control": ("#F5D9A6", "////", "control: nothing is learned from peers"),
    "other": ("#BBBBBB", "", "other, not in the verdict"),
}
#: more classes than these get no legend: their colours cannot be told apart
MOST_NAMED_CLASSES = 20
_SMALLEST_SHARE = 1e-12  # of the variance; float32 cannot resolve less


def method_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a different colour and line style for each label, by their order, for every chart of a page."""
    return dict(zip(labels, (cycler(linestyle=_LINE_STYLES) * cycler(color=_PALETTE))(), strict=False))


def class_colours(classes: int) -> NDArray[np.float64]:
    """Return one colour per class, [classes, 4]."""
    index = np.arange(classes)
    if classes > MOST_NAMED_CLASSES:
        return np.asarray(colormaps["turbo"](index / (classes - 1)))
    return np.asarray(colormaps["tab10" if classes <= 10 else "tab20"](index))


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file, 150 dots per inch."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page: a short description, the image as a data URI, and a caption that may be empty."""

    description: str
    source: str
    caption: str = ""


def page_figure(figure: Figure, description: str, caption: str = "", png: bool = False) -> PageFigure:
    """Return a matplotlib figure as part of a page. The same figure always gives the same bytes.

    `description` is for readers who do not see it. With `png`, for figures of many pixels, PNG replaces SVG.
    """
    if png:
        kind, content = "png", png_bytes(figure)
    else:
        data = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "fedssl"}):  # ids that are not random
            figure.savefig(data, format="svg", metadata={"Date": None})
        kind, content = "svg+xml", data.getvalue()
    return PageFigure(description, f"data:image/{kind};base64,{base64.b64encode(content).decode()}", caption)


def tidy(axes: Axes) -> None:
    """Give axes the common look: two spines, and a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(labelsize=10, colors=TEXT)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def name_lines(figure: Figure, axes: Axes, methods: int) -> None:
    """Add a legend of the lines, unless the page has only one method."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=MUTED)
    elif methods > 1:
        columns = 3 if max(map(len, labels)) < 16 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)


def class_legend(figure: Figure, class_names: Sequence[str]) -> None:
    """Name the classes' colours, of which there must be few, at the upper right outside the axes."""
    handles = [
        Line2D([], [], marker="o", ls="", ms=6, color=colour, label=plot_text(name))
        for colour, name in zip(class_colours(len(class_names)), class_names, strict=True)
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10)


def draw_curves(
    metric: str,
    groups: Mapping[str, Sequence[Mapping[int, float]]],
    styles: Mapping[str, dict[str, Any]],
    spent: tuple[str, Mapping[str, Mapping[int, float]]] | None = None,
) -> Figure:
    """Draw a metric by round: a line for each method's mean over its runs, and a band from lowest to highest.

    `groups` has, by method, each run's values by round. Only the rounds that all its runs reached are drawn. `spent`
    puts something else than rounds on the horizontal axis: its title, and its value by method and round.
    """
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for label, runs in groups.items():
        rounds = sorted(set.intersection(*map(set, runs))) if runs else []
        if not rounds:
            continue
        values = np.array([[run[number] for number in rounds] for run in runs])
        values[~(np.abs(values) < LARGEST_FIGURE)] = np.nan  # a gap in the line
        x = [spent[1][label][number] for number in rounds] if spent else rounds
        look = styles[label] | {"label": plot_text(label), "marker": "o" if len(rounds) <= 25 else None}
        axes.plot(x, values.mean(0), lw=1.9, ms=3.5, **look)
        if len(runs) > 1:
            axes.fill_between(x, values.min(0), values.max(0), color=styles[label]["color"], alpha=0.15, lw=0)
    tidy(axes)
    axes.set_xlabel(spent[0] if spent else "round", fontsize=11)
    axes.set_ylabel(plot_text(metric_title(metric)), fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if spent:
        axes.xaxis.set_major_formatter(EngFormatter())
    if metric in METRICS and (unit := METRICS[metric].unit) in ("bytes", "FLOPs"):
        axes.yaxis.set_major_formatter(EngFormatter(unit.replace("bytes", "B")))  # 17.8 MB
    name_lines(figure, axes, len(styles))
    return figure


def draw_spectra(spectra: Mapping[str, Sequence[Sequence[float]]], axes_shown: int = 100) -> Figure:
    """Draw the logarithm of each principal axis' share of the variance, as FedU2's Figure 3: a line for each method.

    `spectra` has, by method, the singular values of each of its models, descending; the line is their mean.
    """
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    styles = method_styles(list(spectra))
    for label, models in spectra.items():
        fewest = min(axes_shown, *map(len, models))
        variances = [np.square(np.divide(values, max(*values, np.finfo(float).tiny))) for values in models]
        shares = [each[:fewest] / max(each.sum(), 1.0) for each in variances]
        mean = np.mean([np.log(np.maximum(share, _SMALLEST_SHARE)) for share in shares], axis=0)
        axes.plot(np.arange(1, fewest + 1), mean, lw=1.9, label=plot_text(label), **styles[label])
    tidy(axes)
    axes.set_xlabel("principal axis", fontsize=11)
    axes.set_ylabel("log of its share of the variance", fontsize=11)
    name_lines(figure, axes, len(styles))
    return figure


@dataclass(frozen=True)
class Bar:
    """One method's values of one metric, one per seed: `before` training, empty if unknown, and `after` it."""

    label: str
    before: Sequence[float]
    after: Sequence[float]
    colour: str
    hatch: str = ""


def draw_bars(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """Draw one panel per metric, with one bar per method from its untrained to its trained mean, and a dot per seed.

    All `panels` have the same methods in the same order.
    """
    most = max(map(len, panels.values()))
    figure = Figure(figsize=(1.9 + 3.7 * len(panels), 1.5 + 0.42 * most), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for i, (axes, (metric, bars)) in enumerate(zip(grid, panels.items(), strict=True)):
        _draw_bars(axes, metric, bars, names=i == 0)
    seeds = max(len(bar.after) for bars in panels.values() for bar in bars)
    spread = "; figures: mean ± sample standard deviation over seeds" if seeds > 1 else ""
    note = f"a bar runs from before training to after it; a dot is one seed{spread}"
    # one panel is too narrow for all of it in a line
    figure.supxlabel(textwrap.fill(note, 70 * len(panels)), fontsize=9.5, color=MUTED)
    return figure


def _draw_bars(
    axes: Axes, metric: str, bars: Sequence[Bar], names: bool, untrained: Sequence[float] = (), letters: int = 100
) -> None:
    """Draw horizontal bars, with a dot per seed, and mean and spread in figures on the right.

    Accuracies of trained and untrained encoders are often close, so the axis does not start at 0. A bar starts at the
    mean of the `untrained` encoders (default: the method's own), so its length is what training gained. A line of the
    title holds `letters` characters.
    """
    beside: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "size": 10.5}
    for y, bar in enumerate(bars):
        start, _ = mean_and_spread(untrained or bar.before or [0.0])
        mean, _ = mean_and_spread(bar.after or [math.nan])
        if not (math.isfinite(start) and math.isfinite(mean)):
            axes.text(1.03, y, "-", **beside, color=MUTED)
            continue
        edge = _HATCH_COLOUR if bar.hatch else "none"
        axes.barh(y, mean - start, left=start, height=0.6, color=bar.colour, hatch=bar.hatch, edgecolor=edge, lw=0)
        axes.plot([mean, mean], [y - 0.36, y + 0.36], color=TEXT, lw=2.2, solid_capstyle="butt")
        spots = y + (np.linspace(-0.16, 0.16, len(bar.after)) if len(bar.after) > 1 else np.zeros(1))
        axes.plot(bar.after, spots, "o", color=TEXT, ms=4.5, mfc="white", mew=1.1, zorder=4)
        axes.text(1.03, y, format_values(metric, bar.after), **beside, color=TEXT)
    if untrained:
        axes.axvline(mean_and_spread(untrained)[0], color=TEXT, ls="--", lw=1.3, zorder=3)
    axes.margins(x=0.08)
    if is_accuracy(metric):
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, 0), min(high, 100.8))
    elif axes.get_xlim()[0] < 0 and all(value >= 0 for bar in bars for value in (*bar.before, *bar.after)):
        axes.set_xlim(left=0)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    labels = [plot_text(textwrap.fill(bar.label, 30)) if names else "" for bar in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_title(plot_text(textwrap.fill(metric_title(metric), letters)), fontsize=12, loc="left", color=TEXT)
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def draw_table_picture(
    title: str,
    subtitle: str,
    panels: Mapping[str, Sequence[tuple[str, str, Sequence[float], Sequence[float]]]],
    untrained: Mapping[str, Sequence[float]],
    caption: str,
) -> Figure:
    """Draw a table as one picture: the result of each method, and the verdict.

    Args:
        panels: by metric, one (label, role, before by seed, after by seed) per row; a role is `method`, `baseline`,
            `control` or `other`, or `row` if the table has no verdict.
        untrained: by metric, the untrained encoders' values by seed, whose mean is drawn as a dashed line.
        caption: the verdict, in one or more lines.
    """
    titles = textwrap.wrap(title.rstrip("."), 92, break_on_hyphens=False) or [""]
    lines = [line for text in caption.splitlines() for line in textwrap.wrap(text, 140, break_on_hyphens=False)]
    letters = 80 // len(panels)
    title_lines = max(len(textwrap.wrap(metric_title(metric), letters)) for metric in panels)
    bars = 1.5 + 0.2 * title_lines + 0.42 * max(map(len, panels.values()))
    heights = (0.5 + 0.27 * len(titles), bars, 0.6 + 0.215 * len(lines))  # inches
    figure = Figure(figsize=(13.0, sum(heights)), layout="constrained", facecolor="white")
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    above, middle, below = parts
    look: dict[str, Any] = {"x": 0.02, "va": "top"}
    above.text(y=1 - 0.12 / heights[0], s=plot_text("\n".join(titles)), size=15, weight="bold", color=TEXT, **look)
    above.text(y=0.3 / heights[0], s=plot_text(subtitle), size=11, color=MUTED, **look)
    note = "Bars start at the untrained encoders; figures are mean ± sample standard deviation over the seeds."
    below.text(0.5, 1 - 0.05 / heights[2], note, va="top", ha="center", size=10, color=MUTED)
    below.text(y=1 - 0.4 / heights[2], s=plot_text("\n".join(lines)), size=11, color=TEXT, linespacing=1.35, **look)

    grid = middle.subplots(1, len(panels), squeeze=False)[0]
    for i, (axes, (metric, entries)) in enumerate(zip(grid, panels.items(), strict=True)):
        drawn = [Bar(label, before, after, *_ROLES[role][:2]) for label, role, before, after in entries]
        _draw_bars(axes, metric, drawn, names=i == 0, untrained=untrained.get(metric, ()), letters=letters)

    present = {role for entries in panels.values() for _, role, _, _ in entries}
    named = [_ROLES[role] for role in _ROLES if role in present and _ROLES[role][2]]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=_HATCH_COLOUR if hatch else "none", lw=0, label=name)
        for colour, hatch, name in named
    ]
    handles.append(Line2D([], [], color=TEXT, ls="--", lw=1.3, label="untrained encoder"))
    handles.append(Line2D([], [], color=TEXT, marker="o", ls="", ms=4.5, mfc="white", label="one seed"))
    middle.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10, columnspacing=1.5
    )
    return figure


def draw_partition(counts: Tensor, class_names: Sequence[str]) -> Figure:
    """Draw `counts` [clients, classes]: one stacked horizontal bar per client, one colour per class."""
    clients, classes = counts.shape
    colours = class_colours(classes)
    legend_entries = classes if classes <= MOST_NAMED_CLASSES else 0
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
    axes.spines[["top", "right"]].set_visible(False)
    if legend_entries > 1:  # images without labels need none
        entries = zip(colours, class_names, strict=True)
        handles = [Patch(color=colour, label=plot_text(name)) for colour, name in entries]
        figure.legend(handles=handles, title="class", loc="outside right upper", fontsize=9)
    elif not legend_entries:
        scale = ScalarMappable(Normalize(-0.5, classes - 0.5), ListedColormap(colours))
        figure.colorbar(scale, ax=axes, label="class number", pad=0.02)
    return figure
