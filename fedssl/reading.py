"""Reading recipes and tables: YAML, overrides, and what a message says of a wrong key or value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import ValidationError

from .errors import UserError
from .options import Options
from .parts import part_class
from .recipe import PART_KEYS, Recipe
from .rules import privacy_problem


def recipe_names() -> list[str]:
    """The recipes that ship with fedssl."""
    return shipped_names("recipe")


def shipped_names(kind: Literal["recipe", "table"]) -> list[str]:
    """The recipes or the tables that ship with fedssl."""
    folder = resources.files("fedssl") / f"{kind}s"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


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
    values = read_values(name_or_path)
    for override in overrides:
        apply_override(values, override)
    return parse_recipe(values, source=str(name_or_path))


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a recipe that is given as a mapping; error messages call it `source`."""
    problems: list[str] = []
    values = dict(values)
    for key, (folder, many) in PART_KEYS.items():
        if key not in values:
            continue
        if many and not isinstance(values[key], list):
            problems.append(f"{key}: expected a list of parts, got {values[key]!r}")
            continue
        given = values[key] if many else [values[key]]
        parts = [_parse_part(folder, value, f"{key}.{i}" if many else key, problems) for i, value in enumerate(given)]
        values[key] = parts if many else parts[0]
    if not problems:
        try:
            recipe = Recipe.model_validate(values)
        except ValidationError as error:
            problems = explain_errors(error, Recipe)
        else:
            problem = privacy_problem(recipe)
            if problem is None:
                return recipe
            problems = [problem]
    raise UserError(f"{source}: {'; '.join(problems)}")


def read_values(name_or_path: str | Path, kind: Literal["recipe", "table"] = "recipe") -> dict[str, Any]:
    """The unchecked mapping of a shipped recipe (or table), or of a YAML file.

    Relative paths to part files and recipes are resolved from the YAML file's folder.

    Raises:
        UserError: no such recipe or file; not YAML; not a mapping.
    """
    text = str(name_or_path)
    names = shipped_names(kind)
    if text in names:
        content = (resources.files("fedssl") / f"{kind}s" / f"{text}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(text).expanduser()
        if not path.is_file():
            near = difflib.get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"no {kind} {text!r}: {hint}shipped are {', '.join(names)}, or give a .yaml file")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UserError(f"{text} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{text} must hold a mapping of {kind} keys, it holds {type(values).__name__}")
    if text in names:
        return values
    folder = Path(text).expanduser().parent
    return _recipe_from(folder, values) if kind == "recipe" else _table_from(folder, values)


def _recipe_from(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    return {key: _with_paths_from(folder, value) if key in PART_KEYS else value for key, value in values.items()}


def _table_from(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A table's recipes and parts with absolute paths; whatever has an invalid form is left to the table's checks."""
    for key in ("rows", "scenarios"):
        if isinstance(entries := values.get(key), list):
            values[key] = [_table_from(folder, dict(one)) if isinstance(one, dict) else one for one in entries]
    if isinstance(settings := values.get("settings"), dict):
        values["settings"] = _recipe_from(folder, settings)
    if isinstance(recipe := values.get("recipe"), str) and recipe.endswith((".yaml", ".yml")):
        values["recipe"] = str((folder / Path(recipe).expanduser()).resolve())
    return values


def _with_paths_from(folder: Path, part: Any) -> Any:
    """A part as a recipe gives it, or a list of them, with absolute paths to part files."""
    if isinstance(part, list):
        return [_with_paths_from(folder, one) for one in part]
    if isinstance(part, dict) and "name" in part:
        return part | {"name": _with_paths_from(folder, part["name"])}
    if isinstance(part, str) and part.endswith(".py"):
        return str((folder / Path(part).expanduser()).resolve())
    return part


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in nested mappings and lists."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"{override!r} is not key=value, for instance training.batch_size=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{override!r}: the value is not YAML: {' '.join(str(error).split())}") from error
    keys = path.split(".")
    target: Any = values
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise UserError(
                    f"{override!r}: {'.'.join(keys[:i])} is a list of {len(target)}, which has no entry {key!r}"
                )
            index: Any = int(key)
        elif isinstance(target, dict):
            index = key
            if not last:
                target.setdefault(key, {})
        else:
            raise UserError(f"{override!r}: {'.'.join(keys[:i])} is {target!r} and has no entries")
        if last:
            # another part under the same key has other options: the old part's are not carried over
            renamed = key == "name" and ".".join(keys[:-1]).split(".")[0] in PART_KEYS
            if renamed and isinstance(target, dict) and target.get("name") != value:
                target.clear()
            target[index] = value
        else:
            target = target[index]


def _parse_part(folder: str, value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        problems.append(f"{path}: expected a part such as {{name: ...}}, got {value!r}")
        return value
    value = _with_paths_from(Path(), value)
    try:
        cls = part_class(folder, value["name"])
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
