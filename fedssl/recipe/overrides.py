"""Read the text of recipes and tables, and apply `key=value` overrides to it.

No part is imported here, so that listing the recipes takes less than a second.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..options import Options, is_text, nearest, shortened, types_at
from ..untrusted import (
    MOST_BYTES,
    PART_KEYS,
    absolute_path,
    expand_home,
    parse_yaml,
    printable,
    read_regular_file,
    scalar_text,
)

#: the augmentation of a recipe that names none
DEFAULT_AUGMENTATION = "random_views"
_MOST_KEYS = 20  # in an override's path
_WEIGHTS = "model.weights"
_ENCODERS = (_WEIGHTS, "oracle", "teacher")  # keys of files or folders with a network's weights


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with fedssl."""
    return shipped_names("recipe")


def shipped_names(kind: Literal["recipe", "table", "preset"]) -> list[str]:
    """Return the file names, without their end, of the recipes, tables or presets that ship with fedssl."""
    folder = resources.files("fedssl") / f"{kind}s"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_values(name_or_path: str | Path, kind: Literal["recipe", "table", "preset"] = "recipe") -> dict[str, Any]:
    """Read a shipped recipe, table or preset, or a YAML file, as a mapping that is not checked yet.

    Relative paths to part files, weights and recipes are resolved from the YAML file's folder.

    Raises:
        UserError: there is no such recipe or file; it is not YAML; or it holds no mapping.
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
            shipped = f"{nearest(text, names)}shipped are {', '.join(names)}"
            raise UserError(f"no {kind} {text!r}: {shipped}, or give a .yaml file") from None
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
    return values | {key: with_paths_from(folder, key, values[key]) for key in (*PART_KEYS, "model") if key in values}


def _table_from(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of a table's recipes and parts absolute; values of an invalid form are left to the checks."""
    for key in ("rows", "scenarios"):
        if isinstance(entries := values.get(key), list):
            values[key] = [_table_from(folder, dict(one)) if isinstance(one, dict) else one for one in entries]
    if isinstance(settings := values.get("settings"), dict):
        values["settings"] = _recipe_from(folder, settings)
    if "sweep" in values:
        values["sweep"] = with_paths_from(folder, "sweep", values["sweep"])
    if isinstance(recipe := values.get("recipe"), str) and recipe.endswith((".yaml", ".yml")):
        values["recipe"] = str(absolute_path(folder, recipe))
    return values


def with_paths_from(folder: Path, key: str, value: Any) -> Any:
    """Return what a recipe has under a key, or below it, with absolute paths to part files, weights and encoders.

    Names of timm's weights stay as they are. The `weights` of `model` may be a mapping from architectures.
    """
    if isinstance(value, list):
        return [with_paths_from(folder, key, one) for one in value]
    if isinstance(value, dict) and key in _ENCODERS:  # by architecture
        return {name: with_paths_from(folder, key, one) for name, one in value.items()}
    if isinstance(value, dict):
        below = {name: _WEIGHTS if (key, name) == ("model", "weights") else name for name in value}
        return {name: with_paths_from(folder, below[name], one) for name, one in value.items()}
    if key in _ENCODERS and isinstance(value, (int, float)):
        value = scalar_text(value)
    if not isinstance(value, str):
        return value
    file = not value.startswith("timm:") if key in _ENCODERS else value.endswith(".py") and key in (*PART_KEYS, "name")
    return str(absolute_path(folder, value)) if file else value


def part_name(key: str, part: Any) -> Any:
    """Return the name of a part in a recipe's mapping, where it stands alone or in a mapping; None if it has none."""
    return part.get("name", DEFAULT_AUGMENTATION if key == "augmentation" else None) if isinstance(part, dict) else part


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in nested mappings and lists.

    Raises:
        UserError: the override has another form, its value is not YAML, or it names an entry that a list does not have.
    """
    from .recipe import Recipe

    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"{override!r} is not key=value, for instance training.batch_size=64")
    keys = path.split(".")
    value = read_text(Recipe, keys, text, f"the value of {override[:200]!r}")
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
                target[key] = {} if target.get(key) is None else target[key]  # a stored recipe holds every null
            elif key == "name" and keys[0] in PART_KEYS and part_name(keys[0], target) != value:
                target.clear()  # another part has other options
        else:
            raise UserError(f"{override!r}: {'.'.join(keys[:i])} is {shortened(target)} and has no entries")
        if last:
            target[index] = value
        else:
            if isinstance(target[index], str) and keys[0] in PART_KEYS and i == PART_KEYS[keys[0]][1]:
                target[index] = {"name": target[index]}  # a part may be given as its name alone
            target = target[index]


def read_text(model: type[Options], keys: Sequence[str], text: str, source: str) -> Any:
    """Return what the option at a path of keys is set to by a text from the command line, which is YAML.

    Where the option is a text, what is not in quotes and not null is taken as it stands: `scans #2`, `[MRI] a: b`.
    """
    if text.encode(errors="replace").decode() != text:  # a name's bytes come as surrogates
        raise UserError(f"{source} is not UTF-8: rename the file or folder that it names")
    text = text.strip()
    in_yaml = text.lower() in ("", "null", "~") or text[0] in "\"'" or printable(text) != text
    return parse_yaml(text, source) if in_yaml or not is_text(types_at(model, keys)) else text


def flatten_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings and lists into one mapping with dotted keys: `{"a": {"b": [1]}}` into `{"a.b.0": 1}`.

    An empty mapping or list counts as a value. Every key begins with `prefix`, the key of `values` itself.
    """
    if not isinstance(values, (dict, list)) or not values:
        return {prefix: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
