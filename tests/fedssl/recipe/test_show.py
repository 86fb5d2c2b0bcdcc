"""Every option of every model is described, and says in words which values it takes."""

from __future__ import annotations

import functools

import pytest

from fedssl.parts import part_class, part_names
from fedssl.recipe.recipe import Recipe
from fedssl.recipe.show import describe_values, part_summary
from fedssl.untrusted import PART_KEYS

PARTS = [(folder, name) for folder, _ in PART_KEYS.values() for name in part_names(folder)]


@functools.cache
def schemas() -> dict[str, dict]:
    """Every option model's schema by the name that a message calls it by, without those of the parts' bases."""
    recipe = Recipe.model_json_schema()
    models = {name: schema for name, schema in recipe["$defs"].items() if name != "Part"}
    found = {"recipe": recipe} | models
    for folder, name in PARTS:
        schema = part_class(folder, name).model_json_schema()
        found |= {f"{folder}/{name}": schema} | schema.get("$defs", {})
    return found


@pytest.mark.parametrize("name", schemas())
def test_every_option_of_every_model_is_described(name):
    schema = schemas()[name]
    assert schema["description"]
    for key, option in schema["properties"].items():
        assert option.get("description"), f"{name}: give {key} a Field(description=...)"
        assert describe_values(option), f"{name}: {key}"


@pytest.mark.parametrize(("folder", "name"), PARTS)
def test_every_part_is_summarised(folder, name):
    assert part_summary(part_class(folder, name))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1}, "integer >= 1"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, "number > 0 or null"),
        ({"enum": ["sgd", "adam", "adamw"]}, "sgd, adam or adamw"),
        ({"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}]}, "[number, number]"),
        ({"type": "boolean"}, "true or false"),
        ({"type": "string", "format": "path"}, "path"),
    ],
)
def test_values_in_words(schema, words):
    assert describe_values(schema) == words
