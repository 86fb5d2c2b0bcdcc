"""Nested values by dotted keys, and texts as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedssl.errors import UserError
from fedssl.recipe.overrides import flatten_keys
from fedssl.recipe.reading import load_recipe
from fedssl.reports.evaluation import data_options, parse_data
from fedssl.tables.table import load_table
from tests.fedssl.conftest import tiny_values

#: each is something else to YAML, or to its version 1.1
ODD_TEXTS = (
    *("2024", "-7", "1.5", "1.50", "1e5", "1.0e-05", "0x10", "010", "1_000", "12:30", ".nan"),
    *("2020-01-01", "2020-13-45", "true", "True", "on", "no", "~/x", "é"),
)
#: these only on the command line: a file has quotes for them
MARKS = (
    *("scans #2", "[MRI] x", "a: b", "{x}", "*x", "&x", "!x", "%x", "@x", "-", "? x", "`x", "a, b", "x]"),
    "99999999999999999999",
)
TEXT_KEYS = (
    *("name", "description", "data.path", "data.public_path", "data.labels", "data.label_column", "data.file_column"),
    *("partition.column", "data.class_names.0", "architectures.0", "evaluation.downstream.mine.path"),
)


@pytest.mark.parametrize("key", TEXT_KEYS)
def test_on_the_command_line_a_text_is_what_was_typed(key, tmp_path):
    data, partition = {"name": "images", "path": "x", "labels": "x"}, {"name": "column", "column": "x"}
    if key == "data.class_names.0":
        data, partition = {"name": "none", "image_shape": [1, 8, 8], "class_names": ["a"]}, {"name": "sites"}
    values = tiny_values(data=data, partition=partition, evaluation={"downstream": {"mine": {"name": "npz"}}})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values | {"preset": "none", "engine": "flower"}))
    given = [] if "mine" in key else ["evaluation.downstream.mine.path=x"]
    for text in (*ODD_TEXTS, *MARKS):
        for typed in (text, f" '{text}' ") if text in ("2024", "on", "scans #2") else (text,):
            recipe = load_recipe(tmp_path / "base.yaml", [*given, f"{key}={typed}"])
            assert flatten_keys(recipe.model_dump(mode="json"))[key] == text


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_in_a_file_an_unquoted_text_is_what_was_written(text, tmp_path):
    recipe = yaml.safe_dump(tiny_values(data={}, name="x", preset="none", partition={"name": "column"}))
    recipe = recipe.replace("data: {}", f"data: {{name: images, path: {text}, labels: {text}, label_column: {text}}}")
    recipe = recipe.replace("name: column", f"name: column\n  column: {text}").replace("- small_convnet", f"- {text}")
    recipe += f"model:\n  weights: {{{text}: {text}}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    values = yaml.safe_load(load_recipe(tmp_path / "recipe.yaml").to_yaml())
    read = [values["data"][key] for key in ("path", "labels", "label_column")] + [values["partition"]["column"]]
    assert [*read, *values["architectures"], *values["model"]["weights"]] == [text] * 6
    assert Path(values["model"]["weights"][text]).name == Path(text).name
    labels = f"{{label: {text}, recipe: local_only, settings: {{data: {{path: {text}}}}}}}"
    if text not in ("~/x", "é", "1.5", "1.50", ".nan", "-7"):  # which are no names of a table
        table = f"name: x\nmethod: {text}\nseeds: [0]\nrows: [{labels}]\npaper: {{{text}: {{knn: {text}}}}}\n"
        (tmp_path / "table.yaml").write_text(table)
        loaded = load_table(tmp_path / "table.yaml")
        assert (loaded.rows[0].label, loaded.method, loaded.paper) == (text, text, {text: {"knn": text}})


@pytest.mark.parametrize("text", [*ODD_TEXTS, *MARKS[:2]])
def test_the_data_of_an_evaluation_are_texts_too(text):
    assert parse_data(f"name=npz,path={text}").path == Path(text)


def test_null_is_none_and_numbers_stay_numbers(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_values(preset="none")))
    changes = ["data.path=null", "data.label_column=", "training.learning_rate=1e-3", "seed=1_0", "data.download=Yes"]
    recipe = load_recipe(tmp_path / "base.yaml", changes)
    assert (recipe.data.path, recipe.data.label_column, recipe.training.learning_rate) == (None, None, 1e-3)
    assert (recipe.seed, recipe.data.download) == (10, True)
    assert data_options({"name": "npz", "path": 2024}).path == Path("2024")
    for wrong in ("seed=true", "seed=0x10", "seed=99999999999999999999", "rounds=12:30"):
        with pytest.raises(UserError, match=r"input should be|more than 64 bits"):
            load_recipe(tmp_path / "base.yaml", [wrong])


def test_keys_are_those_of_overrides():
    values = {"a": {"b": [1, {"c": None}]}, "d": [], "e": {}}
    assert flatten_keys(values) == {"a.b.0": 1, "a.b.1.c": None, "d": [], "e": {}}
    assert flatten_keys(values["a"], "a") == {"a.b.0": 1, "a.b.1.c": None}
