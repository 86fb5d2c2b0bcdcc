"""A small table, and run folders with made-up figures, as the engine would leave them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.creation import Checkpoint, write_manifest
from fedssl.run_folder.directory import RunDirectory
from fedssl.tables.table import Table

ROWS = [{"label": label, "recipe": "local_only"} for label in ("ours", "alone", "control 1", "control 2", "other")]


def table_values(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "seeds": [0, 1],
        "method": "ours",
        "baselines": ["alone"],
        "controls": ["control 1", "control 2"],
        "rows": ROWS,
    } | changes


def make_table(**changes: Any) -> Table:
    return Table.model_validate(table_values(**changes))


Row = tuple[int, str, str, float]


def evaluated(number: int, metric: str, values: Iterable[float]) -> list[Row]:
    """A metric of each client in turn, and its mean."""
    values = list(values)
    rows = [(number, str(k), metric, value) for k, value in enumerate(values)]
    return [*rows, (number, "mean", metric, sum(values) / len(values))]


def write_run(
    path: Path,
    recipe: Recipe,
    rows: Iterable[Row],
    *,
    counts: list[list[int]] | None = None,
    class_names: tuple[str, ...] = ("cat", "dog"),
    refused: Iterable[tuple[int, int, str]] = (),
) -> RunDirectory:
    """Write a run's folder; it counts as finished where the rows reach the recipe's last round."""
    rows = list(rows)
    files = {"recipe.yaml": recipe.to_yaml()}
    if counts is not None:
        lines = [",".join(["client", *class_names])]
        lines += [",".join(map(str, [k, *row])) for k, row in enumerate(counts)]
        files["partition.csv"] = "\n".join(lines) + "\n"
    directory = RunDirectory.create(path, files)
    last = max((row[0] for row in rows), default=-1)
    if rows:
        directory.append_metrics(rows)
        for number, k, reason in refused:
            directory.append_refused(number, {k: reason})
        lengths = {file.name: file.stat().st_size for file in path.glob("[mr]e*.csv")}
        write_manifest(path, Checkpoint(round=last, lengths=lengths, finished=last == recipe.rounds))
    return RunDirectory.open(path)
