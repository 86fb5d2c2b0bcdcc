"""Read tables: YAML files that name a grid of recipes, scenarios and seeds, and how its figures are judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..errors import UserError
from ..evaluation.metrics import DOWNSTREAM, EVALUATED, METRICS, OF_ARCHITECTURE
from ..options import Options, validated
from ..recipe.overrides import part_name, read_values, recipe_names
from ..recipe.presets import apply_preset, with_overrides
from ..recipe.reading import parse_recipe, refuse_code
from ..recipe.recipe import Recipe
from ..untrusted import NAME_PATTERN, PART_KEYS, TEXT_PATTERN, own_parts

_METRICS = [metric.name for metric in METRICS.values() if metric.in_tables]
_MEASURES = "|".join(re.escape(name) for name in EVALUATED if METRICS[name].on_other_data)
_ON_OTHER_DATA = re.compile(rf"{DOWNSTREAM}[A-Za-z0-9]+_({_MEASURES}|semi_supervised_[\d.]+|fine_tune_\w+)")


def _check_metric(metric: str) -> str:
    measure, separator, architecture = metric.partition(OF_ARCHITECTURE)
    known = measure in _METRICS or _ON_OTHER_DATA.fullmatch(measure)
    if not known or (separator and not re.fullmatch(r"[\w.]+", architecture)):
        raise ValueError(
            f"unknown metric; expected one of {', '.join(_METRICS)}, or {DOWNSTREAM}LABEL_METRIC; METRIC@ARCHITECTURE "
            "is the mean over the clients with this architecture"
        )
    return metric


Metric = Annotated[str, AfterValidator(_check_metric)]
#: the label of the row of the encoders before training
UNTRAINED = "untrained"


class TableRow(Options):
    """A recipe with changed settings, under a label."""

    label: str = Field(..., pattern=NAME_PATTERN, description="the row's name")
    recipe: str = Field(..., description="a shipped recipe's name, or a path from the table's folder")
    settings: dict[str, Any] = Field({}, description="recipe values that this row changes")
    oracle: str | None = Field(
        None,
        description="the row whose encoder, seed by seed, this row aligns to (representation_mean's target oracle)",
    )


class ExpectedData(Options):
    """The size of data that the user brings, with which `--dry-run` counts the cost while the data is missing."""

    images: int = Field(..., ge=1, description="training images, before any are held out as public images")
    classes: int = Field(1, ge=1, description="classes, equally large; 1 for images without labels")
    shape: tuple[int, int, int] = Field((3, 32, 32), description="channels, height and width of an image")


class TableScenario(Options):
    """Settings under which every row is run, such as cross-silo or cross-device. A scenario is a group of columns."""

    label: str = Field("", pattern=f"^$|{NAME_PATTERN}", description="the group's name; empty without scenarios")
    settings: dict[str, Any] = Field({}, description="recipe values; they replace the table's, the row's replace them")
    expected_data: ExpectedData | None = Field(None, description="replaces the table's `expected_data`")
    paper: dict[str, dict[Metric, str]] = Field(
        {}, description="the paper's figures to show beside ours, by row label and metric, as printed there"
    )


Ranges = dict[str, Annotated[list[Any], Field(min_length=1)]]


class Sweep(Options):
    """How the options of a table's rows are chosen, by equally many trials of each row."""

    trials: int = Field(..., ge=1, description="of each row; in a grid the number of its points")
    draw: Literal["random", "grid"] = Field("random", description="draw each value, or take all combinations")
    seed: int = Field(0, ge=0, description="decides what is drawn, and is the seed of the trials' runs")
    metric: Literal["knn", "linear", "linear_0.01", "linear_0.1", "linear_auroc", "view_retrieval"] = Field(
        "knn", description="the trial with the highest value on the validation images is chosen"
    )
    ranges: Ranges = Field({}, description="for all rows: lists of values by key, such as training.learning_rate")
    own_ranges: dict[str, Ranges] = Field({}, description="what a row draws beside, by its label")


class Table(Options):
    """A grid of runs and how to judge it."""

    name: str = Field(
        ..., pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="the table's name, and the default output folder's"
    )
    description: str = Field("", pattern=TEXT_PATTERN, description="what the table compares")
    expected_data: ExpectedData | None = Field(
        None, description="the size of data that the user brings; --dry-run counts with it while the data is missing"
    )
    seeds: list[int] = Field(..., min_length=1, description="every row is run once with each of them")
    metrics: list[Metric] = Field(["knn", "linear", "effective_rank"], min_length=1, description="the columns")
    method: str | None = Field(None, description="the label of the row that the verdict is about; None: no verdict")
    verdict: Literal["collaboration", "comparison"] = Field(
        "collaboration",
        description="collaboration judges whether there is a collaboration gain and needs baselines and controls; "
        "comparison only names which of them the method beats",
    )
    baselines: list[str] = Field([], description="labels of rows that the method must beat")
    controls: list[str] = Field(
        [], description="labels of rows that learn nothing from peers, which the method must beat, too"
    )
    ceiling: list[str] = Field(
        [],
        description="the rows that have all images in one place, one for each architecture: the verdict tells which "
        "share of the room between the best control and them the method closes",
    )
    settings: dict[str, Any] = Field({}, description="recipe values for all rows")
    rows: list[TableRow] = Field(..., min_length=1, description="the rows; those in neither list above are not judged")
    scenarios: list[TableScenario] = Field(
        [], description="if given, every row is run in each, and each has the columns `metrics`"
    )
    paper: dict[str, dict[Metric, str]] = Field(
        {}, description="as in a scenario; in a table with scenarios each has its own"
    )
    sweep: Sweep | None = Field(None, description="how the rows' options are chosen before the table is run")

    @model_validator(mode="after")
    def _consistent(self) -> Table:
        labels = [row.label for row in self.rows]
        _check_labels("rows", labels)
        _check_labels("scenarios", [scenario.label for scenario in self.scenarios])
        if not all(scenario.label for scenario in self.scenarios):
            raise ValueError("every scenario needs a label")
        if self.scenarios and self.paper:
            raise ValueError("paper: a table with scenarios needs them in each scenario; move them there")
        if UNTRAINED in map(slug, labels):
            raise ValueError(f"{UNTRAINED!r} is the label of the row before training; choose another label")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers, none below 0, got {self.seeds}")
        named = {
            "method": [self.method] if self.method is not None else [],
            "baselines": self.baselines,
            "controls": self.controls,
            "ceiling": self.ceiling,
            "oracle": [row.oracle for row in self.rows if row.oracle is not None],
            "paper": [label for scenario in self.all_scenarios for label in scenario.paper],
            "own_ranges": list(self.sweep.own_ranges) if self.sweep else [],
        }
        for key, value in ((key, value) for key, values in named.items() for value in values):
            if value not in labels:
                raise ValueError(f"{key} names {value!r}, but the rows' labels are {', '.join(labels)}")
        aligned = [row.label for row in self.rows if row.oracle]
        if chained := [row.label for row in self.rows if row.oracle in aligned]:
            raise ValueError(f"rows {chained} have as oracle a row that has one itself: name a row without")
        if self.sweep and (self.scenarios or named["oracle"] or self.sweep.seed in self.seeds):
            raise ValueError("sweep: the table must have no scenarios, no oracles, and other seeds than the sweep's")
        judged = [*named["method"], *self.baselines, *self.controls]
        for label in judged:
            if judged.count(label) > 1:
                raise ValueError(f"{label!r} is named more than once in method, baselines and controls")
        return self

    @property
    def all_scenarios(self) -> list[TableScenario]:
        """Return the scenarios; in a table without any, a single one with an empty label."""
        return self.scenarios or [TableScenario(paper=self.paper)]

    def role(self, label: str) -> str:
        """Return a row's role: `method`, `baseline`, `control` or `other`; `row` in a table without a verdict."""
        if self.method is None:
            return "row"
        roles = dict.fromkeys(self.controls, "control") | dict.fromkeys(self.baselines, "baseline")
        return (roles | {self.method: "method"}).get(label, "other")


def _check_labels(kind: str, labels: list[str]) -> None:
    label_by_slug: dict[str, str] = {}
    for label in labels:
        other = label_by_slug.get(slug(label))
        if other is not None:
            raise ValueError(f"{kind} {other!r} and {label!r} need labels that differ in letters or digits")
        label_by_slug[slug(label)] = label


def load_table(name_or_path: str | Path, trust: bool = False) -> Table:
    """Read a shipped table by name, or a file by path.

    Raises:
        UserError: it is missing or invalid; without `trust` also if it, or a recipe that it names, names code to run.
    """
    return check_table(read_values(name_or_path, "table"), str(name_or_path), trust)


def check_table(values: dict[str, Any], source: str, trust: bool = False) -> Table:
    """Check a table that is given as a mapping, as `load_table`; error messages call it `source`."""
    table = validated(Table, values, source)
    if not trust:
        settings = [table.settings, *(one.settings for one in table.scenarios), *(row.settings for row in table.rows)]
        refuse_code({name for values in settings for name in own_parts(values)}, source)
        for file in sorted({row.recipe for row in table.rows} - set(recipe_names())):
            refuse_code(own_parts(read_values(file)), file)
    return table


def cell_recipe(
    table: Table,
    row: TableRow,
    seed: int,
    overrides: Sequence[str] = (),
    scenario: TableScenario | None = None,
    output: Path | None = None,
) -> Recipe:
    """Return the recipe of one cell: the row's recipe, changed by the settings of table, scenario, row and overrides.

    Mappings are merged key by key; lists are replaced; a part with another name replaces the part. Models are measured
    on all images, unless `evaluation.images` is set, and the states of one round are kept, unless `checkpoints` is set.
    A row that sets its partition, such as one place beside several clients, keeps it whatever the overrides say.
    The encoder that a row aligns to lies in the table's folder `output`; without one, the recipe has untrained kernels
    as target, which cost the same.

    Raises:
        UserError: see `load_recipe`; the message names the row.
    """
    all_settings = (table.settings, scenario.settings if scenario else {}, row.settings)
    for key in [override.partition("=")[0] for override in overrides] + [key for one in all_settings for key in one]:
        if key in ("seed", "name"):
            raise UserError(f"a table sets {key} itself, from its seeds and labels: leave {key} out of settings")
    if "partition" in row.settings:
        overrides = [one for one in overrides if re.match(r"partition\b", one) is None]
    try:
        values = read_values(row.recipe)
        for settings in all_settings:
            values = _merge(values, settings)
        values.setdefault("checkpoints", 1)  # a table has many runs, and continues each from its last round
        if isinstance(evaluation := values.get("evaluation", {}), dict):
            # a preset's number depends on the row, and rows are compared
            values["evaluation"] = {"images": None} | evaluation
        if row.oracle is not None:
            target: dict[str, Any] = {"target": "untrained"}
            if output is not None:
                run = cell_path(output, row.oracle, seed, scenario.label if scenario else "")
                target = {"oracle": str(encoder_path(run))}
            parts = [part if isinstance(part, dict) else {"name": part} for part in values.get("aggregators", [])]
            if "oracle" not in [part.get("target") for part in parts]:
                raise UserError("the row has an oracle, but none of its aggregators has target oracle: add it there")
            values["aggregators"] = [part | target if part.get("target") == "oracle" else part for part in parts]
        name = f"{row.label} ({scenario.label})" if scenario and scenario.label else row.label
        changed = with_overrides(values | {"name": name, "seed": seed}, overrides, row.recipe)
        apply_preset(changed, row.recipe)
        return parse_recipe(changed, row.recipe)
    except UserError as error:
        raise UserError(f"row {row.label!r}: {error}") from error


def _merge(values: dict[str, Any], changes: dict[str, Any], top: bool = True) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if top and key in PART_KEYS and isinstance(old, str):
            old = {"name": old}  # a part may be given as its name alone
        if not (isinstance(old, dict) and isinstance(change, dict)):
            merged[key] = change
        elif top and key in PART_KEYS and change.get("name", part_name(key, old)) != part_name(key, old):
            merged[key] = change  # another part has other options
        else:
            merged[key] = _merge(old, change, top=False)
    return merged


def cell_path(output: Path, label: str, seed: int, scenario: str = "") -> Path:
    """Return the run's folder of one cell, in the table's folder `output`."""
    row = output / slug(label)
    return (row / slug(scenario) if scenario else row) / f"seed-{seed}"


def encoder_path(cell: Path) -> Path:
    """Return the folder, beside a cell's run, of the encoder to which other rows align."""
    return cell.with_name(f"{cell.name}-encoder")


def slug(label: str) -> str:
    """Return a label as a file name: lower case, and `-` for everything but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "row"
