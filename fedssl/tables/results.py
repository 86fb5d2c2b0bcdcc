"""What a table's runs reached: the verdict, which follows a fixed rule, and the table as text, page and picture."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.datasets import load_dataset
from ..data.partitions import partition_indices
from ..reading import parse_recipe
from ..reports.page import escape, html_figure, html_table, page
from ..reports.plots import Card, draw_table_picture, format_values, mean_and_spread, metric_title
from ..reports.report import flatten
from ..run_record import Run, read_run
from ..storage import write_atomically
from .table import UNTRAINED, Table, TableScenario, cell_path, slug

#: the metrics that a gain is claimed in, and what sentences call them
JUDGED = {"knn": "kNN accuracy", "linear": "Linear accuracy"}
_RULES = {
    "collaboration": "The rule: a collaboration gain is said only where the method's mean exceeds the mean of every "
    "baseline and of every control by more than the sum of the two sample standard deviations.",
    "comparison": "The rule: the method beats a row only where its mean exceeds that row's by more than the sum of the "
    "two sample standard deviations.",
}


@dataclass(frozen=True)
class Results:
    """What the finished runs of a table reached, in one of its scenarios.

    Attributes:
        label: the scenario's; empty where the table has none.
        paper: the paper's figures by row label and metric.
        finished: their seeds by label, in the table's order; a label without any is left out.
        before, after: values by (label, metric) and seed: of the untrained encoders, and after the last round.
    """

    label: str = ""
    paper: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    finished: dict[str, list[int]] = field(default_factory=dict)
    before: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    after: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)

    def values(self, label: str, metric: str, when: Literal["before", "after"] = "after") -> list[float]:
        """One value a finished seed."""
        found = self.after if when == "after" else self.before
        return list(found.get((label, metric), {}).values())

    def has_paper(self, metric: str) -> bool:
        """Whether the paper has a figure of any row."""
        return any(metric in figures for figures in self.paper.values())

    @property
    def picture(self) -> str:
        """The picture's file name."""
        return f"picture-{slug(self.label)}.png" if self.label else "picture.png"


def read_results(table: Table, output: Path, scenario: TableScenario | None = None) -> Results:
    """What the finished cells of a table's folder reached in a scenario; the others are left out.

    Raises:
        UserError: a run's folder that cannot be read.
    """
    scenario = scenario or table.all_scenarios[0]
    results = Results(scenario.label, scenario.paper)
    for row in table.rows:
        for seed in table.seeds:
            path = cell_path(output, row.label, seed, scenario.label)
            if not (path / "recipe.yaml").is_file():
                continue
            run = read_run(path)
            if not run.finished:
                continue
            results.finished.setdefault(row.label, []).append(seed)
            for metric in table.metrics:
                by_round = run.overall(metric)
                for found, number in ((results.before, 0), (results.after, run.rounds)):
                    if number in by_round:
                        found.setdefault((row.label, metric), {})[seed] = by_round[number]
    return results


def verdict(table: Table, results: Results) -> str:
    """What the figures say, a line a metric, by a rule that is fixed beforehand; empty without a method.

    A collaboration gain is said where the method's mean exceeds the mean of every baseline and of every control by
    more than the sum of the two sample standard deviations, of kNN and linear accuracy each for itself. Otherwise
    those that it does not beat are named, with the differences. It takes two seeds, a baseline and a control.

    A table whose verdict is a `comparison` says by the same measure which baselines and controls the method beats.
    """
    if table.method is None:
        return ""
    return "\n".join(_judge(table, table.method, results, metric) for metric in JUDGED if metric in table.metrics)


def _judge(table: Table, method: str, results: Results, metric: str) -> str:
    name = JUDGED[metric]
    rivals = [*table.baselines, *table.controls]
    collaboration = table.verdict == "collaboration"
    undecided = f"{name}: nothing can be said about {'a collaboration gain' if collaboration else 'the order'}:"
    if collaboration and not (table.baselines and table.controls):
        return f"{undecided} the table has no {'controls' if table.baselines else 'baselines'}."
    missing = [label for label in (method, *rivals) if len(results.values(label, metric)) < len(table.seeds)]
    if missing:
        return f"{undecided} runs of {_listed(missing)} are missing."
    if len(table.seeds) < 2:
        return f"{undecided} one seed has no spread, at least two are needed."
    reached = results.values(method, metric)
    beaten, unbeaten = [], []
    for label in rivals:
        lead, noise = _lead(reached, results.values(label, metric))
        if lead > noise:
            beaten.append(f"{label} by {_points(lead)}")
        elif lead >= -noise:
            side = "above" if lead > 0 else "below" if lead < 0 else "away"
            unbeaten.append(f"{label} ({_points(lead)} {side}, within the spread of {_points(noise)})")
        else:
            unbeaten.append(f"{label} ({_points(lead)} below)")
    what = f"{method} with {format_values(metric, reached)}"
    if not collaboration:
        sentences = [f"beats {_listed(beaten)}."] if beaten else []
        sentences += [f"does not beat {_listed(unbeaten)}."] if unbeaten else []
        text = f"{name}: {what} " + " It ".join(sentences)
    elif unbeaten:
        text = f"{name}: no collaboration gain. {what} does not beat {_listed(unbeaten)}."
        if beaten:
            text += f" It beats {_listed(beaten)}."
    else:
        text = (
            f"{name}: a collaboration gain. {what} beats every baseline and every control by more than the spread: "
            f"{_listed(beaten)}."
        )
    untrained = results.values(method, metric, "before")
    if untrained:
        lead, noise = _lead(reached, untrained)
        if lead <= noise:
            text += f" It is not above the untrained encoder ({format_values(metric, untrained)})."
    return text


def _lead(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The difference of two means, and the sum of their spreads, which it must exceed."""
    (mean, spread), (other_mean, other_spread) = mean_and_spread(values), mean_and_spread(others)
    return mean - other_mean, (spread or 0.0) + (other_spread or 0.0)


def _points(difference: float) -> str:
    return f"{abs(difference):.1f}" if abs(difference) >= 0.05 else "less than 0.1"


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def _reference(table: Table) -> str:
    """The row whose runs tell what untrained encoders reach."""
    return table.method or table.rows[0].label


def _cells_of_rows(table: Table, results: Results) -> list[tuple[str, str, list[str]]]:
    """(label, role, formatted cells) a row, the untrained encoders' first; a metric's paper column follows it."""

    def cells(label: str, when: Literal["before", "after"], paper: Mapping[Any, str]) -> list[str]:
        found = []
        for metric in table.metrics:
            found.append(format_values(metric, results.values(label, metric, when)))
            if results.has_paper(metric):
                found.append(paper.get(metric, ""))
        return found

    rows = [(UNTRAINED, "", cells(_reference(table), "before", {}))]
    return rows + [
        (row.label, table.role(row.label), cells(row.label, "after", results.paper.get(row.label, {})))
        for row in table.rows
    ]


def _header(table: Table, results: Results) -> list[str]:
    header = []
    for metric in table.metrics:
        header.append(metric_title(metric))
        if results.has_paper(metric):
            header.append("in the paper")
    return header


def _reading(table: Table, results: Sequence[Results]) -> str:
    """How to read the figures."""
    seeds = ", ".join(map(str, table.seeds))
    spread = f"Mean ± sample standard deviation over the seeds {seeds}" if len(table.seeds) > 1 else f"Seed {seeds}"
    missing = [
        f"{row.label} ({one.label})" if one.label else row.label
        for one in results
        for row in table.rows
        if len(one.finished.get(row.label, [])) < len(table.seeds)
    ]
    unfinished = f" Not all runs of {_listed(missing)} are finished." if missing else ""
    return (
        f"{spread}, each the mean over the clients' models or the global model after the last round; {UNTRAINED} is "
        f"{_reference(table)} before the first.{unfinished}"
    )


_SHORT_TITLES = {"kNN accuracy (%)": "kNN %", "linear accuracy (%)": "linear %"}
_LABEL_WIDTH = 34


def format_table(table: Table, results: Results) -> str:
    """The table as plain text, narrow enough for a terminal."""
    header = [_SHORT_TITLES.get(title, title) for title in _header(table, results)]
    lines = [["", *header]]
    for label, _, cells in _cells_of_rows(table, results):
        first, *rest = textwrap.wrap(label, _LABEL_WIDTH)
        lines += [[first, *cells], *(["  " + more, *[""] * len(cells)] for more in rest)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rendered = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rendered.insert(1, "-" * max(map(len, rendered)))
    return "\n".join(rendered)


def write_results(table: Table, results: Sequence[Results], output: Path) -> None:
    """Write table.md, table.csv, summary.csv, table.html and a picture a scenario into `output`.

    Args:
        table: the table.
        results: one a scenario, in the table's order; at least one run must be finished.
        output: the table's folder.

    Raises:
        UserError: a file that cannot be written.
    """
    write_atomically(output / "table.md", _markdown(table, results).encode())
    write_atomically(output / "table.csv", _csv(table, results).encode())
    write_atomically(output / "summary.csv", _summary(table, results).encode())
    figures = []
    for one in results:
        if one.finished:
            figures.append(_picture(table, one, output))
            data = io.BytesIO()
            figures[-1].savefig(data, format="png", dpi=150)
            write_atomically(output / one.picture, data.getvalue())
    write_atomically(output / "table.html", _html(table, results, figures).encode())


def _whole_table(table: Table, results: Sequence[Results]) -> tuple[list[tuple[str, int]], list[str], list[list[str]]]:
    """All scenarios side by side: (scenario, columns) for each, the header, and the rows.

    The first columns are the row's label and, in a table with a verdict, its role.
    """
    judged = table.method is not None
    groups = [(one.label, len(_header(table, one))) for one in results]
    header = ["row", *(["role"] if judged else []), *(title for one in results for title in _header(table, one))]
    sides = [_cells_of_rows(table, one) for one in results]
    rows = [
        [line[0][0], *([line[0][1]] if judged else []), *(cell for _, _, cells in line for cell in cells)]
        for line in zip(*sides, strict=True)
    ]
    return groups, header, rows


def _sentences(table: Table, results: Sequence[Results]) -> list[str]:
    """The verdict's lines, each with its scenario."""
    return [
        f"{one.label}: {line}" if one.label else line for one in results for line in verdict(table, one).splitlines()
    ]


def _html(table: Table, results: Sequence[Results], figures: Sequence[Figure]) -> str:
    sentences = _sentences(table, results)
    described = f"{' '.join(table.description.split())} {' '.join(sentences)}"
    pictures = "".join(html_figure(figure, described, png=True) for figure in figures)
    body = "" if table.scenarios else pictures
    groups, header, rows = _whole_table(table, results)
    first = len(header) - sum(columns for _, columns in groups)
    classes = {i: "method" for i, row in enumerate(rows) if row[0] == table.method}
    above = [("", first), *groups] if table.scenarios else []
    body += "<h2>Figures</h2>\n" + html_table(header, rows, first, classes, above)
    body += f'<p class="note">{escape(_reading(table, results))}</p>'
    if sentences:
        listed = "".join(f"<li>{escape(line)}</li>" for line in sentences)
        body += f"<h2>Verdict</h2>\n<ul>{listed}</ul>\n<p class=note>{escape(_RULES[table.verdict])}</p>"
    if table.scenarios:  # the pictures of all would push the table far down
        body += f"<h2>Pictures</h2>\n{pictures}"
    settings = [(row.label, row.recipe, _one_line(row.settings)) for row in table.rows]
    body += "<h2>Rows</h2>\n" + html_table(("row", "recipe", "settings of its own"), settings, text_columns=3)
    if table.scenarios:
        scenarios = [(scenario.label, _one_line(scenario.settings)) for scenario in table.scenarios]
        body += html_table(("scenario", "settings"), scenarios, text_columns=2)
    if table.settings:
        body += f"<p>All rows: {escape(_one_line(table.settings))}</p>"
    body += (
        "<p class=note>Every run's resolved recipe, metrics and checkpoint stand in the folders beside this page.</p>"
    )
    return page(table.name, body)


def _one_line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in flatten(values).items()) if values else ""


def _markdown(table: Table, results: Sequence[Results]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    groups, header, rows = _whole_table(table, results)
    first = len(header) - sum(columns for _, columns in groups)
    if table.scenarios:  # Markdown has one line of header
        labels = [label for label, columns in groups for _ in range(columns)]
        header = header[:first] + [f"{label}: {title}" for label, title in zip(labels, header[first:], strict=True)]
    lines = [f"# {table.name}", "", " ".join(table.description.split()), ""]
    lines += [line(header), "|" + "---|" * first + "---:|" * (len(header) - first)]
    lines += [line(row) for row in rows]
    lines += ["", _reading(table, results)]
    sentences = _sentences(table, results)
    if sentences:
        lines += ["", *(f"- {text}" for text in sentences), "", _RULES[table.verdict]]
    return "\n".join(lines) + "\n"


def _csv(table: Table, results: Sequence[Results]) -> str:
    """One line a row, seed and metric (and scenario, where there are any); values in full."""
    scenario = ["scenario"] if table.scenarios else []
    lines: list[list[object]] = [["row", "role", *scenario, "seed", "metric", "value"]]
    for one in results:
        where = [one.label] if table.scenarios else []
        for name, role, label, found in _found(table, one):
            for metric in table.metrics:
                by_seed = found.get((label, metric), {})
                lines += [[name, role, *where, seed, metric, repr(value)] for seed, value in by_seed.items()]
    return _csv_text(lines)


def _summary(table: Table, results: Sequence[Results]) -> str:
    """One line a row and metric (and scenario): mean, sample standard deviation, seeds, and the paper's figure."""
    scenario = ["scenario"] if table.scenarios else []
    lines: list[list[object]] = [["row", "role", *scenario, "metric", "mean", "spread", "seeds", "paper"]]
    for one in results:
        where = [one.label] if table.scenarios else []
        for name, role, label, found in _found(table, one):
            for metric in table.metrics:
                values = list(found.get((label, metric), {}).values())
                mean, spread = mean_and_spread(values) if values else (None, None)
                paper = "" if name == UNTRAINED else one.paper.get(name, {}).get(metric, "")
                figures = ["" if figure is None else repr(figure) for figure in (mean, spread)]
                lines.append([name, role, *where, metric, *figures, len(values), paper])
    return _csv_text(lines)


def _found(table: Table, results: Results) -> list[tuple[str, str, str, dict[tuple[str, str], dict[int, float]]]]:
    """(row, role, label to look up, where) of each row, the untrained encoders' first."""
    rows = [(UNTRAINED, "", _reference(table), results.before)]
    return rows + [(row.label, table.role(row.label), row.label, results.after) for row in table.rows]


def _csv_text(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


# The picture

_MOST_CLIENTS = 5


def _picture(table: Table, results: Results, output: Path) -> Figure:
    """The table's picture; the clients are those of the reference row's first run, or of any."""
    label = _reference(table) if _reference(table) in results.finished else next(iter(results.finished))
    run = read_run(cell_path(output, label, results.finished[label][0], results.label))
    panels: dict[str, list[tuple[str, str, list[float], list[float]]]] = {
        metric: [
            (
                row.label,
                table.role(row.label),
                results.values(row.label, metric, "before"),
                results.values(row.label, metric),
            )
            for row in table.rows
        ]
        for metric in table.metrics
    }
    untrained: dict[str, list[float]] = {
        metric: results.values(_reference(table), metric, "before") for metric in table.metrics
    }
    seeds = f"{len(table.seeds)} seeds" if len(table.seeds) > 1 else f"seed {table.seeds[0]}"
    cards, clients = _cards(run), int(run.recipe["partition"]["clients"])
    shown = f", {_MOST_CLIENTS} of them shown" if clients > _MOST_CLIENTS else ""
    data = run.recipe["data"]
    name = Path(data["path"]).stem if data["name"] in ("npz", "folder") else data["name"]
    subtitle = f"{results.label}: " if results.label else ""
    subtitle += f"{name}, {clients} client{'s' * (clients > 1)}{shown}, {run.rounds} rounds, {seeds}"
    # "et al. 2024" ends no sentence
    title = re.split(r"\.\s(?=[A-Z])", " ".join(table.description.split()))[0] or table.name
    return draw_table_picture(title, subtitle, cards, panels, untrained, verdict(table, results))


def _cards(run: Run) -> list[Card]:
    """The clients of a run with some of their images, and the public images."""
    recipe = parse_recipe(dict(run.recipe))
    dataset = load_dataset(recipe.data, recipe.seed)
    rows = partition_indices(dataset.train_labels, recipe.partition, recipe.seed)
    uses_public = any(r.needs_public_images for r in recipe.regularizers) or any(
        a.needs_public_images for a in recipe.aggregators
    )
    cards = []
    for k, mine in enumerate(rows[:_MOST_CLIENTS]):
        labels = dataset.train_labels[mine]
        present = sorted(set(labels.tolist()))
        names = [dataset.class_names[label] for label in present]
        held = f"only {' and '.join(names)}" if len(names) <= 2 else f"{len(names)} classes"
        if len(names) == len(dataset.class_names):
            held = f"all {len(names)} classes"
        architecture = recipe.architectures[k % len(recipe.architectures)]
        lines = (textwrap.shorten(held, 26, placeholder=" ..."), architecture, f"{len(mine)} images")
        cards.append(Card(f"client {k}", "\n".join(lines), _mosaic(dataset.train_images[mine], labels)))
    if uses_public and dataset.public_images is not None:
        public = dataset.public_images
        images = _mosaic(public, torch.zeros(len(public), dtype=torch.int64))
        cards.append(Card("public images", f"without labels,\nfor all clients\n{len(public)} images", images))
    return cards


_MOSAIC_ROWS, _MOSAIC_COLUMNS = 3, 4


def _mosaic(images: Tensor, labels: Tensor) -> NDArray[np.uint8]:
    """Some images [n, C, H, W] in a grid, spread evenly over the classes' order: uint8 [h, w] or [h, w, 3]."""
    count = _MOSAIC_ROWS * _MOSAIC_COLUMNS
    order = labels.argsort(stable=True)
    chosen = images[order[torch.linspace(0, len(order) - 1, count).long()]]
    _, channels, height, width = chosen.shape
    framed = F.pad(chosen, (0, 1, 0, 1), value=255)
    grid = framed.reshape(_MOSAIC_ROWS, _MOSAIC_COLUMNS, channels, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    array: NDArray[np.uint8] = grid.reshape(
        _MOSAIC_ROWS * (height + 1), _MOSAIC_COLUMNS * (width + 1), channels
    ).numpy()
    return array[:-1, :-1, 0] if channels == 1 else array[:-1, :-1]
