"""What the finished runs of a table reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..reports.metrics import OF_ARCHITECTURE
from ..run_record import Run, read_run
from .table import Table, TableScenario, cell_path, slug


@dataclass(frozen=True)
class Results:
    """What the finished runs of a table reached in one of its scenarios.

    Attributes:
        label: the scenario's; empty where the table has no scenarios.
        paper: the paper's figures by row label and metric.
        finished: the seeds of finished runs by row label, in the table's order; a label without any is left out.
        before: values of the untrained encoders by (row label, metric) and seed.
        after: values after the last round by (row label, metric) and seed.
    """

    label: str = ""
    paper: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    finished: dict[str, list[int]] = field(default_factory=dict)
    before: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    after: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)

    def values(self, label: str, metric: str, when: Literal["before", "after"] = "after") -> list[float]:
        """A row's values of a metric, one for each finished seed."""
        by_row = self.after if when == "after" else self.before
        return list(by_row.get((label, metric), {}).values())

    def has_paper(self, metric: str) -> bool:
        """Whether the paper has a figure of this metric for any row."""
        return any(metric in figures for figures in self.paper.values())

    @property
    def picture(self) -> str:
        """The picture's file name."""
        return f"picture-{slug(self.label)}.png" if self.label else "picture.png"


def read_results(table: Table, output: Path, scenario: TableScenario | None = None) -> Results:
    """Read what the finished cells in a table's folder reached; unfinished cells are left out.

    Args:
        table: the table.
        output: its folder.
        scenario: one of the table's; by default its first.

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
                by_round = _by_round(run, metric)
                for by_row, number in ((results.before, 0), (results.after, run.rounds)):
                    if number in by_round:
                        by_row.setdefault((row.label, metric), {})[seed] = by_round[number]
    return results


def _by_round(run: Run, metric: str) -> dict[int, float]:
    """A metric's value by round; of `METRIC@ARCHITECTURE` the mean over the clients with this architecture."""
    measure, _, architecture = metric.partition(OF_ARCHITECTURE)
    if not architecture:
        return run.overall(metric)
    values: dict[int, list[float]] = {}
    for (number, who, name), value in run.values.items():
        if name == measure and who.isdigit() and run.architecture_of(int(who)) == architecture:
            values.setdefault(number, []).append(value)
    return {number: fmean(of_clients) for number, of_clients in values.items()}


def reference_row(table: Table) -> str:
    """The label of the row whose runs tell what untrained encoders reach."""
    return table.method or table.rows[0].label
