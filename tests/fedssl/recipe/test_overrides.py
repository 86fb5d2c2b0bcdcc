"""Nested values by dotted keys."""

from __future__ import annotations

from fedssl.recipe.overrides import flatten_keys


def test_keys_are_those_of_overrides():
    values = {"a": {"b": [1, {"c": None}]}, "d": [], "e": {}}
    assert flatten_keys(values) == {"a.b.0": 1, "a.b.1.c": None, "d": [], "e": {}}
    assert flatten_keys(values["a"], "a") == {"a.b.0": 1, "a.b.1.c": None}
