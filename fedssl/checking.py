"""Checks the mapping of a recipe against option models, and explains what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from .errors import UserError
from .options import Options
from .recipe_files import PART_KEYS, with_paths_from

#: the option model of a part, from the folder of its kind and its name
PartModel = Callable[[str, str], type[Options]]
RecipeModel = TypeVar("RecipeModel", bound=Options)


def check_recipe(values: dict[str, Any], source: str, recipe: type[RecipeModel], part: PartModel) -> RecipeModel:
    """Check every key and value of a recipe; what goes together is checked elsewhere (rules.py).

    Args:
        values: the recipe as YAML gives it; it is not changed.
        source: what error messages call the recipe.
        recipe: the model of the whole recipe.
        part: gives the model of a part; it may raise a UserError.

    Raises:
        UserError: a key or value is not allowed; the message names all of them.
    """
    problems: list[str] = []
    values = dict(values)
    for key, (folder, many) in PART_KEYS.items():
        if key not in values:
            continue
        if many and not isinstance(values[key], list):
            problems.append(f"{key}: expected a list of parts, got {values[key]!r}")
            continue
        given = values[key] if many else [values[key]]
        parts = [_check_part(part, folder, v, f"{key}.{i}" if many else key, problems) for i, v in enumerate(given)]
        values[key] = parts if many else parts[0]
    if not problems:
        try:
            return recipe.model_validate(values)
        except ValidationError as error:
            problems = explain_errors(error, recipe)
    raise UserError(f"{source}: {'; '.join(problems)}")


def _check_part(model: PartModel, folder: str, value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        problems.append(f"{path}: expected a part such as {{name: ...}}, got {value!r}")
        return value
    value = with_paths_from(Path(), value)
    try:
        cls = model(folder, value["name"])
    except UserError as error:
        problems.append(f"{path}.name: {error}")
        return value
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        problems.extend(explain_errors(error, cls, path))
        return value


def explain_errors(error: ValidationError, model: type[Options], prefix: str = "") -> list[str]:
    """One clause for each problem that pydantic found: the key's path, what is allowed, what it got.

    Args:
        error: raised while `model` was validated.
        model: the options that say which keys are allowed.
        prefix: the path of the validated mapping in the user's file; empty for the whole file.
    """
    clauses = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        path = ".".join(([prefix] if prefix else []) + location)
        if item["type"] == "extra_forbidden":
            allowed = _fields_at(model, location[:-1])
            near = difflib.get_close_matches(location[-1], allowed, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            clauses.append(f"{path}: unknown key; {hint}allowed here are {', '.join(allowed)}")
        elif item["type"] == "missing":
            clauses.append(f"{path}: missing")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            clauses.append(f"{path}: {message}, got {item['input']!r}")
    return clauses


def _fields_at(model: type[Options], location: list[str]) -> list[str]:
    current: list[type[Options]] = [model]  # more than one where the next key names one of several
    for key in location:
        if len(current) == 1:
            field = current[0].model_fields.get(key)
            current = _models_in(field.annotation) if field else []
        else:
            current = [c for c in current if key in get_args(c.model_fields["name"].annotation)]
    return [name for name, field in current[0].model_fields.items() if not field.exclude] if len(current) == 1 else []


def _models_in(annotation: Any) -> list[type[Options]]:
    """The option models that a type admits: itself, or those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
