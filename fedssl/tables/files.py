"""Write a table's files: the table as text, data and pictures, beside its runs."""

import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..evaluation.metrics import format_values, mean_and_spread, metric_title
from ..reports.plots import draw_table_picture, png_bytes
from ..run_folder.record import read_run
from ..run_folder.storage import csv_text, make_folder, write_atomically
from .results import RULE, Results, listed, reference_row, verdict
from .table import UNTRAINED, Table, cell_path

#: receives a text for the user
Note = Callable[[str], None]


def write_description(table: Table, output: Path, overrides: Sequence[str]) -> None:
    """Write OUTPUT/table.yaml: the table, below the overrides as comments. OUTPUT is made if missing."""
    make_folder(output)
    comment = "".join(f"# with {' '.join(override.split())}\n" for override in overrides)
    settings = yaml.safe_dump(table.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    write_atomically(output / "table.yaml", (comment + settings).encode())


def write_results(table: Table, results: Sequence[Results], output: Path) -> None:
    """Write table.md, table.csv, summary.csv and a picture a scenario into the table's folder `output`.

    `results` has one entry for each scenario, in the table's order. At least one run must be finished.

    Raises:
        UserError: a file cannot be written.
    """
    write_atomically(output / "table.md", _markdown(table, results).encode())
    values, summary = _values_and_summary(table, results)
    write_atomically(output / "table.csv", values.encode())
    write_atomically(output / "summary.csv", summary.encode())
    for scenario in results:
        if scenario.finished:
            label = next(row for row in (reference_row(table), *scenario.finished) if row in scenario.finished)
            run = cell_path(output, label, scenario.finished[label][0], scenario.label)
            figure = draw_picture(table, scenario, read_run(run).recipe)
            write_atomically(output / scenario.picture, png_bytes(figure))


def format_table(table: Table, results: Results) -> str:
    """Return one scenario of the table as plain text, narrow enough for a terminal: long labels take several lines."""
    labels = ["", UNTRAINED, *(row.label for row in table.rows)]
    header, *rows = zip(labels, *_columns(table, results), strict=True)
    return plain_table([title.replace(" accuracy (%)", " %") for title in header], rows, label_width=34)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], label_width: int) -> str:
    """Return a table in columns, the first aligned to the left and the others to the right, with a ruled header.

    The first cell of each row is wrapped to `label_width` characters.
    """
    lines = [list(header)]
    for label, *cells in rows:
        first, *more = textwrap.wrap(label, label_width) or [label]
        lines += [[first, *cells], *(["  " + text, *[""] * len(cells)] for text in more)]
    first_width, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for label, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        texts.append("  ".join([label.ljust(first_width), *padded]).rstrip())
    return "\n".join([texts[0], "-" * max(map(len, texts)), *texts[1:]])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table. A bar in a cell is escaped, and white space is folded.

    The first `text_columns` columns are aligned to the left, the others to the right.
    """
    rule = "|" + "---|" * text_columns + "---:|" * (len(header) - text_columns)
    return "\n".join([_markdown_line(header), rule, *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _columns(table: Table, results: Results) -> Iterator[list[str]]:
    """Yield a column of each metric: its title, and the cells of the untrained encoders and of each row.

    A column with the paper's figures follows, if the paper has any.
    """
    for metric in table.metrics:
        before = results.values(reference_row(table), metric, "before")
        values = [before, *(results.values(row.label, metric) for row in table.rows)]
        yield [metric_title(metric), *(format_values(metric, of_row) for of_row in values)]
        if any(metric in figures for figures in results.paper.values()):
            papers = (results.paper.get(row.label, {}).get(metric, "") for row in table.rows)
            yield ["in the paper", "", *papers]


def _how_to_read(table: Table, results: Sequence[Results]) -> str:
    """Return a sentence on what the figures are, and one on missing runs."""
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


def _markdown(table: Table, results: Sequence[Results]) -> str:
    """Return table.md, in which all scenarios stand side by side under one line of header, as Markdown has it."""
    text_columns = [["row", UNTRAINED, *(row.label for row in table.rows)]]
    if table.method is not None:
        text_columns.append(["role", "", *(table.role(row.label) for row in table.rows)])
    columns, verdicts = list(text_columns), []
    for scenario in results:
        prefix = f"{scenario.label}: " if scenario.label else ""
        columns += [[prefix + title, *cells] for title, *cells in _columns(table, scenario)]
        verdicts += [f"- {prefix}{line}" for line in verdict(table, scenario).splitlines()]
    header, *rows = zip(*columns, strict=True)
    figures = markdown_table(header, rows, len(text_columns))
    parts = [f"# {table.name}", " ".join(table.description.split()), figures, _how_to_read(table, results)]
    if verdicts:
        parts += ["\n".join(verdicts), RULE]
    return "\n\n".join(parts) + "\n"


def _values_and_summary(table: Table, results: Sequence[Results]) -> tuple[str, str]:
    """Return table.csv, with a line for each row, seed and metric, and summary.csv, with one for each row and metric.

    Lines begin with the scenario if there are any. The summary has mean, sample standard deviation, number of seeds
    and the paper's figure. Values are in full precision.
    """
    first_columns = ["row", "role", *(["scenario"] if table.scenarios else [])]
    values: list[list[object]] = [[*first_columns, "seed", "metric", "value"]]
    summary: list[list[object]] = [[*first_columns, "metric", "mean", "spread", "seeds", "paper"]]
    for scenario in results:
        rows = [(UNTRAINED, "", reference_row(table), scenario.before)]
        rows += [(row.label, table.role(row.label), row.label, scenario.after) for row in table.rows]
        for (label, role, measured, reached), metric in itertools.product(rows, table.metrics):
            by_seed = reached.get((measured, metric), {})
            first_cells = [label, role, *([scenario.label] if table.scenarios else [])]
            values += [[*first_cells, seed, metric, repr(value)] for seed, value in by_seed.items()]
            mean_spread = mean_and_spread(list(by_seed.values())) if by_seed else (None, None)
            figures = ["" if figure is None else repr(figure) for figure in mean_spread]
            paper = scenario.paper.get(label, {}).get(metric, "")
            summary.append([*first_cells, metric, *figures, len(by_seed), paper])
    return csv_text(values), csv_text(summary)


def draw_picture(table: Table, results: Results, recipe: Mapping[str, Any]) -> Figure:
    """Draw the picture of one scenario: every row's bars and the verdict; `recipe` is a run's, as plain values."""
    reference = reference_row(table)
    panels: dict[str, list[tuple[str, str, list[float], list[float]]]] = {metric: [] for metric in table.metrics}
    for metric, bars in panels.items():
        for row in table.rows:
            before, after = results.values(row.label, metric, "before"), results.values(row.label, metric)
            bars.append((row.label, table.role(row.label), before, after))
    untrained: dict[str, list[float]] = {m: results.values(reference, m, "before") for m in table.metrics}
    seeds = f"{len(table.seeds)} seeds" if len(table.seeds) > 1 else f"seed {table.seeds[0]}"
    clients, rounds, data = int(recipe["partition"]["clients"]), recipe["rounds"], recipe["data"]
    name = Path(data["path"]).stem if data["name"] in ("npz", "images", "folder") else data["name"]
    subtitle = f"{results.label}: " if results.label else ""
    subtitle += f"{name}, {clients} client{'s' * (clients > 1)}, {rounds} round{'s' * (rounds > 1)}, {seeds}"
    # the description's first sentence; "et al. 2024" does not end it
    title = re.split(r"\.\s(?=[A-Z])", " ".join(table.description.split()))[0] or table.name
    return draw_table_picture(title, subtitle, panels, untrained, verdict(table, results))
