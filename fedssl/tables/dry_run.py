"""List a table's runs, what they would take, and the paper's figures, without training or writing anything."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.datasets import Dataset, balanced_subset, load_dataset
from ..data.files import kind_of
from ..data.images import listed_images
from ..data.options import SOURCES, DataOptions
from ..data.stored_images import LabelledImages
from ..data.summary import summarise
from ..engines.pace import SECONDS, measure_pace
from ..engines.progress import format_duration
from ..errors import UserError
from ..evaluation.evaluate import EvaluationOptions
from ..evaluation.metrics import short_title
from ..federation import build_federation
from ..recipe.overrides import read_values
from ..recipe.presets import with_overrides
from ..recipe.recipe import Recipe
from ..recipe.rules import public_image_users
from ..reports.cost import format_flops
from ..untrusted import expand_home
from .files import Note, plain_table
from .table import ExpectedData, Table, TableRow, TableScenario, cell_recipe

_PLACEHOLDER = "data.path=the-path-that-is-not-given"
#: where the recipe does not say how many there are, as many as Hetero-SSFL's paper has
_PUBLIC_IMAGES = 5000
#: of a recipe; a sweep's trials may differ in the rate alone
_COSTS_NOTHING: dict[str, Any] = {"name": True, "description": True, "seed": True, "training": {"learning_rate"}}


def dry_run(table: Table, overrides: Sequence[str] = (), note: Note = lambda text: None) -> None:
    """List what `run_table` would run: rows, scenarios and seeds, operations, hours on this machine, paper's figures.

    The data may be missing: see `training_data`. What a run takes is counted and timed as before the run itself
    (engines/pace.py). The evaluation is left out.

    Raises:
        UserError: a recipe is refused, the data cannot be read, or a step fails.
    """
    runs = len(table.rows) * len(table.all_scenarios) * len(table.seeds)
    seeds = ", ".join(map(str, table.seeds))
    note(
        f"{table.name}: {runs} runs: {len(table.rows)} rows x {len(table.all_scenarios)} scenarios x "
        f"{len(table.seeds)} seeds ({seeds}). Nothing is run or written."
    )
    all_costs: list[RunCost | None] = []
    known: dict[tuple[str, torch.Size], RunCost] = {}
    missing: dict[str, None] = {}
    read: tuple[object, Dataset | None] = (None, None)  # what was read, and the data, which rows mostly share
    for scenario in table.all_scenarios:
        costs: list[RunCost | None] = []
        for row in table.rows:
            recipe, missing_data = _recipe_and_missing_data(table, row, scenario, overrides)
            missing |= dict.fromkeys(missing_data)
            wanted = recipe.data, scenario.expected_data or table.expected_data
            if read[0] != wanted:
                read = wanted, training_data(recipe.data, recipe.seed, wanted[1])
            data = read[1]
            if data is None:
                costs.append(None)
                continue
            kind = recipe.model_dump_json(exclude=_COSTS_NOTHING), data.train_images.shape
            try:
                known[kind] = known.get(kind) or run_cost(recipe, data)
            except UserError as error:
                raise UserError(f"row {row.label!r}: {error}") from error
            costs.append(known[kind])
        note("\n" + "\n".join([scenario.label, _scenario_table(table, scenario, costs)]).lstrip("\n"))
        all_costs += costs
    if missing:
        note("\nMissing for a run: " + "; ".join(missing) + ".")
    _note_total(table, all_costs, note)


def _recipe_and_missing_data(
    table: Table, row: TableRow, scenario: TableScenario, overrides: Sequence[str]
) -> tuple[Recipe, list[str]]:
    """Return the recipe of a row's first seed, and a sentence for each thing that the user still has to bring."""
    given: dict[str, Any] = {}
    for values in (read_values(row.recipe), table.settings, scenario.settings, row.settings):
        given |= data if isinstance(data := values.get("data"), dict) else {}
    of_data = [override for override in overrides if re.match(r"data\b", override)]
    changed = with_overrides({"data": given}, of_data, row.recipe)["data"]
    given = changed if isinstance(changed, dict) else {}  # `cell_recipe` says what is wrong
    name = str(given.get("name"))
    missing = []
    needed = SOURCES[name].path if name in SOURCES else None
    no_path = needed is not None and not given.get("path")
    if no_path:
        missing.append(f"give data.path=PATH, {needed}")
    recipe = cell_recipe(table, row, table.seeds[0], [*overrides, *([_PLACEHOLDER] if no_path else [])], scenario)
    if not no_path and _is_missing(recipe.data.path):
        missing.append(f"there is no {recipe.data.path}; put the data there or give data.path=PATH")
    if public_image_users(recipe) and recipe.data.public_path is None and not recipe.data.public_holdout:
        missing.append("give data.public_path=PATH, an .npz file or a folder of public images")
    if _is_missing(recipe.data.public_path):
        missing.append(f"there is no {recipe.data.public_path}, the public images; put them there")
    for label, options in (recipe.evaluation.downstream or {}).items():
        if _is_missing(options.path):
            missing.append(f"there is no {options.path}, the data of evaluation.downstream.{label}; put it there")
    return recipe, missing


def _is_missing(path: Path | None) -> bool:
    return path is not None and kind_of(expand_home(path)) == "missing"


def _scenario_table(table: Table, scenario: TableScenario, costs: Sequence[RunCost | None]) -> str:
    printed = [metric for metric in table.metrics if any(metric in figures for figures in scenario.paper.values())]
    papers = [f"paper: {short_title(metric)}" for metric in printed]
    header = ["row", "seeds", "steps a run", "FLOPs a run", "time a run", *papers]
    lines = []
    for row, cost in zip(table.rows, costs, strict=True):
        cells = cost and [f"{cost.steps:,.0f}", format_flops(cost.flops), format_duration(cost.seconds)]
        paper = [scenario.paper.get(row.label, {}).get(metric, "-") for metric in printed]
        lines.append([row.label, str(len(table.seeds)), *(cells or ["-"] * 3), *paper])
    return plain_table(header, lines, label_width=40)


def _note_total(table: Table, all_costs: Sequence[RunCost | None], note: Note) -> None:
    seeds, costs = len(table.seeds), [cost for cost in all_costs if cost is not None]
    uncounted = seeds * (len(all_costs) - len(costs))
    left_out = f", without {uncounted} runs whose data is missing" if uncounted else ""
    if costs:
        flops, seconds = seeds * sum(cost.flops for cost in costs), seeds * sum(cost.seconds for cost in costs)
        device = "its GPU" if torch.cuda.is_available() else "its processor"
        in_all = f"{format_flops(flops)} FLOPs, {format_duration(seconds)} on this machine with {device}"
        note(f"\nIn all{left_out}: {in_all}, one run at a time.")
        note(
            "Estimated from steps that are counted (a multiply-add is two FLOPs) and timed, at a smaller batch where a "
            "whole one takes long, and on images of noise where the data are not read. The evaluation, fine-tuning "
            "included, is not in it."
        )
    if not any(scenario.paper for scenario in table.all_scenarios):
        note("The paper prints no figures for this table, or the table holds none.")


def training_data(options: DataOptions, seed: int, expected: ExpectedData | None) -> Dataset | None:
    """Return the training images that `options` name; None if the data is missing and `expected` is None.

    Digits and .npz files are read; all other images are noise. The sizes of torchvision's data sets are known.
    Image files are listed with their labels and columns, and not opened, so all are taken to be usable. Other images
    are taken to be of equally large classes. Public images may be missing.
    """
    source, files = SOURCES[options.name], None
    if source.torchvision is not None and source.shape is not None:  # its published size
        size = ExpectedData(images=source.images, classes=source.classes, shape=source.shape)
    elif _is_missing(options.path):
        if expected is None:
            return None
        size = expected
    elif not source.image_files:
        return load_dataset(options.model_copy(update={"public_path": None}), seed)
    else:
        listing, seen = listed_images(options), summarise(options.model_dump(mode="json"))
        assert seen is not None
        size = ExpectedData(images=len(listing.train), shape=(seen.channels, seen.side, seen.side))
        names, files = tuple(listing.class_names), listing.split(listing.train, torch.arange(len(listing.train)))
    if files is None:
        labels = torch.arange(size.images) % size.classes
        names = tuple(map(str, range(size.classes))) if size.classes > 1 else ()
        files = LabelledImages(labels, labels)
    shape = size.shape if options.image_size is None else (size.shape[0], options.image_size, options.image_size)
    count = size.images - math.ceil(options.validation_fraction * size.images) - options.public_holdout
    count = max(0, count if options.train_limit is None else min(count, options.train_limit))
    files = balanced_subset(files, count, seed, stream=0)
    noise = _noise(count, shape)
    return Dataset(options.name, noise, files.labels, noise[:0], files.labels[:0], names, None, columns=files.columns)


@dataclass(frozen=True)
class RunCost:
    """Cost of the training of one run, on average over the draws of clients that are sampled or drop out."""

    steps: float  # of all clients in all rounds
    flops: float  # of these steps; a multiply-add counts as two
    seconds: float  # on this machine


def run_cost(recipe: Recipe, data: Dataset) -> RunCost:
    """Return what the training of a run takes, on as many public images of noise as the recipe asks for.

    Raises:
        UserError: the recipe does not fit the data, a client has fewer images than a batch, or a step fails.
    """
    if not recipe.schedule.trains:
        return RunCost(0.0, 0.0, 0.0)
    if public_image_users(recipe):
        given = [number for number in (recipe.data.public_holdout, recipe.data.public_limit) if number]
        count = min(given, default=_PUBLIC_IMAGES)
        data = replace(data, public_images=_noise(count, tuple(data.train_images.shape[1:])))
    alone = {"engine": "in-process", "evaluation": EvaluationOptions()}
    pace = measure_pace(build_federation(recipe.model_copy(update=alone), data), SECONDS)
    steps = recipe.rounds * pace.steps
    return RunCost(steps, steps * pace.flops, pace.seconds(recipe.rounds))


def _noise(count: int, shape: tuple[int, ...]) -> Tensor:
    """Return so many images of noise, uint8 [count, *shape]; neighbours share their pixels, which takes no memory."""
    pixels = math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (count + pixels,), generator=generator, dtype=torch.uint8)
    return values.unfold(0, pixels, 1)[:count].unflatten(1, shape)
