"""Charts of runs as matplotlib Figures: no pyplot, no display, no global state.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; past eight methods the line style changes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ..data.partitions import checked_shape
from ..errors import UserError
from ..evaluation.metrics import LARGEST_FIGURE, format_values, is_accuracy, mean_and_spread, metric_title
from ..run.storage import write_atomically
from ..untrusted import plot_text

_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


_LINE_STYLES = ("-", "--", ":", "-.")


TEXT, MUTED, GRID = "#222222", "#666666", "#E3E3E3"


#: how a table's rows are drawn: colour, hatch, and what the legend calls them
_ROLES = {
    "row": ("#0072B2", "", ""),
    "method": ("#0072B2", "", "the method"),
    "baseline": ("#E69F00", "", "baseline"),
    "control": ("#F5D9A6", "////", "control: nothing is learned from peers"),
    "other": ("#BBBBBB", "", "other, not in the verdict"),
}


@dataclass(frozen=True)
class Style:
    """How one method is drawn in every chart of a page."""

    colour: str
    line: str


@dataclass(frozen=True)
class Bar:
    """One method's values of one metric, one a seed.

    Attributes:
        label: the method's name.
        before: of the untrained encoders; empty where unknown.
        after: of the trained encoders.
        colour, hatch: how the bar is filled.
    """

    label: str
    before: Sequence[float]
    after: Sequence[float]
    colour: str
    hatch: str = ""


@dataclass(frozen=True)
class Card:
    """A client (or the public images) in a table's picture: two short texts and a mosaic of images.

    `images` is uint8 [h, w] or [h, w, 3], or None.
    """

    title: str
    subtitle: str
    images: NDArray[np.uint8] | None


def method_styles(labels: Sequence[str]) -> dict[str, Style]:
    """A style for each of the labels, by their order: no two are alike."""
    return {
        label: Style(_PALETTE[i % len(_PALETTE)], _LINE_STYLES[i // len(_PALETTE) % len(_LINE_STYLES)])
        for i, label in enumerate(labels)
    }


def png_bytes(figure: Figure) -> bytes:
    """A figure as the content of a PNG file, 150 dots an inch."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as an image file in the format of its name's ending, 150 dots an inch.

    Raises:
        UserError: the ending is unknown, or the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".") or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise UserError(f"{path}: no image can be written as .{kind}; expected one of {', '.join(sorted(known))}")
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=150)
    write_atomically(path, data.getvalue())


def draw_curves(
    metric: str, groups: Mapping[str, Sequence[Mapping[int, float]]], styles: Mapping[str, Style]
) -> Figure:
    """A metric by round: each method's mean over its runs as a line, from their lowest to their highest as a band.

    Args:
        metric: the metric's name.
        groups: by method, each run's values by round. The mean stands at the rounds that all its runs reached.
        styles: see `method_styles`.
    """
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for label, runs in groups.items():
        rounds = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
        if not rounds:
            continue
        values = np.array([[run[number] for number in rounds] for run in runs])
        values[~(np.abs(values) < LARGEST_FIGURE)] = np.nan  # a gap in the line
        style = styles[label]
        marker = "o" if len(rounds) <= 25 else None
        axes.plot(
            rounds,
            values.mean(0),
            color=style.colour,
            linestyle=style.line,
            marker=marker,
            ms=3.5,
            lw=1.9,
            label=plot_text(label),
        )
        if len(runs) > 1:
            axes.fill_between(rounds, values.min(0), values.max(0), color=style.colour, alpha=0.15, lw=0)
    tidy(axes)
    axes.set_xlabel("round", fontsize=11)
    axes.set_ylabel(plot_text(metric_title(metric)), fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    name_lines(figure, axes, len(styles))
    return figure


def draw_bars(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """One panel a metric, one bar a method from its untrained to its trained mean, one dot a seed.

    Args:
        panels: bars by metric; all panels have the same methods in the same order.
    """
    most = max(len(bars) for bars in panels.values())
    figure = Figure(figsize=(1.9 + 3.7 * len(panels), 1.5 + 0.42 * most), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for i, (axes, (metric, bars)) in enumerate(zip(grid, panels.items(), strict=True)):
        _draw_bars(axes, metric, bars, names=i == 0)
    figure.supxlabel(_bars_note(panels), fontsize=9.5, color=MUTED)
    return figure


def draw_spectrum(groups: Mapping[str, Sequence[Sequence[Sequence[float]]]], styles: Mapping[str, Style]) -> Figure:
    """Singular values of the representations, relative to the largest, on a log scale.

    The index is normalised to run from 0 to 1, because clients' representations differ in dimension. A line is the
    geometric mean over a method's runs and their clients. A flat line means that all directions are in use; one
    that falls off early, that the representation has collapsed to a few.

    Args:
        groups: by method, by run, by client: singular values, descending.
        styles: see `method_styles`.
    """
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for label, runs in groups.items():
        lines = [_relative_spectrum(values) for run in runs for values in run if len(values)]
        if lines:
            style = styles[label]
            mean = np.exp(np.mean(np.log(lines), axis=0))
            axes.plot(_SPECTRUM_GRID, mean, color=style.colour, linestyle=style.line, lw=1.9, label=plot_text(label))
    tidy(axes)
    axes.set_yscale("log")
    axes.set_xlabel("index of the singular value / their number", fontsize=11)
    axes.set_ylabel("relative to the largest", fontsize=11)
    name_lines(figure, axes, len(styles))
    return figure


def draw_table_picture(
    title: str,
    subtitle: str,
    cards: Sequence[Card],
    panels: Mapping[str, Sequence[tuple[str, str, Sequence[float], Sequence[float]]]],
    untrained: Mapping[str, Sequence[float]],
    caption: str,
) -> Figure:
    """A table as one picture: who takes part, what each method reached, and what follows from it.

    Args:
        title, subtitle: what is shown, and with which data.
        cards: some clients, about six at most.
        panels: by metric, one (label, role, before by seed, after by seed) a row; a role is `method`, `baseline`,
            `control` or `other`, or `row` where the table judges none.
        untrained: by metric, the untrained encoders' values by seed: a dashed line.
        caption: the verdict; may hold several lines.
    """
    width = 13.0
    title_lines = textwrap.wrap(title.rstrip("."), 92, break_on_hyphens=False) or [""]
    caption_lines = [line for text in caption.splitlines() for line in textwrap.wrap(text, 140, break_on_hyphens=False)]
    rows = max(len(bars) for bars in panels.values())
    left, label_width, value_width = 0.35 / width, 0.185, 0.078
    panel = (1 - left - label_width - 0.005) / len(panels)
    letters = int(panel * width / 0.1)  # of a panel's title in a line
    title_height = 0.2 + 0.2 * max(len(textwrap.wrap(metric_title(metric), letters)) for metric in panels)
    heights = {
        "title": 0.55 + 0.27 * len(title_lines),
        "cards": 2.62 if cards else 0.01,
        "bars": 0.65 + title_height + 0.42 * rows,
        "legend": 0.75,
        "caption": 0.2 + 0.215 * len(caption_lines),
    }
    total = sum(heights.values())
    figure = Figure(figsize=(width, total), facecolor="white")
    top = {}
    used = 0.0
    for name, height in heights.items():
        top[name] = 1 - used / total
        used += height

    figure.text(
        left,
        top["title"] - 0.12 / total,
        plot_text("\n".join(title_lines)),
        va="top",
        size=15,
        weight="bold",
        color=TEXT,
    )
    below_title = top["title"] - (0.22 + 0.25 * len(title_lines)) / total
    figure.text(left, below_title, plot_text(subtitle), va="top", size=11, color=MUTED)

    slot = (1 - 2 * left) / max(len(cards), 3)
    for i, card in enumerate(cards):
        bottom = top["cards"] - (heights["cards"] - 0.16) / total
        axes = figure.add_axes((left + i * slot, bottom, slot * 0.93, (heights["cards"] - 1.1) / total))
        _draw_card(axes, card)

    bar_height = (heights["bars"] - 0.45 - title_height) / total
    for i, (metric, entries) in enumerate(panels.items()):
        box = (
            left + label_width + i * panel,
            top["bars"] - title_height / total - bar_height,
            panel - value_width,
            bar_height,
        )
        axes = figure.add_axes(box)
        bars = [Bar(label, before, after, _ROLES[role][0], _ROLES[role][1]) for label, role, before, after in entries]
        _draw_bars(axes, metric, bars, names=i == 0, untrained=untrained.get(metric, ()), letters=letters)

    roles = [
        role
        for role in _ROLES
        if _ROLES[role][2] and any(entry[1] == role for bars in panels.values() for entry in bars)
    ]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=_ROLES[r][0], hatch=_ROLES[r][1], edgecolor="#8A6A2B" if _ROLES[r][1] else "none", lw=0)
        for r in roles
    ]
    names = [_ROLES[role][2] for role in roles]
    handles += [
        Line2D([], [], color=TEXT, ls="--", lw=1.3),
        Line2D([], [], color=TEXT, marker="o", ls="", ms=4.5, mfc="white"),
    ]
    names += ["untrained encoder", "one seed"]
    figure.legend(
        handles, names, loc="upper center", bbox_to_anchor=(0.5, top["legend"]), ncols=len(names), frameon=False,
        fontsize=10, handlelength=1.7, columnspacing=1.5,
    )  # fmt: skip
    note = "Bars start at the untrained encoders; figures are mean ± sample standard deviation over the seeds."
    figure.text(0.5, top["legend"] - 0.34 / total, note, va="top", ha="center", size=10, color=MUTED)
    figure.text(
        left, top["caption"], plot_text("\n".join(caption_lines)), va="top", size=11, color=TEXT, linespacing=1.35
    )
    return figure


_SPECTRUM_GRID = np.linspace(0.0, 1.0, 200)


_SPECTRUM_FLOOR = 1e-6


def _relative_spectrum(values: Sequence[float]) -> NDArray[np.float64]:
    """Singular values over their largest at the grid's points; all at the floor where the largest is 0."""
    array = np.asarray(values, dtype=np.float64)
    relative = np.clip(array / array.max(), _SPECTRUM_FLOOR, None) if array.max() > 0 else np.full(len(array), 1e-6)
    return np.exp(np.interp(_SPECTRUM_GRID, np.linspace(0.0, 1.0, len(array)), np.log(relative)))


def _draw_bars(
    axes: Axes,
    metric: str,
    bars: Sequence[Bar],
    names: bool,
    untrained: Sequence[float] = (),
    letters: int = 100,
) -> None:
    """Horizontal bars, a dot a seed, mean and spread in figures on the right.

    Accuracies of trained and untrained encoders are often close, so the axis does not start at 0. A bar's length
    still means something: it starts at the `untrained` encoders, or else where the method's own encoders started.
    `letters` is how many of the title stand in a line.
    """
    for y, bar in enumerate(bars):
        start, _ = mean_and_spread(untrained or bar.before or [0.0])
        mean, _ = mean_and_spread(bar.after or [math.nan])
        if not (math.isfinite(start) and math.isfinite(mean)):
            axes.text(1.03, y, "-", transform=axes.get_yaxis_transform(), va="center", size=10.5, color=MUTED)
            continue
        edge = "#8A6A2B" if bar.hatch else "none"
        axes.barh(y, mean - start, left=start, height=0.6, color=bar.colour, hatch=bar.hatch, edgecolor=edge, lw=0)
        axes.plot([mean, mean], [y - 0.36, y + 0.36], color=TEXT, lw=2.2, solid_capstyle="butt")
        spots = y + (np.linspace(-0.16, 0.16, len(bar.after)) if len(bar.after) > 1 else np.zeros(1))
        axes.plot(bar.after, spots, "o", color=TEXT, ms=4.5, mfc="white", mew=1.1, zorder=4)
        axes.text(
            1.03, y, format_values(metric, bar.after), transform=axes.get_yaxis_transform(), va="center", size=10.5,
            color=TEXT,
        )  # fmt: skip
    if untrained:
        axes.axvline(mean_and_spread(untrained)[0], color=TEXT, ls="--", lw=1.3, zorder=3)
    axes.margins(x=0.08)
    if is_accuracy(metric):
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, 0), min(high, 100.8))
    elif axes.get_xlim()[0] < 0 and all(value >= 0 for bar in bars for value in (*bar.before, *bar.after)):
        axes.set_xlim(left=0)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(
        range(len(bars)),
        [plot_text(textwrap.fill(bar.label, 30)) if names else "" for bar in bars],
        fontsize=11,
    )
    axes.tick_params(axis="y", length=0)
    axes.set_title(plot_text(textwrap.fill(metric_title(metric), letters)), fontsize=12, loc="left", color=TEXT)
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _bars_note(panels: Mapping[str, Sequence[Bar]]) -> str:
    seeds = max(len(bar.after) for bars in panels.values() for bar in bars)
    spread = "; figures: mean ± sample standard deviation over seeds" if seeds > 1 else ""
    note = f"a bar runs from before training to after it; a dot is one seed{spread}"
    return textwrap.fill(note, 70 * len(panels))  # one panel is too narrow for all of it in a line


def _draw_card(axes: Axes, card: Card) -> None:
    axes.set_axis_off()
    if card.images is not None:
        axes.imshow(card.images, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_anchor("N")
    axes.set_title(plot_text(card.title), fontsize=11.5, weight="bold", color=TEXT, loc="center", pad=47)
    axes.annotate(
        plot_text(card.subtitle), (0.5, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", ha="center",
        va="bottom", size=10, color=MUTED,
    )  # fmt: skip


def tidy(axes: Axes) -> None:
    """The axes' common look: two spines, a light grid behind the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(labelsize=10, colors=TEXT)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def name_lines(figure: Figure, axes: Axes, methods: int) -> None:
    """Name the lines, unless the page has one method only."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=MUTED)
    elif methods > 1:
        columns = 3 if max(map(len, labels)) < 16 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)


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
