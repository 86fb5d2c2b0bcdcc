"""The text of recipes and tables: what ships, YAML files, and `key=value` overrides. Nothing is checked here.

No part is imported, so that a list of recipes takes no second.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import UserError

#: recipe keys that hold parts: the folder in which each is looked up, and whether the key holds a list of parts
PART_KEYS: dict[str, tuple[str, bool]] = {
    "objective": ("objectives", False),
    "regularizers": ("regularizers", True),
    "schedule": ("schedules", False),
    "aggregators": ("aggregators", True),
    "local_update": ("local_updates", False),
}


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
    return {key: with_paths_from(folder, value) if key in PART_KEYS else value for key, value in values.items()}


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


def with_paths_from(folder: Path, part: Any) -> Any:
    """A part as a recipe gives it, or a list of them, with absolute paths to part files."""
    if isinstance(part, list):
        return [with_paths_from(folder, one) for one in part]
    if isinstance(part, dict) and "name" in part:
        return part | {"name": with_paths_from(folder, part["name"])}
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
