"""options.json is what the option models say, and it explains every option."""

from __future__ import annotations

import json

import pytest

from fedssl.parts import part_names
from fedssl.recipe.options_file import describe_values, options_schema, options_text
from fedssl.untrusted import PART_KEYS


def models() -> dict[str, dict]:
    """Every option model's schema by the name that a message calls it by."""
    content = options_schema()
    found = {"recipe": content["recipe"]} | content["recipe"]["$defs"]
    for folder, parts in content["parts"].items():
        found |= {f"{folder}/{name}": schema for name, schema in parts.items()}
    return found


def test_the_file_is_up_to_date():
    assert options_schema() == json.loads(options_text()), "run `python -m fedssl.catalogue.write_options_file`"


def test_the_file_holds_every_part():
    for folder, _ in PART_KEYS.values():
        assert list(options_schema()["parts"][folder]) == part_names(folder)


@pytest.mark.parametrize("name", models())
def test_every_option_of_every_model_is_described(name):
    schema = models()[name]
    assert schema["description"]
    for key, option in schema["properties"].items():
        assert option.get("description"), f"{name}: give {key} a Field(description=...)"
        assert "default" in option or key in schema["required"]


def test_every_option_tells_which_values_it_takes():
    for name, schema in models().items():
        for key, option in schema["properties"].items():
            if name != "recipe" or key not in PART_KEYS:
                assert describe_values(option), f"{name}: {key}"


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
