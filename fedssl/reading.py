"""From a recipe's text to a checked `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checking import check_recipe
from .errors import UserError
from .parts import part_class
from .recipe import Recipe
from .recipe_files import apply_override, read_values
from .rules import privacy_problem


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe by name, or a file by path, and apply `key=value` overrides.

    A part's relative path (`./my_part.py`) is seen from the recipe file's folder, in an override from the working
    directory. The recipe that is returned, and so a run's stored one, holds the absolute path.

    Args:
        name_or_path: `hetero_ssfl`, or `./mine.yaml`.
        overrides: `training.batch_size=64`, `regularizers.0.weight=1`, `objective.name=simsiam`; the value is YAML.

    Raises:
        UserError: no such recipe; not YAML; a key or value that is not allowed, with its path and what is.
    """
    values = read_values(name_or_path)
    for override in overrides:
        apply_override(values, override)
    return parse_recipe(values, source=str(name_or_path))


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a recipe given as a mapping; `source` is what error messages call it.

    Raises:
        UserError: a key or value that is not allowed, or options of Flower that do not go with the recipe's parts.
    """
    recipe = check_recipe(values, source, Recipe, part_class)
    problem = privacy_problem(recipe)
    if problem is not None:
        raise UserError(f"{source}: {problem}")
    return recipe
