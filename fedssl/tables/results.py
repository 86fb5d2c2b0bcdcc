"""Read the values that a table's finished runs reached, and judge them by a fixed rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..evaluation.metrics import OF_ARCHITECTURE, WORST_CLIENT, format_values, mean_and_spread, split_metric
from ..run_folder.record import Run, read_run
from .table import Table, TableScenario, cell_path, slug

_LOWER_IS_BETTER = ("loss", "alignment", "uniformity")


@dataclass(frozen=True)
class Results:
    """The values that a table's finished runs reached in one scenario.

    Attributes:
        label: the scenario's; empty if the table has no scenarios.
        paper: the paper's figures by row label and metric.
        finished: the seeds of finished runs by row label, in the table's order; a label without any is left out.
        before: values of the untrained encoders by (row label, metric) and seed.
        after: values after the last round by (row label, metric) and seed.
        ceiling: the table's ceiling by metric and seed, see `_ceiling`.
    """

    label: str = ""
    paper: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    finished: dict[str, list[int]] = field(default_factory=dict)
    before: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    after: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    ceiling: dict[str, dict[int, float]] = field(default_factory=dict)

    def values(self, label: str, metric: str, when: Literal["before", "after"] = "after") -> list[float]:
        """Return a row's values of a metric, one for each finished seed."""
        values = self.after if when == "after" else self.before
        return list(values.get((label, metric), {}).values())

    @property
    def picture(self) -> str:
        """Return the picture's file name."""
        return f"picture-{slug(self.label)}.png" if self.label else "picture.png"


def read_results(table: Table, output: Path, scenario: TableScenario | None = None) -> Results:
    """Read the values of a scenario, by default the first, from a table's folder; unfinished cells are left out."""
    scenario = scenario or table.all_scenarios[0]
    results = Results(scenario.label, scenario.paper)
    runs: dict[tuple[str, int], Run] = {}
    for row in table.rows:
        for seed in table.seeds:
            path = cell_path(output, row.label, seed, scenario.label)
            run = read_run(path) if (path / "recipe.yaml").is_file() else None
            if run is None or not run.finished:
                continue
            runs[row.label, seed] = run
            results.finished.setdefault(row.label, []).append(seed)
            for metric in table.metrics:
                for values, number in ((results.before, 0), (results.after, run.rounds)):
                    if (value := _value(run, metric, number)) is not None:
                        values.setdefault((row.label, metric), {})[seed] = value
    for seed in table.seeds:
        method, rows = runs.get((table.method or "", seed)), {label: runs.get((label, seed)) for label in table.ceiling}
        of_clients = _ceiling(method, rows) if method else []
        for metric in table.metrics:
            of_rows = [results.after.get((label, metric), {}).get(seed) for label in of_clients]
            if of_rows and None not in of_rows:
                results.ceiling.setdefault(metric, {})[seed] = fmean(value for value in of_rows if value is not None)
    return results


def _ceiling(method: Run, rows: Mapping[str, Run | None]) -> list[str]:
    """Return, for each client of the method, the label of the row that trained the client's architecture.

    A table's single row counts for every client. Empty if a client has none.
    """
    if len(rows) == 1:
        return list(rows)
    labels = {run.architecture_of(0): label for label, run in rows.items() if run}
    clients = {int(who) for _, who, _ in method.values if who.isdigit()}
    architectures = [method.architecture_of(k) for k in sorted(clients)]
    return [labels[name] for name in architectures] if set(architectures) <= set(labels) else []


def _value(run: Run, metric: str, number: int) -> float | None:
    """Return a metric's value after a round; None if it was not measured.

    `METRIC@ARCHITECTURE` is the mean over the clients with this architecture. `METRIC@worst` is the lowest value of any
    client, or the highest where lower is better, and the global model's where there is one, as every client has that.
    """
    measure, _, architecture = metric.partition(OF_ARCHITECTURE)
    if not architecture:
        return run.overall(metric).get(number)
    owners = {who: value for (after, who, name), value in run.values.items() if (after, name) == (number, measure)}
    if architecture == WORST_CLIENT:
        owners.pop("mean", None)
        worst = max if split_metric(measure)[1] in _LOWER_IS_BETTER else min
        return worst(owners.values(), default=None)
    values = [value for k, value in owners.items() if k.isdigit() and run.architecture_of(int(k)) == architecture]
    return fmean(values) if values else None


def reference_row(table: Table) -> str:
    """Return the label of the row whose runs also give the values of the untrained encoders."""
    return table.method or table.rows[0].label


#: the metrics that the verdict judges, and their names in its sentences
JUDGED = {"knn": "kNN accuracy", "linear": "Linear accuracy"}
#: how a row is beaten, in sentences
RULE = (
    "The rule: a row is compared with the method seed by seed, and beaten where the 95 % interval of the mean "
    "difference is above 0 (Student's t): where the mean exceeds the differences' standard deviation, which stands "
    "behind ±, times 9.0 for two seeds, 2.5 for three and 1.2 for five. Where the interval holds 0, it is a tie. A "
    "collaboration gain is claimed only where the method beats every baseline and every control."
)


def verdict(table: Table, results: Results) -> str:
    """Return the verdict on one scenario: a line for kNN and one for linear accuracy; empty without a method.

    Rows share their seeds, and with these the clients' images, so they are compared seed by seed, see `RULE`. A table
    with `verdict: collaboration` claims a collaboration gain if the method beats every baseline and control, or names
    those that it does not beat; this needs two seeds, a baseline and a control. With `comparison` it only names them.
    """
    if table.method is None:
        return ""
    return "\n".join(_judge(table, table.method, results, metric) for metric in JUDGED if metric in table.metrics)


def _judge(table: Table, method: str, results: Results, metric: str) -> str:
    count = len(table.seeds)
    name = f"{JUDGED[metric]} ({count} seed{'s' * (count > 1)})"
    rivals = [*table.baselines, *table.controls]
    collaboration = table.verdict == "collaboration"
    undecided = f"{name}: nothing can be said about {'a collaboration gain' if collaboration else 'the order'}:"
    if collaboration and not (table.baselines and table.controls):
        return f"{undecided} the table has no {'controls' if table.baselines else 'baselines'}."
    missing = [label for label in (method, *rivals) if len(results.values(label, metric)) < count]
    if missing and all(len(results.finished.get(label, ())) == count for label in missing):
        return f"{undecided} {listed(missing)} ran on images without labels, which have no accuracy."
    if missing:
        return f"{undecided} runs of {listed(missing)} are missing."
    if count < 2:
        return f"{undecided} one seed has no spread, at least two are needed."
    reached = results.after[method, metric]
    said: dict[str, list[str]] = {"beats": [], "is tied with": [], "is behind": []}
    for label in rivals:
        lead, spread, limit = _lead(reached, results.after[label, metric])
        points = f"{_points(lead)} ± {spread:.1f}"
        if lead > limit:
            said["beats"].append(f"{label} by {points}")
        else:
            side = "above" if lead > 0 else "below" if lead < 0 else "away"
            said["is tied with" if lead >= -limit else "is behind"].append(f"{label} ({points} {side})")
    method_with_value = f"{method} with {format_values(metric, list(reached.values()))}"
    gain = "no collaboration gain. " if said["is tied with"] or said["is behind"] else "a collaboration gain. "
    sentences = ". It ".join(f"{verb} {listed(found)}" for verb, found in said.items() if found)
    text = f"{name}: {gain if collaboration else ''}{' '.join(filter(None, (method_with_value, sentences)))}."
    if collaboration and table.ceiling:
        text += " " + _room(table, method, results, metric)
    if untrained := results.before.get((method, metric)):
        lead, _, limit = _lead(reached, untrained)
        if lead <= limit:
            text += f" It is not above the untrained encoder ({format_values(metric, list(untrained.values()))})."
    return text


def _room(table: Table, method: str, results: Results, metric: str) -> str:
    """Return a sentence on the share of the room between the best control and the ceiling that the method closes."""
    ceiling, name = results.ceiling.get(metric, {}), listed(table.ceiling)
    if len(ceiling) < len(table.seeds):
        absent = [label for label in table.ceiling if len(results.values(label, metric)) < len(table.seeds)]
        problem = f"Runs of {listed(absent)} are missing" if absent else f"{name} trained other architectures"
        return f"{problem}, so the room above the controls is unknown."
    best = max(table.controls, key=lambda label: fmean(results.values(label, metric)))
    room, _, limit = _lead(ceiling, results.after[best, metric])
    if room <= limit:
        return f"There is no room to close: {name} does not beat {best}, the best control."
    reached, lowest = results.after[method, metric], results.after[best, metric]
    mean, spread = mean_and_spread([100 * (reached[seed] - lowest[seed]) / room for seed in table.seeds])
    room_text = f"the {_points(room)} points between {best}, the best control, and {name}"
    return f"It closes {mean:.0f} ± {spread:.0f} % of {room_text}."


def _lead(values: Mapping[int, float], others: Mapping[int, float]) -> tuple[float, float, float]:
    """Return the mean difference by seed, its sample standard deviation, and what the mean must exceed."""
    from scipy.special import stdtrit  # here, as importing it takes time

    differences = [value - others[seed] for seed, value in values.items() if seed in others]
    mean, spread = mean_and_spread(differences)
    if spread is None:
        return mean, 0.0, 0.0
    return mean, spread, spread * float(stdtrit(len(differences) - 1, 0.975)) / len(differences) ** 0.5


def _points(difference: float) -> str:
    return f"{abs(difference):.1f}" if abs(difference) >= 0.05 else "less than 0.1"


def listed(items: Sequence[str]) -> str:
    """Join items as `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
