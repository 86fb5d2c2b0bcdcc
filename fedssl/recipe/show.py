"""Explain every key of a recipe: its value, what it means, and where the value comes from."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..options import Options
from ..parts import part_names
from ..untrusted import PART_KEYS
from .overrides import read_values
from .presets import with_overrides
from .reading import check_keys, fill_in
from .recipe import Recipe

Origin = Literal["recipe", "override", "preset", "default"]


@dataclass(frozen=True)
class Setting:
    """One key of a resolved recipe.

    Attributes:
        section: the dotted key of the mapping that holds it, such as `training` or `regularizers.0`; empty at the top.
        key: its name there.
        value: as YAML has it.
        origin: where the value comes from: the recipe's file, an override, the preset, or the default.
        description: what the key means.
        allowed: the values that it takes, in words.
    """

    section: str
    key: str
    value: Any
    origin: Origin
    description: str
    allowed: str


def resolve_recipe(
    name_or_path: str | Path, overrides: Sequence[str] = (), *, trust: bool = False
) -> tuple[Recipe, list[Setting], list[str]]:
    """Read a recipe, apply overrides, and fill in the preset's values and the defaults.

    Each key is checked by itself. What goes together is checked by `reading.load_recipe`, which has the same arguments
    and errors, and when a run begins.

    Returns the recipe; all its keys, of which those of a mapping stand together, after the mapping that holds it; and
    sentences that name the preset, say why it was chosen, and what was adapted to the data.
    """
    values, reasons = fill_in(name_or_path, overrides, trust)
    recipe = check_keys(values, str(name_or_path))
    given = with_overrides(read_values(name_or_path), overrides, str(name_or_path))
    overridden = [override.partition("=")[0] for override in overrides]
    return recipe, list(_settings(recipe, given, values, "", overridden)), reasons


def _settings(
    options: Options, given: Any, complete: Any, section: str, overridden: Sequence[str]
) -> Iterator[Setting]:
    """Yield the settings of a mapping with the dotted key `section`, then those of the mappings in it.

    `options` has all defaults, `given` what the recipe and the overrides set, and `complete` also the preset's values;
    `overridden` are the overrides' keys.
    """
    schemas = type(options).model_json_schema()["properties"]
    given, complete = given or {}, complete or {}
    nested: list[tuple[Options, Any, Any, str]] = []
    for key, field in type(options).model_fields.items():
        value, path = getattr(options, key), f"{section}.{key}" if section else key
        if isinstance(value, Options):
            nested.append((value, given.get(key), complete.get(key), path))
            continue
        if path in PART_KEYS and value:
            nested += [(part, given[key][i], complete[key][i], f"{path}.{i}") for i, part in enumerate(value)]
            continue
        origin: Origin = "default" if key not in complete else "recipe"
        if any(one.startswith(f"{path}.") or (key in given and f"{path}.".startswith(f"{one}.")) for one in overridden):
            origin = "override"
        elif key in complete and (key not in given or given[key] != complete[key]):
            origin = "preset"
        description, allowed = field.description or "", describe_values(schemas[key])
        if path in PART_KEYS:
            allowed = "a list of parts"
        elif key == "name" and (part_key := section.partition(".")[0]) in PART_KEYS:
            description = part_summary(type(options))
            allowed = f"{', '.join(part_names(PART_KEYS[part_key][0]))}, or a file or module of your own"
        yield Setting(section, key, options.model_dump(mode="json", include={key})[key], origin, description, allowed)
    for mapping in nested:
        yield from _settings(*mapping, overridden)


def part_summary(part: type[Options]) -> str:
    """Return the first paragraph of a part's documentation: the module's for a shipped part, else the class's."""
    documented = sys.modules[part.__module__] if part.__module__.startswith("fedssl.") else part
    return first_paragraph(documented.__doc__)


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def describe_values(schema: dict[str, Any]) -> str:
    """Return the values that an option takes in words, from its JSON schema: `integer >= 1 or null`, `sgd or adam`."""
    if "$ref" in schema or schema.get("type") == "object":
        return "a mapping"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(describe_values(one) for one in alternatives))
    if "enum" in schema:
        *others, last = schema["enum"]
        return f"{', '.join(map(str, others))} or {last}" if others else str(last)
    if "const" in schema:
        return str(schema["const"])
    if "prefixItems" in schema:
        return f"[{', '.join(describe_values(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list, each: {describe_values(schema['items'])}"
    if schema.get("type") == "boolean":
        return "true or false"
    kind = "path" if schema.get("format") == "path" else schema.get("type", "any value")
    symbols = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{symbol} {schema[key]:g}" for key, symbol in symbols.items() if key in schema]
    return f"{kind} {' and '.join(bounds)}" if bounds else kind
