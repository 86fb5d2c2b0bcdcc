"""The text of recipes and tables: what ships, YAML files, `key=value` overrides, messages about wrong keys and values.

No part is imported here, so that listing the recipes takes less than a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from ..errors import UserError
from ..options import Options, explain_errors, shortened
from ..untrusted import MOST_BYTES, PART_KEYS, absolute_path, expand_home, parse_yaml, read_regular_file

#: the part that a key holds where the recipe names none
DEFAULT_PARTS = {"augmentation": "random_views"}


_MOST_KEYS = 20  # in an override's path


#: the option model of a part, from the folder of its kind and its name
PartModel = Callable[[str, str], type[Options]]


RecipeModel = TypeVar("RecipeModel", bound=Options)


def recipe_names() -> list[str]:
    """The recipes that ship with fedssl."""
    return shipped_names("recipe")


def recipe_yaml(values: dict[str, Any]) -> str:
    """A recipe's values as the text of its file."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)


def shipped_names(kind: Literal["recipe", "table"]) -> list[str]:
    """The recipes or the tables that ship with fedssl."""
    folder = resources.files("fedssl") / f"{kind}s"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


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
        path = expand_home(text)
        try:
            content = read_regular_file(path, MOST_BYTES).decode()
        except (FileNotFoundError, NotADirectoryError):
            near = difflib.get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"no {kind} {text!r}: {hint}shipped are {', '.join(names)}, or give a .yaml file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    values = parse_yaml(content, text)
    if not isinstance(values, dict):
        raise UserError(f"{text} must hold a mapping of {kind} keys, it holds {type(values).__name__}")
    if text in names:
        return values
    folder = expand_home(text).parent
    return _recipe_from(folder, values) if kind == "recipe" else _table_from(folder, values)


def _recipe_from(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    resolved = {key: with_paths_from(folder, value) if key in PART_KEYS else value for key, value in values.items()}
    return resolved | ({"model": with_weights_from(folder, values["model"])} if "model" in values else {})


def _table_from(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A table's recipes and parts with absolute paths; whatever has an invalid form is left to the table's checks."""
    for key in ("rows", "scenarios"):
        if isinstance(entries := values.get(key), list):
            values[key] = [_table_from(folder, dict(one)) if isinstance(one, dict) else one for one in entries]
    if isinstance(settings := values.get("settings"), dict):
        values["settings"] = _recipe_from(folder, settings)
    if isinstance(recipe := values.get("recipe"), str) and recipe.endswith((".yaml", ".yml")):
        values["recipe"] = str(absolute_path(folder, recipe))
    return values


def with_paths_from(folder: Path, part: Any) -> Any:
    """A part as a recipe gives it, or a list of them, with absolute paths to part files."""
    if isinstance(part, list):
        return [with_paths_from(folder, one) for one in part]
    if isinstance(part, dict) and "name" in part:
        return part | {"name": with_paths_from(folder, part["name"])}
    if isinstance(part, str) and part.endswith(".py"):
        return str(absolute_path(folder, part))
    return part


def part_name(key: str, part: Any) -> Any:
    """The name of a part as a recipe's mapping gives it under a key, alone or in a mapping; None where it has none."""
    return part.get("name", DEFAULT_PARTS.get(key)) if isinstance(part, dict) else part


def with_weights_from(folder: Path, model: Any) -> Any:
    """A recipe's `model` with absolute paths to weights; names of timm's weights stay as they are."""

    def absolute(source: Any) -> Any:
        if not isinstance(source, str) or source.startswith("timm:"):
            return source
        return str(absolute_path(folder, source))

    if not isinstance(model, dict) or "weights" not in model:
        return model
    weights = model["weights"]
    by_architecture = isinstance(weights, dict)
    return model | {"weights": {k: absolute(v) for k, v in weights.items()} if by_architecture else absolute(weights)}


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in nested mappings and lists."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"{override!r} is not key=value, for instance training.batch_size=64")
    value = parse_yaml(text, f"the value of {override[:200]!r}")
    keys = path.split(".")
    if len(keys) > _MOST_KEYS:
        raise UserError(f"{override[:80]!r}... names a key {len(keys)} levels deep; expected at most {_MOST_KEYS}")
    target: Any = values
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(target, list):
            if key not in map(str, range(len(target))):
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
            if renamed and isinstance(target, dict) and part_name(keys[0], target) != value:
                target.clear()
            target[index] = value
        else:
            target = target[index]


def flatten_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings and lists into one mapping with dotted keys.

    Of `{"a": {"b": [1]}}` it makes `{"a.b.0": 1}`.

    Args:
        values: mappings and lists of any depth, as YAML gives them. An empty mapping or list counts as a value.
        prefix: the key of `values` itself; every key begins with it.

    Returns:
        The values by their dotted keys.
    """
    if not isinstance(values, (dict, list)) or not values:
        return {prefix: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


# Checking a mapping against option models


def check_recipe(values: dict[str, Any], source: str, recipe: type[RecipeModel], part: PartModel) -> RecipeModel:
    """Check every key and value of a recipe; what goes together is checked elsewhere (recipe/rules.py).

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
    for key, name in DEFAULT_PARTS.items():
        if isinstance(values.setdefault(key, {}), dict):
            values[key] = {"name": name} | values[key]
    for key, (folder, many) in PART_KEYS.items():
        if key not in values:
            continue
        if many and not isinstance(values[key], list):
            problems.append(f"{key}: expected a list of parts, got {shortened(values[key])}")
            continue
        given = values[key] if many else [values[key]]
        parts = [_check_part(part, folder, v, f"{key}.{i}" if many else key, problems) for i, v in enumerate(given)]
        values[key] = parts if many else parts[0]
    if "model" in values:
        values["model"] = with_weights_from(Path(), values["model"])
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
        problems.append(f"{path}: expected a part such as {{name: ...}}, got {shortened(value)}")
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
