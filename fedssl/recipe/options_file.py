"""Every option of recipes and parts as data: `options.json`, read without importing what the options belong to.

The file holds pydantic's JSON schema (draft 2020-12) of `Recipe` under "recipe" and of each shipped part under
"parts", by folder and name. `write_options_file.py` makes it from the models. The models that are built here from the
file convert and refuse values as those do, with the same messages. They lack the rules that look at several keys.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field, InstanceOf, SerializeAsAny, create_model

from ..options import Options
from ..parts import part_class, part_names
from ..untrusted import PART_KEYS
from .recipe import Recipe

Schema = dict[str, Any]


FILE_NAME = "options.json"


PUBLIC_IMAGES = "needs_public_images"  # the class variable of a part, in its schema where it is true


_PLAIN_TYPES = {"integer": int, "number": float, "boolean": bool, "string": str, "null": None}


_CONSTRAINTS = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "minItems": "min_length",
    "minLength": "min_length",
    "maxItems": "max_length",
    "pattern": "pattern",
}


_SYMBOLS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@cache
def options_schema() -> dict[str, Any]:
    """The content of `options.json`."""
    return json.loads((resources.files(__package__) / FILE_NAME).read_text(encoding="utf-8"))


@cache
def recipe_model() -> type[Options]:
    """A model of recipes with the keys, defaults and bounds of `recipe.Recipe`."""
    return _build_model("Recipe", options_schema()["recipe"])


@cache
def part_model(folder: str, name: str) -> type[Options]:
    """A model of a part with the options, defaults and bounds of its class; the class itself for a part of one's own.

    Raises:
        UserError: see `parts.part_class`.
    """
    schema = options_schema()["parts"][folder].get(name)
    if schema is None:
        from ..parts import part_class

        return part_class(folder, name)
    model = _build_model(name, schema)
    setattr(model, PUBLIC_IMAGES, schema.get(PUBLIC_IMAGES, False))
    return model


def describe_values(schema: Schema) -> str:
    """Which values an option takes, in words: `integer >= 1 or null`, `sgd, adam or adamw`."""
    if "$ref" in schema:
        return "a mapping"
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
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
    if schema.get("type") == "object":
        return "a mapping"
    if schema.get("type") == "boolean":
        return "true or false"
    kind = "path" if schema.get("format") == "path" else schema.get("type", "any value")
    bounds = [f"{symbol} {schema[key]:g}" for key, symbol in _SYMBOLS.items() if key in schema]
    return f"{kind} {' and '.join(bounds)}" if bounds else kind


def _build_model(name: str, schema: Schema, definitions: dict[str, Schema] | None = None) -> type[Options]:
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    fields: dict[str, Any] = {}
    for key, option in schema["properties"].items():
        default = ... if key in schema.get("required", ()) else option["default"]
        if name == "Recipe" and key in PART_KEYS:
            part = SerializeAsAny[InstanceOf[Options]]
            annotation: Any = list[part] if PART_KEYS[key][1] else part
        else:
            annotation = _annotation(option, definitions)
        fields[key] = (annotation, Field(default, description=option.get("description")))
    return create_model(name, __base__=Options, __doc__=schema.get("description"), **fields)


def _annotation(schema: Schema, definitions: dict[str, Schema]) -> Any:
    """The Python type behind the JSON schema of a value."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _build_model(name, definitions[name], definitions)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        union: Any = Union[tuple(_annotation(one, definitions) for one in alternatives)]  # noqa: UP007
        discriminator = schema.get("discriminator")
        return Annotated[union, Field(discriminator=discriminator["propertyName"])] if discriminator else union
    if "enum" in schema or "const" in schema:
        return Literal[tuple(schema.get("enum", [schema.get("const")]))]
    if "prefixItems" in schema:
        return tuple[tuple(_annotation(item, definitions) for item in schema["prefixItems"])]  # type: ignore[misc]
    if schema["type"] == "array":
        item = _annotation(schema["items"], definitions)
        plain: Any = list[item]  # type: ignore[valid-type]
    elif schema["type"] == "object":
        value = _annotation(schema["additionalProperties"], definitions)
        plain = dict[str, value]  # type: ignore[valid-type]
    else:
        plain = Path if schema.get("format") == "path" else _PLAIN_TYPES[schema["type"]]
    constraints = {argument: schema[key] for key, argument in _CONSTRAINTS.items() if key in schema}
    return Annotated[plain, Field(**constraints)] if constraints else plain


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
