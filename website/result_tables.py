"""The tables in benchmarks/results, read for the pages that quote them: by column and row a figure, and its spread."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.simulation_tables import overhead
from fedssl.evaluation.metrics import mean_and_spread
from website.repository_files import ROOT

RESULTS = ROOT / "benchmarks" / "results"
#: a column, a row, and their figure, with its spread where several seeds have one
Cell = tuple[str, str, list[float]]


@cache
def read(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Read what a folder holds, by column and row: `table.csv` of a training or of resources, or times as JSON.

    Raises:
        ValueError: the folder has no table.
    """
    table: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for column, row, figure in _cells(folder):
        table[column][row] = figure
    if not table:
        raise ValueError(f"{folder} has no table.csv, results.json or simulation.json")
    return dict(table)


def controls(folder: Path) -> list[str]:
    """List the rows of a table of training that are controls."""
    return list({line["row"]: None for line in read_csv(folder / "table.csv") if line["role"] == "control"})


def column_of(line: dict[str, str]) -> str:
    """Name the column of a line of a table of training: the metric, and the scenario in brackets."""
    return f"{line['metric']} [{line['scenario']}]" if "scenario" in line else line["metric"]


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the lines of a file of comma-separated values; none where there is no file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def _cells(folder: Path) -> Iterator[Cell]:
    seeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in read_csv(folder / "table.csv"):
        if "resource" in line:
            yield from _resource(line)
        else:
            seeds[column_of(line), line["row"]].append(float(line["value"]))
    for place, values in seeds.items():
        yield *place, [figure for figure in mean_and_spread(values) if figure is not None]
    for line in read_csv(folder / "summary.csv"):
        if line["paper"]:
            yield f"paper's {column_of(line)}", line["row"], [float(number) for number in line["paper"].split(" ± ")]
    for name, cells in (("results.json", _times), ("simulation.json", _simulations)):
        if (folder / name).is_file():
            yield from cells(json.loads((folder / name).read_text(encoding="utf-8")))


def _resource(line: dict[str, str]) -> Iterator[Cell]:
    for ending, ours, paper in (("", "ours", "paper"), (" ratio", "ratio", "paper_ratio")):
        yield line["resource"] + ending, line["row"], [float(line[ours])]
        if line[paper]:
            yield f"paper's {line['resource']}{ending}", line["row"], [float(line[paper])]


def _times(results: dict[str, Any]) -> Iterator[Cell]:
    """The rounds of many clients, or the operators beside their best peer."""
    if "rows" in results:
        for row in results["rows"]:
            yield "overhead, ms", f"{row['clients']:,} clients", [1e3 * row["overhead"]]
        return
    for operator, entry in results.items():
        for case in entry["cases"]:
            ratios = [row["ratio"] for row in case["rows"][1:] if row["same_result"] and "ratio" in row]
            if ratios:
                yield f"{operator}, to the best peer", case["size"], [min(ratios)]


def _simulations(results: dict[str, Any]) -> Iterator[Cell]:
    """What was measured: a simulation that failed has no phases, and a loop that is not installed no times."""
    for simulation in results["simulations"]:
        if "phases" in simulation:
            yield "overhead, %", simulation["title"], [100 * overhead(simulation["phases"])]
    for training in results["trainings"]:
        measured = {loop: row for loop, row in training.get("rows", {}).items() if row["times"]}
        rates = {
            loop: row.get("images", training.get("images")) / median(row["times"]) for loop, row in measured.items()
        }
        for loop, rate in rates.items():
            ours = rates[loop.replace("lightly", "fedssl").replace("kornia", "fedssl")]
            yield f"{loop}, images/s", training["title"], [rate]
            yield f"times {loop}", training["title"], [ours / rate]
