"""Recipes: how they are read and overridden, what they name and describe, and which do not fit together."""

import functools
from pathlib import Path

import pytest
import yaml

from fedssl.data.options import DataOptions
from fedssl.engines.in_process import resume, run
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.options import validated
from fedssl.parts import part_class, part_names
from fedssl.recipe.overrides import flatten_keys
from fedssl.recipe.reading import load_recipe, parse_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.recipe.show import describe_values, part_summary
from fedssl.reports.evaluation import parse_data
from fedssl.tables.table import load_table
from fedssl.untrusted import PART_KEYS
from tests.fedssl.conftest import ALIGNED, AVERAGED, OWN_PART, tiny_values
from tests.fedssl.killed_runs import Killed, KilledIn


def test_the_resolved_recipe_holds_the_options_of_parts_and_overrides_reach_mappings_and_lists():
    recipe = load_recipe("hetero_ssfl", ["training.batch_size=16", "regularizers.0.weight=2", "seed=5"])
    assert (recipe.training.batch_size, recipe.regularizers[0].weight, recipe.seed) == (16, 2, 5)
    assert "target: peers" in recipe.to_yaml()
    assert "target_momentum: 0.99" in recipe.to_yaml()
    by_name = ["objective=simclr", "objective.temperature=0.3", "regularizers=[cka_alignment]"]
    by_name.append("regularizers.0.weight=2")
    recipe = load_recipe("hetero_ssfl", by_name)
    assert (recipe.objective.temperature, recipe.regularizers[0].weight) == (0.3, 2)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainin.batch_size=16", ["trainin: unknown key", "did you mean training?"]),
        ("training.batch_size=abc", ["training.batch_size", "integer", "'abc'"]),
        ("rounds=9223372036854775808", ["rounds", "at most 2147483647"]),
        ("objective.hidden_features=2147483648", ["hidden_features: input should be at most 2147483647"]),
        ("evaluation.linear.learning_rate=1e308", ["evaluation.linear.learning_rate: input should be at most 1e+38"]),
        ("training.batch_size=1", ["training.batch_size", "greater than or equal to 2", "got 1"]),
        ("regularizers.0.weights=1", ["regularizers.0.weights: unknown key", "did you mean weight?"]),
        ("regularizers.0.weight=.nan", ["regularizers.0.weight", "finite"]),
        ("regularizers.3.weight=1", ["list of 1", "'3'"]),
        ("rounds=true", ["rounds: input should be a number or a text, not true or false, got true"]),
        ("regularizers=cka_alignment", ["regularizers: expected a list"]),
        ("architectures=resnet18", ["architectures: expected a list such as [value], got 'resnet18'"]),
        ("model=resnet18", ["base.yaml: model: expected a mapping such as {key: value}, got 'resnet18'"]),
        ("flower.differential_privacy=local_dp", ["flower.differential_privacy: expected a mapping such as"]),
        ("aggregators.0.target=friends", ["aggregators.0.target", "'untrained' or 'oracle'", "'friends'"]),
        ("objective.name=byoll", ["objective.name", ", ".join(part_names("objectives"))]),
        ("objective=3", ["objective: expected a part", "got 3"]),
        ("regularizers=[json:JSONDecoder]", ["json:JSONDecoder must be a subclass of Regularizer"]),
        ("regularizers=[json:nothing]", ["json:nothing must be a subclass of Regularizer, got None"]),
        ("regularizers=[nowhere_at_all:Part]", ["nowhere_at_all could not be imported"]),
        ("objective=fedssl.objectives.base:Objective", ["objective.name: Objective does not define build, step"]),
        ("data.name=mnist", ["data.name", "'digits'", "'mnist'"]),
        ("rounds", ["'rounds' is not key=value"]),
        ("seed.a=1", ["seed is 0 and has no entries"]),
        ("data.download.a=1", ["data.download is false and has no entries"]),
        ("architectures=[", ["not YAML"]),
        ("evaluation.downstream={a_b: {name: digits}}", ["expected letters and digits alone, got 'a_b'"]),
        ("evaluation.downstream={a: {nme: digits}}", ["evaluation.downstream.a.nme: unknown key; did you mean name?"]),
        (
            "flower.differential_privacy={name: local_dp, epsilonn: 1, clipping_norm: 1, epsilon: 1, delta: 1e-5}",
            ["flower.differential_privacy.local_dp.epsilonn: unknown key; did you mean epsilon?"],
        ),
    ],
)
def test_a_bad_override_is_one_line_with_path_and_allowed_values(override, parts, tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(load_recipe("hetero_ssfl").to_yaml())
    with pytest.raises(UserError) as caught:
        load_recipe(base, [override])
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_all_problems_of_the_parts_are_told_at_once():
    values = tiny_values(objective={"name": "byol", "x": 1}, schedule="nowhere")
    with pytest.raises(UserError, match=r"objective\.x: unknown key.*schedule\.name: schedules has no part 'nowhere'"):
        parse_recipe(values)
    with pytest.raises(UserError, match=r"^recipe: data: name=npz needs path=an \.npz file$"):  # not with all of data
        parse_recipe(tiny_values(data={"name": "npz"}))


@pytest.fixture
def recipe_with_own_part(tmp_path):
    """`study/mine.yaml`, which names `study/parts/nothing.py` as seen from its own folder."""
    folder = tmp_path / "study"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "nothing.py").write_text(OWN_PART)
    values = tiny_values(regularizers=["./parts/nothing.py", {"name": "./parts/nothing.py", "strength": 2.0}])
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))
    return folder / "mine.yaml"


def test_part_files_are_seen_from_the_recipes_folder_whoever_reads_it(recipe_with_own_part, tmp_path, monkeypatch):
    part = str(recipe_with_own_part.parent / "parts" / "nothing.py")
    study = tmp_path / "study"
    for folder, path in (("/", recipe_with_own_part), (tmp_path, Path("study/mine.yaml")), (study, "mine.yaml")):
        monkeypatch.chdir(folder)
        recipe = load_recipe(path, trust=True)
        assert [regularizer.name for regularizer in recipe.regularizers] == [part, part]
        assert recipe.regularizers[1].strength == 2.0
    monkeypatch.chdir(study / "parts")  # an override is seen from where it is typed
    assert load_recipe("fedbyol", ["regularizers=[./nothing.py]"]).regularizers[0].name == part


def test_a_run_with_a_part_file_resumes_from_another_folder(recipe_with_own_part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        run(load_recipe("study/mine.yaml", trust=True), tmp_path / "run", KilledIn(2))
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run").checkpoint.finished
    again, first = tmp_path / "run" / "recipe.yaml", recipe_with_own_part
    assert load_recipe(again, trust=True) == load_recipe(first, trust=True)


MEAN = {"name": "representation_mean"}
ORACLE = MEAN | {"target": "oracle"}
SMALL_MEMORY = {"objective": {"name": "orchestra", "memory": 3}, "aggregators": ["weighted_mean", "orchestra_clusters"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guard": {"minimum_answers": 4}}, "guard.minimum_answers is 4, but a round asks only 3 clients"),
        ({"clients_per_round": 4}, "clients_per_round is 4, but partition.clients is only 3"),
        (ALIGNED | {"data": {"name": "digits"}}, "representation_mean needs public images|cka_alignment needs public"),
        (ALIGNED | {"data": {"name": "digits", "public_holdout": 1}}, "needs public images, at least two"),
        ({"regularizers": ALIGNED["regularizers"]}, "cka_alignment reads what representation_mean sends"),
        (AVERAGED | {"architectures": ["small_convnet", "small_resnet10"]}, "name one architecture"),
        (AVERAGED | {"local_update": "keep_own"}, "keep_own does not go with aggregators .*weighted_mean.*use replace"),
        ({"local_update": "replace"}, "without exchanged weights use keep_own"),
        (AVERAGED | SMALL_MEMORY, "local_clusters is 16, but objective.memory is only 3"),
        (ALIGNED | {"aggregators": [ORACLE]}, "target oracle and oracle None: .*, and no other, needs the folder"),
        (ALIGNED | {"aggregators": [MEAN | {"oracle": "timm:resnet18"}]}, "target peers and oracle timm:resnet18"),
        (ALIGNED | {"aggregators": [ORACLE | {"oracle": "encoder"}], "engine": "flower"}, "engine flower's sites lack"),
        ({"architectures": ["resnet19"]}, "resnet1"),
        ({"training": {"batch_size": 64}}, "fewer than training.batch_size 64.*lower the batch size"),
        ({"partition": {"name": "iid", "clients": 120, "min_samples": 1}}, "client 0 has 1 image, fewer than"),
        ({"data": {"name": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
        ({"partition": {"name": "disjoint_classes", "clients": 11}}, "the data have only 10; lower partition.clients"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_training(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        build_federation(parse_recipe(tiny_values(**changes)))
    assert "\n" not in str(caught.value)


# Texts as they are typed

#: each is something else to YAML, or to its version 1.1
ODD_TEXTS = (
    *("2024", "-7", "1.5", "1.50", "1e5", "1.0e-05", "0x10", "010", "1_000", "12:30", ".nan"),
    *("2020-01-01", "2020-13-45", "true", "True", "on", "no", "~/x", "é"),
)
OTHER_DATA = "evaluation.downstream.mine.path"
#: these only on the command line: a file has quotes for them
MARKS = (
    *("scans #2", "[MRI] x", "a: b", "{x}", "*x", "&x", "!x", "%x", "@x", "-", "? x", "`x", "a, b", "x]"),
    "99999999999999999999",
)
TEXT_KEYS = {
    "images": (
        {"data": {"name": "images", "path": "x", "labels": "x"}, "partition": {"name": "column", "column": "x"}},
        ("name", "data.path", "data.labels", "data.label_column", "partition.column", "architectures.0", OTHER_DATA),
    ),
    "classes": (
        {"data": {"name": "none", "image_shape": [1, 8, 8], "class_names": ["a"]}, "partition": {"name": "sites"}},
        ("data.class_names.0", OTHER_DATA),
    ),
}


@pytest.mark.parametrize("base", TEXT_KEYS)
def test_on_the_command_line_a_text_is_what_was_typed(base, tmp_path):
    values, keys = TEXT_KEYS[base]
    values = tiny_values(**values, evaluation={"downstream": {"mine": {"name": "npz"}}})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values | {"preset": "none", "engine": "flower"}))
    for text in (*ODD_TEXTS, *MARKS):
        for typed in (text, f" '{text}' ") if text in ("2024", "on", "scans #2") else (text,):
            recipe = load_recipe(tmp_path / "base.yaml", [f"{key}={typed}" for key in keys])
            found = flatten_keys(recipe.model_dump(mode="json"))
            assert {key: found[key] for key in keys} == dict.fromkeys(keys, text)


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


def test_the_data_of_an_evaluation_are_texts_too():
    for text in (*ODD_TEXTS, *MARKS[:2]):
        assert parse_data(f"name=npz,path={text}").path == Path(text)


def test_null_is_none_and_numbers_stay_numbers(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_values(preset="none")))
    changes = ["data.path=null", "data.label_column=", "training.learning_rate=1e-3", "seed=1_0", "data.download=Yes"]
    recipe = load_recipe(tmp_path / "base.yaml", changes)
    assert (recipe.data.path, recipe.data.label_column, recipe.training.learning_rate) == (None, None, 1e-3)
    assert (recipe.seed, recipe.data.download) == (10, True)
    assert validated(DataOptions, {"name": "npz", "path": 2024}, "data").path == Path("2024")
    for wrong in ("seed=true", "seed=0x10", "seed=99999999999999999999", "rounds=12:30"):
        with pytest.raises(UserError, match="input should be"):
            load_recipe(tmp_path / "base.yaml", [wrong])


# What is described

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
    if "/" in name:
        assert part_summary(part_class(*name.split("/")))
