"""What the finished runs of a table reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..evaluation.metrics import OF_ARCHITECTURE, format_values, mean_and_spread
from ..run.record import Run, read_run
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


#: the metrics that the verdict judges, and what its sentences call them
JUDGED = {"knn": "kNN accuracy", "linear": "Linear accuracy"}


#: the rule in a sentence, by the table's `verdict`
RULES = {
    "collaboration": "The rule: a collaboration gain is claimed only where the method's mean exceeds the mean of every "
    "baseline and of every control by more than the sum of the two sample standard deviations.",
    "comparison": "The rule: the method beats a row only where its mean exceeds that row's by more than the sum of the "
    "two sample standard deviations.",
}


def verdict(table: Table, results: Results) -> str:
    """What the figures say, by a rule that is fixed beforehand: a line for kNN and one for linear accuracy.

    To beat a row is to exceed its mean by more than the sum of the two sample standard deviations. A table with
    `verdict: collaboration` claims a collaboration gain where the method beats every baseline and every control;
    otherwise the rows that it does not beat are named, with the differences. This needs two seeds, a baseline and a
    control. A table with `verdict: comparison` only tells which baselines and controls the method beats.

    Args:
        table: the table.
        results: what its finished runs reached in one scenario.

    Returns:
        The lines; empty where the table has no method.
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
    if missing and all(len(results.finished.get(label, ())) == len(table.seeds) for label in missing):
        return f"{undecided} {listed(missing)} ran on images without labels, which have no accuracy."
    if missing:
        return f"{undecided} runs of {listed(missing)} are missing."
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
        sentences = [f"beats {listed(beaten)}."] if beaten else []
        sentences += [f"does not beat {listed(unbeaten)}."] if unbeaten else []
        text = f"{name}: {what} " + " It ".join(sentences)
    elif unbeaten:
        text = f"{name}: no collaboration gain. {what} does not beat {listed(unbeaten)}."
        if beaten:
            text += f" It beats {listed(beaten)}."
    else:
        text = (
            f"{name}: a collaboration gain. {what} beats every baseline and every control by more than the spread: "
            f"{listed(beaten)}."
        )
    untrained = results.values(method, metric, "before")
    if untrained:
        lead, noise = _lead(reached, untrained)
        if lead <= noise:
            text += f" It is not above the untrained encoder ({format_values(metric, untrained)})."
    return text


def _lead(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The difference of the two means, and the sum of the two spreads, which the difference must exceed."""
    (mean, spread), (other_mean, other_spread) = mean_and_spread(values), mean_and_spread(others)
    return mean - other_mean, (spread or 0.0) + (other_spread or 0.0)


def _points(difference: float) -> str:
    return f"{abs(difference):.1f}" if abs(difference) >= 0.05 else "less than 0.1"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
