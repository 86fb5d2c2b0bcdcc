"""The verdicts of the tables in benchmarks/results, from their figures, and the command that writes them.

`python -m website.result_verdicts` judges each `table.md` again by its `table.csv`, and writes the sentences, the rule
and the pictures anew. A test fails where the sentences differ from what the rule says now.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import yaml

from fedssl.reports.plots import png_bytes
from fedssl.tables.files import draw_picture
from fedssl.tables.results import RULE, Results, verdict
from fedssl.tables.table import UNTRAINED, Table, cell_recipe
from website.result_tables import RESULTS, read_csv


def judged_tables() -> list[Path]:
    """The files that end with a verdict."""
    return [path for path in sorted(RESULTS.rglob("table.md")) if "\nThe rule: " in path.read_text(encoding="utf-8")]


def judged(path: Path) -> str:
    """A table's text with the verdicts that its figures have now.

    Lines of before that no scenario of `table.yaml` stands for are gone.
    """
    text = path.read_text(encoding="utf-8")
    table, scenarios = _read(path)
    lines = [
        f"- {results.label}: {line}" if results.label else f"- {line}"
        for results in scenarios
        for line in verdict(table, results).splitlines()
    ]
    before = re.sub(r"(\n(- .*)?)*$", "", text.partition("\nThe rule: ")[0])
    return "\n".join([before, "", *lines, "", RULE]) + "\n"


def redraw(path: Path) -> None:
    """Draw the pictures that lie beside a table again."""
    table, scenarios = _read(path)
    for scenario, results in zip(table.all_scenarios, scenarios, strict=True):
        if (picture := path.with_name(results.picture)).is_file():
            recipe = cell_recipe(table, table.rows[0], table.seeds[0], scenario=scenario)
            picture.write_bytes(png_bytes(draw_picture(table, results, recipe.model_dump(mode="json"))))


def _read(path: Path) -> tuple[Table, list[Results]]:
    """The table that a file belongs to, and the values of its scenarios."""
    table = Table.model_validate(yaml.safe_load(path.with_name("table.yaml").read_text(encoding="utf-8")))
    return table, list(_results(table, read_csv(path.with_name("table.csv"))))


def _results(table: Table, lines: list[dict[str, str]]) -> Iterator[Results]:
    for scenario in table.all_scenarios:
        results = Results(scenario.label)
        for line in (one for one in lines if one.get("scenario", "") == scenario.label):
            row, of_rows, seed = line["row"], results.after, int(line["seed"])
            if row == UNTRAINED:
                row, of_rows = table.method or "", results.before
            elif seed not in results.finished.setdefault(row, []):
                results.finished[row].append(seed)
            of_rows.setdefault((row, line["metric"]), {})[seed] = float(line["value"])
        for metric in table.metrics:
            of_clients = [results.after.get((label, metric), {}) for label in _ceiling(table)]
            seeds = [seed for seed in table.seeds if of_clients and all(seed in values for values in of_clients)]
            results.ceiling[metric] = {seed: fmean(values[seed] for values in of_clients) for seed in seeds}
        yield results


def _ceiling(table: Table) -> list[str]:
    """For each client, the label of the row that trains its architecture on all images; a single row counts for all."""
    if len(table.ceiling) < 2:
        return table.ceiling
    rows = {row.label: row.settings for row in table.rows}
    by_architecture = {rows[label]["architectures"][0]: label for label in table.ceiling}
    settings = table.settings | rows[table.method or ""]
    names = settings["architectures"]
    return [by_architecture[names[client % len(names)]] for client in range(settings["partition"]["clients"])]


if __name__ == "__main__":
    for file in judged_tables():
        file.write_text(judged(file), encoding="utf-8")
        redraw(file)
