"""What running a table would take: its runs, their cost, and the paper's figures. Nothing is trained or written."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UserError
from ..recipe import Recipe
from ..recipe_text import read_values
from ..reports.metrics import metric_title
from ..reports.units import format_flops
from ..rules import public_image_users
from .run_cost import RunCost, StepCosts
from .table import RESOURCES, Table, TableRow, TableScenario, cell_recipe
from .text_tables import plain_table
from .training_data import TrainingData, is_missing, training_data

_NEEDS_A_PATH = {"npz": "an .npz file", "images": "a folder of images", "folder": "a folder with train/ and test/"}
_PLACEHOLDER = "data.path=the-path-that-is-not-given"
_LABEL_WIDTH = 40

Note = Callable[[str], None]


def dry_run(table: Table, overrides: Sequence[str] = (), note: Note = lambda text: None) -> None:
    """Tell what `run_table` would run: rows, scenarios and seeds, operations, hours on this machine, paper's figures.

    The data need not be there: see `training_data`. Each kind of step is counted as by `fedssl cost`, and timed at the
    recipe's batch size or, where that takes long, at a smaller one. What the evaluation and the server take is left
    out.

    Args:
        table: see `load_table`.
        overrides: `key=value`, for all rows.
        note: is called with each part of the text.

    Raises:
        UserError: a recipe is refused, data that is there cannot be read, or a step fails.
    """
    if table.kind == "resources":
        _tell_resources(table, overrides, note)
        return
    runs = len(table.rows) * len(table.all_scenarios) * len(table.seeds)
    seeds = ", ".join(map(str, table.seeds))
    note(
        f"{table.name}: {runs} runs: {len(table.rows)} rows x {len(table.all_scenarios)} scenarios x "
        f"{len(table.seeds)} seeds ({seeds}). Nothing is run or written."
    )
    steps = StepCosts()
    total: list[RunCost] = []
    uncounted = 0
    needed: dict[str, None] = {}
    for scenario in table.all_scenarios:
        costs: list[RunCost | None] = []
        for row in table.rows:
            recipe, missing = _recipe_and_missing_data(table, row, scenario, overrides)
            needed |= dict.fromkeys(missing)
            data = training_data(recipe.data, recipe.seed, scenario.expected_data or table.expected_data)
            costs.append(None if data is None else _cost(steps, recipe, data, row))
        note("\n" + "\n".join([scenario.label, _scenario_table(table, scenario, costs)]).lstrip("\n"))
        total += [cost for cost in costs if cost is not None]
        uncounted += sum(cost is None for cost in costs)
    if needed:
        note("\nMissing for a run: " + "; ".join(needed) + ".")
    _tell_total(table, total, uncounted, note)


def _cost(steps: StepCosts, recipe: Recipe, data: TrainingData, row: TableRow) -> RunCost:
    try:
        return steps.of_run(recipe, data)
    except UserError as error:
        raise UserError(f"row {row.label!r}: {error}") from error


def _recipe_and_missing_data(
    table: Table, row: TableRow, scenario: TableScenario, overrides: Sequence[str]
) -> tuple[Recipe, list[str]]:
    """The recipe of a row's first seed, and a sentence for each thing that the user still has to bring."""
    given: dict[str, Any] = {}
    for values in (read_values(row.recipe), table.settings, scenario.settings, row.settings):
        given |= values.get("data") or {}
    given |= {key.removeprefix("data."): value for key, _, value in (text.partition("=") for text in overrides)}
    name = str(given.get("name"))
    missing = []
    no_path = name in _NEEDS_A_PATH and not given.get("path")
    if no_path:
        missing.append(f"give data.path=PATH, {_NEEDS_A_PATH[name]}")
    recipe = cell_recipe(table, row, table.seeds[0], [*overrides, *([_PLACEHOLDER] if no_path else [])], scenario)
    if not no_path and is_missing(recipe.data.path, "data.path"):
        missing.append(f"there is no {recipe.data.path}; put the data there or give data.path=PATH")
    if public_image_users(recipe) and recipe.data.public_path is None and not recipe.data.public_holdout:
        missing.append("give data.public_path=PATH, an .npz file or a folder of public images")
    if is_missing(recipe.data.public_path, "data.public_path"):
        missing.append(f"there is no {recipe.data.public_path}, the public images; put them there")
    for label, options in (recipe.evaluation.downstream or {}).items():
        if is_missing(options.path, f"evaluation.downstream.{label}.path"):
            missing.append(f"there is no {options.path}, the data of evaluation.downstream.{label}; put it there")
    return recipe, missing


def _scenario_table(table: Table, scenario: TableScenario, costs: Sequence[RunCost | None]) -> str:
    """A line a row with what one run takes and the paper's figures."""
    printed = [metric for metric in table.metrics if any(metric in figures for figures in scenario.paper.values())]
    header = ["row", "seeds", "steps a run", "FLOPs a run", "hours a run"]
    header += [f"paper: {_short_title(metric)}" for metric in printed]
    lines = []
    for row, cost in zip(table.rows, costs, strict=True):
        taken = ["-"] * 3 if cost is None else [f"{cost.steps:,.0f}", format_flops(cost.flops), _hours(cost.seconds)]
        paper = [scenario.paper.get(row.label, {}).get(metric, "-") for metric in printed]
        first, *more = textwrap.wrap(row.label, _LABEL_WIDTH)
        lines.append([first, str(len(table.seeds)), *taken, *paper])
        lines += [["  " + text, *[""] * (len(header) - 1)] for text in more]
    return plain_table(header, lines)


def _tell_total(table: Table, costs: Sequence[RunCost], uncounted: int, note: Note) -> None:
    seeds = len(table.seeds)
    flops, seconds = (seeds * sum(getattr(cost, name) for cost in costs) for name in ("flops", "seconds"))
    left_out = f", without {uncounted * seeds} runs whose data is missing" if uncounted else ""
    if costs:
        threads = torch.get_num_threads()
        device = "its GPU" if torch.cuda.is_available() else f"{threads} thread{'s' if threads > 1 else ''}"
        note(
            f"\nIn all{left_out}: {format_flops(flops)} FLOPs, {_hours(seconds)} hours on this machine with {device}, "
            "one run at a time."
        )
        note(
            "Estimated from steps on images of noise: each kind of step is counted (a multiply-add is two FLOPs) and "
            "timed, at a smaller batch where a whole one takes long, and multiplied by the steps. The evaluation, "
            "fine-tuning included, and the server's work are not in it; other programs make the hours longer."
        )
    if not any(scenario.paper for scenario in table.all_scenarios):
        note("The paper prints no figures for this table, or the table holds none.")


def _tell_resources(table: Table, overrides: Sequence[str], note: Note) -> None:
    for row in table.rows:
        cell_recipe(table, row, table.seeds[0], overrides)
    note(
        f"{table.name}: {len(table.rows)} rows, which are counted and not trained: it takes some seconds a row. "
        "Nothing is run or written."
    )
    printed = [metric for metric in RESOURCES if metric in table.metrics]
    lines = [
        [row.label, *(table.paper.get(row.label, {}).get(metric, "-") for metric in printed)] for row in table.rows
    ]
    note("\n" + plain_table(["row", *(f"paper: {metric}" for metric in printed)], lines))


def _short_title(metric: str) -> str:
    return metric_title(metric).replace(" accuracy", "").replace(" (%)", " %")


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"
