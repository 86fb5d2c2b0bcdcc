"""What a table's folder holds beside its runs: the table as text, data, page and pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from ..evaluation.metrics import format_values, mean_and_spread, metric_title
from ..recipe.overrides import flatten_keys
from ..reports.page import PageFigure, PageTable, page_figure, render_page
from ..reports.plots import png_bytes
from ..run.storage import csv_text, make_folder, write_atomically
from .picture import draw_picture
from .results import RULES, Results, listed, reference_row, verdict
from .table import UNTRAINED, Table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table. A bar in a cell is escaped, and white space is folded.

    Args:
        header: the columns' titles.
        rows: the cells; each row is as long as the header.
        text_columns: how many columns, from the left, hold text; the others are aligned to the right.
    """
    rule = "|" + "---|" * text_columns + "---:|" * (len(header) - text_columns)
    return "\n".join([_markdown_line(header), rule, *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in columns: the first one is aligned to the left, the others to the right; a rule below the header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for cells in (header, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


_SHORT_TITLES = {"kNN accuracy (%)": "kNN %", "linear accuracy (%)": "linear %"}


_LABEL_WIDTH = 34


def write_description(table: Table, output: Path, overrides: Sequence[str]) -> None:
    """Write OUTPUT/table.yaml: the table that is run, below the overrides as comments. OUTPUT is made where missing.

    Raises:
        UserError: the folder or the file cannot be written.
    """
    make_folder(output)
    comment = "".join(f"# with {' '.join(override.split())}\n" for override in overrides)
    settings = yaml.safe_dump(table.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    write_atomically(output / "table.yaml", (comment + settings).encode())


def write_results(table: Table, results: Sequence[Results], output: Path) -> None:
    """Write table.md, table.csv, summary.csv, table.html and a picture a scenario into `output`.

    Args:
        table: the table.
        results: one for each scenario, in the table's order; at least one run must be finished.
        output: the table's folder.

    Raises:
        UserError: a file that cannot be written, or the data for the pictures are missing.
    """
    write_atomically(output / "table.md", _markdown(table, results).encode())
    write_atomically(output / "table.csv", _values_as_csv(table, results).encode())
    write_atomically(output / "summary.csv", _summary_as_csv(table, results).encode())
    description = f"{_folded_description(table)} {' '.join(_verdicts(table, results))}"
    pictures = []
    for scenario in results:
        if scenario.finished:
            figure = draw_picture(table, scenario, output)
            pictures.append(page_figure(figure, description, png=True))
            write_atomically(output / scenario.picture, png_bytes(figure))
    write_atomically(output / "table.html", _html(table, results, pictures).encode())


def format_table(table: Table, results: Results) -> str:
    """One scenario of the table as plain text, narrow enough for a terminal: long labels take several lines."""
    header = ["", *(_SHORT_TITLES.get(title, title) for title in _header(table, results))]
    lines = []
    for label, _, cells in _rows(table, results):
        first, *more = textwrap.wrap(label, _LABEL_WIDTH)
        lines += [[first, *cells], *(["  " + text, *[""] * len(cells)] for text in more)]
    return plain_table(header, lines)


# Cells as text


def _rows(table: Table, results: Results) -> list[tuple[str, str, list[str]]]:
    """(label, role, formatted cells) a row, the untrained encoders' first; a metric's paper column follows it."""

    def cells(label: str, when: Literal["before", "after"], paper: Mapping[Any, str]) -> list[str]:
        formatted = []
        for metric in table.metrics:
            formatted.append(format_values(metric, results.values(label, metric, when)))
            if results.has_paper(metric):
                formatted.append(paper.get(metric, ""))
        return formatted

    rows = [(UNTRAINED, "", cells(reference_row(table), "before", {}))]
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


def _whole_table(table: Table, results: Sequence[Results]) -> tuple[list[tuple[str, int]], list[str], list[list[str]]]:
    """All scenarios side by side: (scenario, columns) for each, the header, and the rows.

    The first columns are the row's label and, in a table with a verdict, its role.
    """
    judged = table.method is not None
    groups = [(scenario.label, len(_header(table, scenario))) for scenario in results]
    header = [
        "row",
        *(["role"] if judged else []),
        *(title for scenario in results for title in _header(table, scenario)),
    ]
    sides = [_rows(table, scenario) for scenario in results]
    rows = [
        [line[0][0], *([line[0][1]] if judged else []), *(cell for _, _, cells in line for cell in cells)]
        for line in zip(*sides, strict=True)
    ]
    return groups, header, rows


def _folded_description(table: Table) -> str:
    return " ".join(table.description.split())


def _verdicts(table: Table, results: Sequence[Results]) -> list[str]:
    """The verdict's lines, each with its scenario."""
    return [
        f"{scenario.label}: {line}" if scenario.label else line
        for scenario in results
        for line in verdict(table, scenario).splitlines()
    ]


def _how_to_read(table: Table, results: Sequence[Results]) -> str:
    """What the figures are, and which runs are missing."""
    seeds = ", ".join(map(str, table.seeds))
    spread = f"Mean ± sample standard deviation over the seeds {seeds}" if len(table.seeds) > 1 else f"Seed {seeds}"
    missing = [
        f"{row.label} ({scenario.label})" if scenario.label else row.label
        for scenario in results
        for row in table.rows
        if len(scenario.finished.get(row.label, [])) < len(table.seeds)
    ]
    unfinished = f" Not all runs of {listed(missing)} are finished." if missing else ""
    return (
        f"{spread}, each the mean over the clients' models or the global model after the last round; {UNTRAINED} is "
        f"{reference_row(table)} before the first.{unfinished}"
    )


# The files


def _html(table: Table, results: Sequence[Results], pictures: Sequence[PageFigure]) -> str:
    groups, header, rows = _whole_table(table, results)
    first = len(header) - sum(columns for _, columns in groups)
    classes = {i: "method" for i, row in enumerate(rows) if row[0] == table.method}
    above = [("", first), *groups] if table.scenarios else []
    settings = [(row.label, row.recipe, _settings_line(row.settings)) for row in table.rows]
    scenarios = [(scenario.label, _settings_line(scenario.settings)) for scenario in table.scenarios]
    return render_page(
        "table.html",
        title=table.name,
        pictures=pictures,
        figures=PageTable(header, rows, first, classes, above),
        reading=_how_to_read(table, results),
        verdicts=_verdicts(table, results),
        rule=RULES[table.verdict],
        rows=PageTable(("row", "recipe", "settings of its own"), settings, text_columns=3),
        scenarios=PageTable(("scenario", "settings"), scenarios, text_columns=2) if scenarios else None,
        settings=_settings_line(table.settings),
    )


def _settings_line(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in flatten_keys(dict(settings)).items()) if settings else ""


def _markdown(table: Table, results: Sequence[Results]) -> str:
    groups, header, rows = _whole_table(table, results)
    first = len(header) - sum(columns for _, columns in groups)
    if table.scenarios:  # a Markdown table has one line of header
        labels = [label for label, columns in groups for _ in range(columns)]
        header = header[:first] + [f"{label}: {title}" for label, title in zip(labels, header[first:], strict=True)]
    parts = [f"# {table.name}", _folded_description(table), markdown_table(header, rows, first)]
    parts.append(_how_to_read(table, results))
    verdicts = _verdicts(table, results)
    if verdicts:
        parts += ["\n".join(f"- {line}" for line in verdicts), RULES[table.verdict]]
    return "\n\n".join(parts) + "\n"


def _values_as_csv(table: Table, results: Sequence[Results]) -> str:
    """One line a row, seed and metric (and scenario, where there are any); values in full."""
    title = ["scenario"] if table.scenarios else []
    lines: list[list[object]] = [["row", "role", *title, "seed", "metric", "value"]]
    for scenario in results:
        label_cell = [scenario.label] if table.scenarios else []
        for name, role, label, by_row in _rows_of_values(table, scenario):
            for metric in table.metrics:
                by_seed = by_row.get((label, metric), {})
                lines += [[name, role, *label_cell, seed, metric, repr(value)] for seed, value in by_seed.items()]
    return csv_text(lines)


def _summary_as_csv(table: Table, results: Sequence[Results]) -> str:
    """One line a row and metric (and scenario): mean, sample standard deviation, seeds, and the paper's figure."""
    title = ["scenario"] if table.scenarios else []
    lines: list[list[object]] = [["row", "role", *title, "metric", "mean", "spread", "seeds", "paper"]]
    for scenario in results:
        label_cell = [scenario.label] if table.scenarios else []
        for name, role, label, by_row in _rows_of_values(table, scenario):
            for metric in table.metrics:
                values = list(by_row.get((label, metric), {}).values())
                mean, spread = mean_and_spread(values) if values else (None, None)
                paper = "" if name == UNTRAINED else scenario.paper.get(name, {}).get(metric, "")
                figures = ["" if figure is None else repr(figure) for figure in (mean, spread)]
                lines.append([name, role, *label_cell, metric, *figures, len(values), paper])
    return csv_text(lines)


def _rows_of_values(
    table: Table, results: Results
) -> list[tuple[str, str, str, dict[tuple[str, str], dict[int, float]]]]:
    """(row, role, label, values by label and metric) of each row, the untrained encoders' first.

    `label` is the row whose values they are: the untrained encoders' are the reference row's before training.
    """
    rows = [(UNTRAINED, "", reference_row(table), results.before)]
    return rows + [(row.label, table.role(row.label), row.label, results.after) for row in table.rows]
