"""The tables in benchmarks/results, read for the pages that quote them: by column and row a figure, and its spread."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from fedssl.evaluation.metrics import mean_and_spread
from website.repository_files import ROOT

RESULTS = ROOT / "benchmarks" / "results"

#: by column and row: a figure, and its spread where several seeds have one
ResultTable = dict[str, dict[str, list[float]]]


@cache
def read(folder: Path) -> ResultTable:
    """Read what a folder holds: `table.csv` of a training or of resources, or measured times as JSON.

    Raises:
        ValueError: the folder has no table.
    """
    table: ResultTable = defaultdict(dict)
    if (folder / "table.csv").is_file():
        lines = read_csv(folder / "table.csv")
        (_add_resources if "resource" in lines[0] else _add_seeds)(table, lines)
    if (folder / "summary.csv").is_file():
        _add_the_papers(table, read_csv(folder / "summary.csv"))
    if (folder / "results.json").is_file():
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        (_add_rounds_of_many if "rows" in results else _add_operators)(table, results)
    if (folder / "simulation.json").is_file():
        _add_simulations(table, json.loads((folder / "simulation.json").read_text(encoding="utf-8")))
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
    """Read the lines of a file of comma-separated values."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _add_seeds(table: ResultTable, lines: list[dict[str, str]]) -> None:
    seeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        seeds[column_of(line), line["row"]].append(float(line["value"]))
    for (column, row), values in seeds.items():
        table[column][row] = [figure for figure in mean_and_spread(values) if figure is not None]


def _add_the_papers(table: ResultTable, lines: list[dict[str, str]]) -> None:
    for line in lines:
        if line["paper"]:
            table[f"paper's {column_of(line)}"][line["row"]] = [float(number) for number in line["paper"].split(" ± ")]


def _add_resources(table: ResultTable, lines: list[dict[str, str]]) -> None:
    for line in lines:
        for ending, ours, paper in (("", "ours", "paper"), (" ratio", "ratio", "paper_ratio")):
            table[line["resource"] + ending][line["row"]] = [float(line[ours])]
            if line[paper]:
                table[f"paper's {line['resource']}{ending}"][line["row"]] = [float(line[paper])]


def _add_operators(table: ResultTable, results: dict[str, Any]) -> None:
    for operator, entry in results.items():
        for case in entry["cases"]:
            ratios = [row["ratio"] for row in case["rows"][1:] if row["same_result"] and "ratio" in row]
            if ratios:
                table[f"{operator}, to the best peer"][case["size"]] = [min(ratios)]


def _add_rounds_of_many(table: ResultTable, results: dict[str, Any]) -> None:
    for row in results["rows"]:
        table["overhead, ms"][f"{row['clients']:,} clients"] = [1e3 * row["overhead"]]


def _add_simulations(table: ResultTable, results: dict[str, Any]) -> None:
    for simulation in results["simulations"]:
        phases = simulation["phases"]
        training = sum(phases[name] for name in ("forward", "backward", "optimizer"))
        share = training / (sum(phases.values()) - phases["evaluate"])
        table["overhead, %"][simulation["title"]] = [100 * (1 - share)]
    for training in results["trainings"]:
        rates = {}
        for loop, row in training["rows"].items():
            rates[loop] = row.get("images", training.get("images")) / median(row["times"])
            table[f"{loop}, images/s"][training["title"]] = [rates[loop]]
        for loop, rate in rates.items():
            ours = rates[loop.replace("lightly", "fedssl").replace("kornia", "fedssl")]
            table[f"times {loop}"][training["title"]] = [ours / rate]
