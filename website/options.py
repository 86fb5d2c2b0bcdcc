"""The page of all options: every key of a recipe and of each part, from fedssl/catalogue/options.json."""

from __future__ import annotations

import json
from typing import Any

from fedssl.recipe.options_file import describe_values, options_schema
from fedssl.untrusted import PART_KEYS


def page() -> str:
    """Markdown: a section for each mapping of a recipe, then one for each part, by kind."""
    schema = options_schema()
    recipe = schema["recipe"]
    sections = [_section("Keys at the top", "", recipe, recipe["$defs"])]
    for folder, parts in schema["parts"].items():
        key, many = next((key, many) for key, (name, many) in PART_KEYS.items() if name == folder)
        prefix = f"{key}.0" if many else key
        for name, part in parts.items():
            heading = f"{key}: {name}"
            sections.append(_section(heading, prefix, part, part.get("$defs", {})))
    return "\n\n".join(sections)


def _section(heading: str, prefix: str, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A mapping's keys as a table, then those of the mappings in it, each under its own heading."""
    rows, inner = [], []
    for key, option in schema["properties"].items():
        path = f"{prefix}.{key}" if prefix else key
        reference, meaning = _reference(option), _cell(option.get("description", ""))
        if reference:
            inner.append(_section(path, path, definitions[reference], definitions))
        elif not (prefix and key == "name" and schema.get("properties", {}).get("name", {}).get("default") == ""):
            rows.append(f"| `{path}` | {_cell(_values(option, path))} | {_default(option, key, schema)} | {meaning} |")
    table = "\n".join(["| key | values | default | what it means |", "|---|---|---|---|", *rows])
    lines = [f"## {heading}", schema.get("description", ""), table if rows else "It has no options of its own."]
    return "\n\n".join([line for line in lines if line] + inner)


def _reference(option: dict[str, Any]) -> str | None:
    """The name of the one mapping that an option holds, None for any other option."""
    if "$ref" in option:
        return option["$ref"].rpartition("/")[2]
    return None


def _values(option: dict[str, Any], path: str) -> str:
    if path in PART_KEYS:
        return "a list of parts" if PART_KEYS[path][1] else "a part"
    return describe_values(option)


def _default(option: dict[str, Any], key: str, schema: dict[str, Any]) -> str:
    if key in schema.get("required", ()) or "default" not in option:
        return "must be given"
    default = option["default"]
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
