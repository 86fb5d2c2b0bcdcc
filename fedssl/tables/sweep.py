"""Choose the options of a table's rows by equally many trials of each, then run the table with the chosen ones.

The trials are a table of their own, whose rows have drawn settings and are measured on a part of the training images.
OUTPUT/trials and OUTPUT/winners are the two tables' folders.
"""

import copy
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.summary import summarise
from ..errors import UserError
from ..recipe.overrides import apply_override, flatten_keys
from .files import Note
from .results import Results, read_results
from .runner import ALL, CellsFailed, Part, run_table, table_cells
from .table import Sweep, Table, check_table


def trials_of(table: Table, trust: bool = False, overrides: Sequence[str] = ()) -> Table:
    """Return the table of a sweep's trials, number by number, so that a stopped sweep has as many of each row.

    Raises:
        UserError: without `trust`, if a trial names code to run; the rows' grids have not `trials` points; or an
            override sets what is drawn.
    """
    assert table.sweep is not None
    sweep = table.sweep
    swept = {f"{key}." for ranges in (sweep.ranges, *sweep.own_ranges.values()) for key in ranges}
    for override in overrides:
        key = override.partition("=")[0] + "."
        if any(one.startswith(key) or key.startswith(one) for one in swept):
            raise UserError(f"{override!r} would replace what the sweep draws: leave it out, or change the ranges")
    data = table.settings.get("data", {})  # may set another fraction, or be what `cell_recipe` refuses
    measured = {"data": {"validation_fraction": 0.2} | data} if isinstance(data, dict) else {}
    rows = []
    for number, row in itertools.product(range(sweep.trials), table.rows):
        settings = copy.deepcopy(row.settings)
        for key, value in drawn(sweep, row.label, number).items():
            apply_override(settings, f"{key}={json.dumps(value, ensure_ascii=False)}")
        rows.append(row.model_dump() | {"label": f"{row.label} {number}", "settings": settings})
    changes = {
        "name": f"{table.name}-trials",
        "seeds": [sweep.seed],
        "metrics": list(dict.fromkeys([sweep.metric, *table.metrics])),
        "settings": table.settings | measured,
        "rows": rows,
    }
    return check_table(table.model_dump(include={"expected_data"}) | changes, table.name, trust)


def drawn(sweep: Sweep, label: str, number: int) -> dict[str, Any]:
    """Return the values of a row's trial by key; only the row's label, the number and the seed decide them."""
    ranges = sweep.ranges | sweep.own_ranges.get(label, {})
    if sweep.draw == "random":
        generator = np.random.default_rng([sweep.seed, number, *label.encode()])
        return {key: values[int(generator.integers(len(values)))] for key, values in ranges.items()}
    points = list(itertools.product(*ranges.values()))
    if len(points) != sweep.trials:
        raise UserError(
            f"sweep: the grid of row {label!r} has {len(points)} points, but trials is {sweep.trials}, and all rows "
            "get as many: change trials or the lists, or set draw: random"
        )
    return dict(zip(ranges, points[number], strict=True))


def run_sweep(
    table: Table, output: Path, overrides: Sequence[str], jobs: int, note: Note, part: Part = ALL, trust: bool = False
) -> None:
    """Run the trials of a sweep that are missing, and then its table with each row's best settings.

    A trial that fails, such as one that diverges, is not chosen. Of a part, only trials run. A table without a sweep is
    run as it is. The arguments are those of `run_table`.
    """
    if table.sweep is None:
        run_table(table, output, overrides, jobs, note, part)
        return
    trials = trials_of(table, trust, overrides)
    recipes, metric = [cell.recipe for cell in table_cells(trials, output, overrides)], table.sweep.metric
    if not all(recipe.data.validation_fraction for recipe in recipes):
        raise UserError(
            "sweep: trials are measured on validation images: leave data.validation_fraction=0 out, or add "
            "data.validation_fraction=0.2 where data, given as a whole, replaces it"
        )
    found = summarise(recipes[0].data.model_dump())
    if metric != "view_retrieval" and found is not None and not found.labelled:
        raise UserError(f"sweep: images without labels have no {metric}: set sweep.metric to view_retrieval")
    share = metric.removeprefix("linear_")
    if share.startswith("0") and not all(float(share) in recipe.evaluation.few_labels for recipe in recipes):
        raise UserError(f"sweep: {metric} is not measured: add {share} to evaluation.few_labels of every row")
    try:
        run_table(trials, output / "trials", overrides, jobs, note, part)
    except CellsFailed as error:
        note(f"{error}; a trial that failed is not chosen")
    if part == ALL:
        winners = _winners(table, table.sweep, read_results(trials, output / "trials"), trials, note)
        run_table(winners, output / "winners", [*overrides, "data.validation_fraction=0"], jobs, note)


def _winners(table: Table, sweep: Sweep, results: Results, trials: Table, note: Note) -> Table:
    """Return the table with the settings of each row's best trial; of equal ones the first."""
    rows, settings = [], {row.label: row.settings for row in trials.rows}
    for row in table.rows:
        trials_of_row = {n: results.after.get((f"{row.label} {n}", sweep.metric), {}) for n in range(sweep.trials)}
        values_of = {n: seeds.get(sweep.seed, math.nan) for n, seeds in trials_of_row.items()}
        reached = {n: value for n, value in values_of.items() if math.isfinite(value)}
        if not reached:
            raise UserError(f"no trial of row {row.label!r} has a value of {sweep.metric}: see the trials' folders")
        best = max(reached, key=lambda n: reached[n])
        rows.append(row.model_copy(update={"settings": settings[f"{row.label} {best}"]}))
        values = drawn(sweep, row.label, best)
        chosen = ", ".join(f"{key}={value}" for key, value in flatten_keys(values).items()) if values else ""
        found = f"trial {best} is the best of {len(reached)}, {sweep.metric} {reached[best]:.1f}"
        note(f"\n{row.label}: {found}: {chosen}")
    return table.model_copy(update={"rows": rows, "sweep": None})
