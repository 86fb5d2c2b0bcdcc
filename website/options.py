"""The page of all options: every key of a recipe and of each part, from the models' JSON schemas."""

from __future__ import annotations

import json
from typing import Any

from fedssl.parts import part_class, part_names
from fedssl.recipe.recipe import Recipe
from fedssl.recipe.show import describe_values, first_paragraph, part_summary
from fedssl.untrusted import PART_KEYS


def page() -> str:
    """Markdown: a section for each mapping of a recipe, then one for each part, by kind."""
    recipe = Recipe.model_json_schema()
    sections = [_section("Keys at the top", "", recipe, recipe["$defs"])]
    for key, (folder, many) in PART_KEYS.items():
        for name in part_names(folder):
            part = part_class(folder, name)
            schema = part.model_json_schema() | {"description": part_summary(part)}
            prefix = f"{key}.0" if many else key
            sections.append(_section(f"{key}: {name}", prefix, schema, schema.get("$defs", {})))
    return "\n\n".join(sections)


def _section(heading: str, prefix: str, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A mapping's keys as a table, then those of the mappings in it, each under its own heading."""
    rows, inner = [], []
    for key, option in schema["properties"].items():
        path = f"{prefix}.{key}" if prefix else key
        reference, meaning = option.get("$ref"), _cell(option.get("description", ""))
        if reference and path not in PART_KEYS:
            inner.append(_section(path, path, definitions[reference.rpartition("/")[2]], definitions))
        elif not (prefix and key == "name" and schema.get("properties", {}).get("name", {}).get("default") == ""):
            rows.append(f"| `{path}` | {_cell(_values(option, path))} | {_default(option, key, schema)} | {meaning} |")
    table = "\n".join(["| key | values | default | what it means |", "|---|---|---|---|", *rows])
    lines = [
        f"## {heading}",
        first_paragraph(schema.get("description")),
        table if rows else "It has no options of its own.",
    ]
    return "\n\n".join([line for line in lines if line] + inner)


def _values(option: dict[str, Any], path: str) -> str:
    if path in PART_KEYS:
        return "a list of parts" if PART_KEYS[path][1] else "a part"
    return describe_values(option)


def _default(option: dict[str, Any], key: str, schema: dict[str, Any]) -> str:
    if key in schema.get("required", ()):
        return "must be given"
    default = option.get("default", [])  # a default_factory, which a schema does not hold, makes an empty list
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
