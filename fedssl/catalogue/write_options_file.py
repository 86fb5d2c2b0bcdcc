"""Writes options.json anew: `python -m fedssl.catalogue.write_options_file`, after an option has changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..options import Options
from ..parts import part_class, part_names
from ..recipe import Recipe
from ..recipe_text import PART_KEYS
from .options_file import FILE_NAME, PUBLIC_IMAGES, Schema


def options_text() -> str:
    """What `options.json` must hold."""
    recipe = _schema(Recipe)
    for key, (_, many) in PART_KEYS.items():  # the schema of a part is that of its class, under "parts"
        recipe["properties"][key] = {"description": Recipe.model_fields[key].description} | (
            {"default": []} if many else {}
        )
    recipe["$defs"] = {name: recipe["$defs"][name] for name in sorted(_references(recipe, recipe["$defs"]))}
    parts: dict[str, dict[str, Schema]] = {}
    for folder, _ in PART_KEYS.values():
        parts[folder] = {name: _part_schema(folder, name) for name in part_names(folder)}
    return json.dumps({"recipe": recipe, "parts": parts}, indent=1, ensure_ascii=False) + "\n"


def _part_schema(folder: str, name: str) -> Schema:
    cls = part_class(folder, name)
    schema = _schema(cls) | {"description": _first_paragraph(sys.modules[cls.__module__].__doc__)}
    # Not an option: presets take public images out of the training images where a part needs them.
    return schema | ({PUBLIC_IMAGES: True} if getattr(cls, PUBLIC_IMAGES, False) else {})


def _schema(model: type[Options]) -> Schema:
    """A model's JSON schema without the parts that repeat what is in it."""
    schema = model.model_json_schema()
    for one in (schema, *schema.get("$defs", {}).values()):
        one["description"] = _first_paragraph(one.get("description"))
        del one["title"]
        for option in one["properties"].values():
            option.pop("title", None)
            if "$ref" in option and isinstance(option.get("default"), dict):
                option["default"] = {}  # the defaults of its own keys
            elif option.get("type") == "array":
                option.setdefault("default", [])  # a default_factory, which pydantic leaves out
    return schema


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def _references(value: Any, definitions: dict[str, Schema]) -> set[str]:
    """The names of all definitions that a schema refers to, also through others."""
    if isinstance(value, list):
        return set().union(*(_references(item, definitions) for item in value))
    if not isinstance(value, dict):
        return set()
    names: set[str] = set().union(*(_references(v, definitions) for key, v in value.items() if key != "$defs"))
    if isinstance(value.get("$ref"), str):
        name = value["$ref"].rpartition("/")[2]
        names |= {name} | _references(definitions[name], definitions)
    return names


def main() -> None:
    """Write the file."""
    path = Path(__file__).with_name(FILE_NAME)
    path.write_text(options_text(), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
