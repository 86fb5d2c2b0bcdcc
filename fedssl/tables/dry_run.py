"""What running a table would take: its runs, their cost, and the paper's figures. Nothing is trained or written."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.datasets import Dataset, load_dataset
from ..data.files import expanded, kind_of
from ..data.image_files import subfolders
from ..data.options import DataOptions
from ..data.partitions import PartitionOptions, deal
from ..data.summary import outline
from ..errors import UserError
from ..evaluation.evaluate import EvaluationOptions
from ..evaluation.metrics import short_title
from ..federation import build_federation
from ..recipe.overrides import read_values
from ..recipe.recipe import Recipe
from ..recipe.rules import check_shares, public_image_users
from ..reports.cost import RoundCost, estimate, format_flops
from ..training import steps_of_round
from .files import plain_table
from .table import RESOURCES, ExpectedData, Table, TableRow, TableScenario, cell_recipe

#: the published sizes of the data sets that torchvision downloads: training images, classes, shape
_PUBLISHED = {
    "cifar10": ExpectedData(images=50_000, classes=10, shape=(3, 32, 32)),
    "cifar100": ExpectedData(images=50_000, classes=100, shape=(3, 32, 32)),
    "fashion_mnist": ExpectedData(images=60_000, classes=10, shape=(1, 28, 28)),
}


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The training images of a run, without their pixels.

    Attributes:
        labels: int64 [n], as the runs have them; for data that is not read, classes of equal size.
        classes: number of classes; 1 without labels.
        shape: channels, height and width.
    """

    labels: Tensor
    classes: int
    shape: tuple[int, int, int]

    def client_sizes(self, recipe: Recipe) -> list[int]:
        """How many images each client gets.

        Raises:
            UserError: the images cannot be divided as the recipe asks, or a client has fewer than a batch.
        """
        no_pixels = torch.zeros((), dtype=torch.uint8).expand(len(self.labels), *self.shape)
        names = tuple(map(str, range(self.classes))) if self.classes > 1 else ()
        images = Dataset(recipe.data.name, no_pixels, self.labels, no_pixels[:0], self.labels[:0], names, None)
        client_rows = deal(images, recipe.partition, recipe.seed)
        check_shares(recipe, client_rows, None)
        return [len(rows) for rows in client_rows]


def training_data(options: DataOptions, seed: int, expected: ExpectedData | None) -> TrainingData | None:
    """The training images that `options` name.

    Digits and .npz files are read. The sizes of torchvision's data sets are known, and image files are counted and not
    opened, so that all their images are taken to be usable and their classes equally large.

    Args:
        options: a recipe's; the public images need not be there.
        seed: the run's.
        expected: what missing data will hold.

    Returns:
        None where the data is missing and nothing is expected of it.

    Raises:
        UserError: data that is there and cannot be read.
    """
    known = _PUBLISHED.get(options.name)
    if known is None and is_missing(options.path, "data.path"):
        known = expected
        if known is None:
            return None
    if known is None and options.name in ("digits", "npz"):
        images = load_dataset(options.model_copy(update={"public_path": None}), seed)
        channels, height, width = images.train_images.shape[1:]
        return TrainingData(images.train_labels, max(1, len(images.class_names)), (channels, height, width))
    if known is None:
        known = _counted_files(options)
    shape = known.shape if options.image_size is None else (known.shape[0], options.image_size, options.image_size)
    count = known.images - options.public_holdout
    count = count if options.train_limit is None else min(count, options.train_limit)
    return TrainingData(torch.arange(max(0, count)) % known.classes, known.classes, shape)


def is_missing(path: Path | None, option: str) -> bool:
    """Whether an option names a file or folder that does not exist."""
    return path is not None and kind_of(expanded(path, option)) == "missing"


def _counted_files(options: DataOptions) -> ExpectedData:
    assert options.path is not None
    seen = outline(options.model_dump(mode="json"))
    assert seen is not None
    folder = expanded(options.path, "data.path")
    by_folder = options.name == "folder" or options.labels == "folders"
    inner = folder / "train" if (folder / "train").is_dir() else folder
    classes = len(subfolders(inner)) if by_folder else 1
    return ExpectedData(
        images=max(1, seen.images), classes=max(1, classes), shape=(seen.channels, seen.side, seen.side)
    )


#: so many stages of a schedule are all counted
_MOST_COUNTED_STAGES = 6


#: public images of the made-up data, where a regularizer does not name more in its batch
_FEWEST_PUBLIC_IMAGES = 8


@dataclass(frozen=True)
class RunCost:
    """What the local training of one run takes; where clients are sampled or drop out, on average over the draws.

    Attributes:
        steps: of all clients in all rounds.
        flops: as `fedssl cost` counts them; a multiply-add counts as two.
        seconds: on this machine, one client after another.
    """

    steps: float
    flops: float
    seconds: float


@dataclass
class StepCosts:
    """Counts and times steps, each kind once: rows that train alike share what was measured of the first of them."""

    _by_kind: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def of_run(self, recipe: Recipe, data: TrainingData) -> RunCost:
        """What a run of the recipe on this data will take.

        Raises:
            UserError: the recipe does not fit the data, or a step fails.
        """
        if not recipe.schedule.trains:
            return RunCost(0.0, 0.0, 0.0)
        steps_by_architecture: dict[str, int] = {}
        for client, size in enumerate(data.client_sizes(recipe)):
            name = recipe.architecture_of(client)
            steps = steps_of_round(recipe.training, size)
            steps_by_architecture[name] = steps_by_architecture.get(name, 0) + steps
        sampled = (recipe.clients_per_round or recipe.partition.clients) / recipe.partition.clients
        answering = sampled * (1 - recipe.client_dropout)
        flops = seconds = 0.0
        for name, steps in steps_by_architecture.items():
            by_round = self._of_steps(recipe, name, data)
            for number in range(recipe.rounds):
                flops_of_step, seconds_of_step = by_round[min(number, len(by_round) - 1)]
                flops += answering * steps * flops_of_step
                seconds += answering * steps * seconds_of_step
        return RunCost(recipe.rounds * answering * sum(steps_by_architecture.values()), flops, seconds)

    def _of_steps(self, recipe: Recipe, architecture: str, data: TrainingData) -> list[tuple[float, float]]:
        """Operations and seconds of a client's step by round; rounds that are left out equal the last one."""
        reduced = _with_one_client(recipe, architecture)
        key = _kind_of_step(reduced, data)
        if key not in self._by_kind:
            federation = build_federation(reduced, _made_up_data(reduced, data))
            ends = _ends_of_stages(reduced)
            # a client's first round in a stage may lack what its later ones have, such as a previous model
            counted = {number for end in ends for number in (end - 1, end)}
            costs = estimate(federation, timed_rounds=(ends[0], ends[-1]), without_products=True, only_rounds=counted)
            self._by_kind[key] = _by_round(reduced.rounds, [cost for cost in costs if cost.number in ends])
        return self._by_kind[key]


def _with_one_client(recipe: Recipe, architecture: str) -> Recipe:
    """The recipe with one client of an architecture, and as few rounds as have all kinds of steps."""
    one_epoch = {"local_epochs": 1, "local_steps": None, "learning_rate_schedule": "constant"}
    changes = {
        "name": "made up",
        "description": "",
        "seed": 0,
        "clients_per_round": None,
        "client_dropout": 0.0,
        "engine": "in-process",
        # the server's training before the first round is not counted, so it may be short
        "aggregators": [a.model_copy(update={"epochs": 1}) if a.trains else a for a in recipe.aggregators],
        "architectures": [architecture],
        "partition": PartitionOptions(name="iid", clients=1),
        "evaluation": EvaluationOptions(),
        "training": recipe.training.model_copy(update=one_epoch),
        # layers come and go in rounds; without that, all rounds but the first take the same
        "rounds": recipe.rounds if recipe.schedule.cuts else min(2, recipe.rounds),
    }
    return recipe.model_copy(update=changes)


def _kind_of_step(recipe: Recipe, data: TrainingData) -> str:
    """A key that recipes share whose steps take the same."""
    values = recipe.model_dump(mode="json", exclude={"data", "preset", "local_update", "guard", "flower"})
    if all(aggregator.exchanges_weights for aggregator in recipe.aggregators):
        del values["aggregators"]  # weights are only put into place, whoever has averaged them
    classes = data.classes if recipe.objective.needs_labels else 0
    return json.dumps([values, data.shape, classes], sort_keys=True)


def _made_up_data(recipe: Recipe, data: TrainingData) -> Dataset:
    """Images of noise: what a step takes does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, *data.shape), generator=generator, dtype=torch.uint8)

    samples = recipe.training.batch_size
    batches = [getattr(regularizer, "batch_size", 0) for regularizer in recipe.regularizers]
    public = noise(max(_FEWEST_PUBLIC_IMAGES, *batches)) if public_image_users(recipe) else None
    images, labels = noise(samples), torch.arange(samples) % data.classes
    names = tuple(map(str, range(data.classes)))
    return Dataset("made up", images, labels, images[:2], labels[:2], names, public)


def _ends_of_stages(recipe: Recipe) -> list[int]:
    """The last rounds of some stages, in order; what a step takes lies on straight lines between them.

    The first stage trains the patch embedding, too; the many stages after it, a transformer's, differ by their number
    of blocks. All are counted where they are few, as a ResNet's, which differ, or where depth dropout bends the line.
    """
    length = getattr(recipe.schedule, "rounds_per_stage", recipe.rounds) if recipe.schedule.cuts else recipe.rounds
    stages = recipe.rounds // length
    alike = stages > _MOST_COUNTED_STAGES and getattr(recipe.schedule, "kept_layers", None) is None
    chosen = {1, 2, stages} if alike else range(1, stages + 1)
    return [stage * length for stage in sorted(chosen)]


def _by_round(rounds: int, counted: list[RoundCost]) -> list[tuple[float, float]]:
    """(operations, seconds) of a step in each round, on straight lines between the stages that were counted."""
    ends = [cost.number for cost in counted]
    length = ends[0]
    stages = [end // length for end in ends]
    flops = [cost.step[0].flops for cost in counted]
    (fewest, shortest), (most, longest) = (
        (cost.step[0].flops, cost.step_seconds[0]) for cost in (counted[0], counted[-1])
    )
    by_round = []
    for number in range(1, rounds + 1):
        of_step = float(np.interp(-(-number // length), stages, flops))
        if most > fewest and longest > shortest:
            seconds = float(np.interp(of_step, [fewest, most], [shortest, longest]))  # never beyond what was timed
        else:
            seconds = longest * of_step / most
        by_round.append((of_step, seconds))
    return by_round


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
    header += [f"paper: {short_title(metric)}" for metric in printed]
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


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"
