"""From a recipe's text to a checked `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..parts import part_class
from ..run.directory import RunDirectory
from ..untrusted import own_parts
from .overrides import check_recipe, read_values
from .presets import apply_preset
from .recipe import Recipe
from .rules import privacy_problem


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe by name, or a file by path, and apply `key=value` overrides.

    A part's relative path (`./my_part.py`) is resolved from the recipe file's folder, or from the working directory if
    it stands in an override. The returned recipe, and so the one that a run stores, has the absolute path.

    Args:
        name_or_path: `hetero_ssfl`, or `./mine.yaml`.
        overrides: `training.batch_size=64`, `regularizers.0.weight=1`, `objective.name=simsiam`; the value is YAML.

    Raises:
        UserError: there is no such recipe; it is not YAML; or a key or value is invalid. The message names the key's
            path and what is allowed.
    """
    return complete_recipe(read_values(name_or_path), overrides, source=str(name_or_path))


def complete_recipe(values: dict[str, Any], overrides: Sequence[str], source: str) -> Recipe:
    """Apply overrides, fill in what the recipe leaves open by its preset (`presets/`), and check it.

    Error messages call the recipe `source`.

    Raises:
        UserError: see `load_recipe`.
    """
    try:
        values = apply_preset(values, overrides, part_class).values
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return parse_recipe(values, source)


def load_stored_recipe(directory: RunDirectory, trust: bool = False, resuming: bool = False) -> Recipe:
    """Read the recipe of a run's folder. Somebody else may have made it, so its own parts are not run unasked.

    Args:
        directory: the run's.
        trust: the user allows the code of part files and modules that the recipe names.
        resuming: the user continues the run: code that has not changed since the run began is allowed, too.

    Raises:
        UserError: the recipe names code that is not allowed, or is not valid.
    """
    file = directory.path / "recipe.yaml"
    values = read_values(file)
    for name in [] if trust else own_parts(values):
        unchanged = directory.part_unchanged(name) if resuming else None
        if unchanged is None:
            raise UserError(
                f"{file} names the part {name}, whose code would be run: read that code first, and give --trust if you "
                "trust it"
            )
        if not unchanged:
            raise UserError(
                f"{name}, a part of {file}, was changed since the run began: put back the file as it was, or give "
                "--trust to continue with it as it is"
            )
    return parse_recipe(values, str(file))


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a recipe that is given as a mapping; error messages call it `source`. No preset is applied.

    Raises:
        UserError: a key or value that is not allowed, or options of Flower that do not go with the recipe's parts.
    """
    recipe = check_recipe(values, source, Recipe, part_class)
    problem = privacy_problem(recipe)
    if problem is not None:
        raise UserError(f"{source}: {problem}")
    return recipe
