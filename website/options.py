"""The page of all options: every key of a recipe and of each part, from the models' JSON schemas."""

import json
from typing import Any

from fedssl.parts import part_class, part_names
from fedssl.recipe.recipe import Recipe
from fedssl.recipe.show import describe_values, first_paragraph, part_summary
from fedssl.tables.files import markdown_table
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
        if path in PART_KEYS:
            values = "a list of parts" if PART_KEYS[path][1] else "a part"
        elif reference := option.get("$ref"):
            inner.append(_section(path, path, definitions[reference.rpartition("/")[2]], definitions))
            continue
        elif prefix and key == "name" and option.get("default") == "":  # a part's own
            continue
        else:
            values = describe_values(option)
        # A default_factory, which a schema does not hold, makes an empty list.
        default = (
            "must be given"
            if key in schema.get("required", ())
            else f"`{json.dumps(option.get('default', []), ensure_ascii=False)}`"
        )
        rows.append([f"`{path}`", values, default, option.get("description", "")])
    table = markdown_table(["key", "values", "default", "what it means"], rows, text_columns=4).replace("<", "&lt;")
    lines = [f"## {heading}", first_paragraph(schema.get("description")), table if rows else "It has no own options."]
    return "\n\n".join([line for line in lines if line] + inner)
