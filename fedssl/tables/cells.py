"""The cells of a table: one run for each row, scenario and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import UserError
from ..reading import load_stored_recipe
from ..recipe import Recipe
from ..recipe_text import flatten_keys, own_parts, read_values
from ..run_directory import RunDirectory
from .table import Table, cell_path, cell_recipe


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a table.

    Attributes:
        label: the row's and, where there is one, the scenario's.
        seed: the run's seed.
        recipe: the recipe with all settings merged in.
        path: the run's folder.
    """

    label: str
    seed: int
    recipe: Recipe
    path: Path

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def begun(self) -> bool:
        """Whether the run's folder exists."""
        return (self.path / "recipe.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Whether the last round of the run is committed."""
        return self.begun and RunDirectory.open(self.path).checkpoint.finished


def table_cells(table: Table, output: Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """All cells in the order in which they run: seed by seed, so that a table that is stopped compares all rows.

    Raises:
        UserError: a recipe that is refused, see `cell_recipe`.
    """
    return [
        Cell(
            f"{row.label}, {scenario.label}" if scenario.label else row.label,
            seed,
            cell_recipe(table, row, seed, overrides, scenario),
            cell_path(output, row.label, seed, scenario.label),
        )
        for seed in table.seeds
        for scenario in table.all_scenarios
        for row in table.rows
    ]


def check_output(output: Path, cells: Sequence[Cell]) -> None:
    """Refuse an output folder that other things or other recipes have made.

    Raises:
        UserError: `output` is a file, or a folder with other things in it, or a cell's run has another recipe.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder as the table's output")
    if output.is_dir() and any(output.iterdir()) and not (output / "table.yaml").is_file():
        raise UserError(f"{output} is not empty and holds no table.yaml: name a new folder as the table's output")
    for cell in cells:
        if cell.begun:
            _check_recipe(cell)


def _check_recipe(cell: Cell) -> None:
    """Refuse a stored run whose recipe differs from the cell's in more than what its results do not depend on.

    An option that the stored recipe does not have was added since; it has its default, which is what the run did.
    """
    wanted = yaml.safe_load(cell.recipe.to_yaml())
    directory = RunDirectory.open(cell.path)
    known = set(own_parts(read_values(directory.path / "recipe.yaml"))) <= set(own_parts(wanted))
    stored = flatten_keys(yaml.safe_load(load_stored_recipe(directory, trust=known, resuming=True).to_yaml()))
    wanted = flatten_keys(wanted)
    for key in dict.fromkeys([*wanted, *stored]):
        if (
            key not in ("description", "clients_parallel")
            and not key.startswith("model.digests")
            and wanted.get(key) != stored.get(key)
        ):
            raise UserError(
                f"{cell.path} was made with {key}={stored.get(key)}, now it is {wanted.get(key)}: "
                "name another output, or remove that folder"
            )
