"""Tables: a few lines of YAML that name a grid of recipes and seeds, and how it is judged."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ..checking import explain_errors
from ..errors import UserError
from ..options import Options
from ..reading import parse_recipe
from ..recipe import Recipe
from ..recipe_files import PART_KEYS, apply_override, read_values, shipped_names

Metric = Literal[
    "knn", "linear", "semi_supervised_0.01", "semi_supervised_0.1",
    "fine_tune_accuracy", "fine_tune_per_class_accuracy", "fine_tune_precision", "fine_tune_recall", "fine_tune_f1",
    "effective_rank", "loss", "cka",
    "memory", "flops", "traffic",
]  # fmt: skip
#: what a table of kind `resources` shows
RESOURCES: tuple[Metric, ...] = ("memory", "flops", "traffic")
#: what the row of the encoders before training is called
UNTRAINED = "untrained"


class TableRow(Options):
    """A recipe (shipped name, or path from the table's folder) with changed settings, under a label.

    In a table of resources also:

    relative_to: the row whose figures are 1; its own where not given.
    newcomers: as if every client took part for the first time in every round.
    """

    label: str = Field(..., min_length=1)
    recipe: str
    settings: dict[str, Any] = Field(default_factory=dict)
    relative_to: str | None = None
    newcomers: bool = False


class TableScenario(Options):
    """Settings under which every row is run once more, such as cross-silo and cross-device: a group of columns.

    label: what the group is called; empty for the only one of a table without scenarios.
    settings: recipe values, between those of the table and those of the row.
    paper: figures to show beside ours, by row label and metric, as printed there.
    """

    label: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, dict[Metric, str]] = Field(default_factory=dict)


class Table(Options):
    """What to run and how to judge it.

    name, description: what the table is called, and what it compares.
    kind: `runs` trains every row; `resources` tells what each would take, without training (resource_tables.py).
    image: channels, height and width of the made-up images of a table of resources.
    seeds: each row is run once with each.
    metrics: the columns.
    method: the row that the verdict is about; no verdict where not given.
    verdict: `collaboration` says whether there is a collaboration gain, which takes baselines and controls;
        `comparison` only which of them the method beats.
    baselines, controls: the rows that it must beat. Other rows are shown and do not enter the verdict.
    settings: recipe values for all rows.
    rows: the rows.
    scenarios: where given, every row is run in each, and each has the columns `metrics`.
    paper: figures to show beside ours, by label and metric, as printed there; with scenarios each has its own.
    """

    name: str = Field(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    kind: Literal["runs", "resources"] = "runs"
    image: tuple[int, int, int] = (3, 32, 32)
    seeds: list[int] = Field(..., min_length=1)
    metrics: list[Metric] = Field(["knn", "linear", "effective_rank"], min_length=1)
    method: str | None = None
    verdict: Literal["collaboration", "comparison"] = "collaboration"
    baselines: list[str] = Field(default_factory=list)
    controls: list[str] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: list[TableRow] = Field(..., min_length=1)
    scenarios: list[TableScenario] = Field(default_factory=list)
    paper: dict[str, dict[Metric, str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Table:
        labels = [row.label for row in self.rows]
        _check_labels("rows", labels)
        _check_labels("scenarios", [scenario.label for scenario in self.scenarios])
        if not all(scenario.label for scenario in self.scenarios):
            raise ValueError("every scenario needs a label")
        if self.scenarios and self.paper:
            raise ValueError("paper: a table with scenarios has the paper's figures in each of them")
        if UNTRAINED in map(slug, labels):
            raise ValueError(f"{UNTRAINED!r} is the label of the row before training; choose another")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 on, got {self.seeds}")
        named = {
            "method": [self.method] if self.method is not None else [],
            "baselines": self.baselines,
            "controls": self.controls,
            "paper": [label for scenario in self.all_scenarios for label in scenario.paper],
            "relative_to": [row.relative_to for row in self.rows if row.relative_to is not None],
        }
        for key, values in named.items():
            for value in values:
                if value not in labels:
                    raise ValueError(f"{key} names {value!r}, which is no row's label; labels are {', '.join(labels)}")
        if (self.kind == "resources") != bool(set(RESOURCES) & set(self.metrics)):
            raise ValueError(f"metrics {', '.join(RESOURCES)} go with kind resources, the others with kind runs")
        if not set(self.metrics) <= set(RESOURCES) and self.kind == "resources":
            raise ValueError(f"metrics of a table of kind resources are {', '.join(RESOURCES)}")
        for figures in self.paper.values() if self.kind == "resources" else ():
            for figure in figures.values():
                if not re.fullmatch(r"\d+(\.\d+)?", figure):
                    raise ValueError(f"paper: {figure!r} is no number")
        if self.kind == "resources" and (self.scenarios or self.method is not None):
            raise ValueError("a table of kind resources has no scenarios and no method")
        judged = [*named["method"], *self.baselines, *self.controls]
        for label in judged:
            if judged.count(label) > 1:
                raise ValueError(f"{label!r} may stand only once in method, baselines and controls together")
        return self

    @property
    def all_scenarios(self) -> list[TableScenario]:
        """The scenarios, or the one without label that a table without any consists of."""
        return self.scenarios or [TableScenario(paper=self.paper)]

    def role(self, label: str) -> str:
        """`method`, `baseline`, `control` or `other`; `row` in a table without a verdict."""
        if self.method is None:
            return "row"
        if label == self.method:
            return "method"
        return "baseline" if label in self.baselines else "control" if label in self.controls else "other"


def table_names() -> list[str]:
    """The tables that ship with fedssl."""
    return shipped_names("table")


def load_table(name_or_path: str | Path) -> Table:
    """Read a shipped table by name, or a file by path.

    Raises:
        UserError: no such table; not YAML; a key or value that is not allowed, with its path and what is.
    """
    values = read_values(name_or_path, "table")
    problems: list[str] = []
    kinds: dict[str, type[Options]] = {"rows": TableRow, "scenarios": TableScenario}
    for key, kind in kinds.items():
        entries = values.get(key)
        if isinstance(entries, list):  # one by one, so that a wrong key is told with those allowed
            for i, entry in enumerate(entries):
                try:
                    kind.model_validate(entry)
                except ValidationError as error:
                    problems += explain_errors(error, kind, f"{key}.{i}")
    if not problems:
        try:
            return Table.model_validate(values)
        except ValidationError as error:
            problems = explain_errors(error, Table)
    raise UserError(f"{name_or_path}: {'; '.join(problems)}")


def cell_recipe(
    table: Table, row: TableRow, seed: int, overrides: Sequence[str] = (), scenario: TableScenario | None = None
) -> Recipe:
    """The recipe of one cell: the row's recipe, then the settings of table, scenario and row, then the overrides.

    Mappings are merged key by key; lists are replaced; a part with another name replaces the part.

    Raises:
        UserError: see `load_recipe`; the message names the row.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in ("seed", "name"):
            raise UserError(f"{override!r}: a table sets {key} itself; change the table's {key}s instead")
    try:
        values = read_values(row.recipe)
        for settings in (table.settings, scenario.settings if scenario else {}, row.settings):
            values = _merge(values, settings)
        for override in overrides:
            apply_override(values, override)
        name = f"{row.label} ({scenario.label})" if scenario and scenario.label else row.label
        return parse_recipe(values | {"name": name, "seed": seed}, source=row.recipe)
    except UserError as error:
        raise UserError(f"row {row.label!r}: {error}") from error


def _merge(values: dict[str, Any], changes: dict[str, Any], top: bool = True) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(change, dict):
            another_part = top and key in PART_KEYS and change.get("name", old.get("name")) != old.get("name")
            merged[key] = copy.deepcopy(change) if another_part else _merge(old, change, top=False)
        else:
            merged[key] = copy.deepcopy(change)  # overrides change what is merged in place
    return merged


def cell_path(output: Path, label: str, seed: int, scenario: str = "") -> Path:
    """The run's folder of one cell, in the table's folder `output`."""
    row = output / slug(label)
    return (row / slug(scenario) if scenario else row) / f"seed-{seed}"


def _check_labels(kind: str, labels: list[str]) -> None:
    slugs = [slug(label) for label in labels]
    for i, one in enumerate(slugs):
        if one in slugs[:i]:
            raise ValueError(f"{kind} {labels[slugs.index(one)]!r} and {labels[i]!r} need labels that differ more")


def slug(label: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "row"
