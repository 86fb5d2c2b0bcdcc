"""Recipes: how they are read, what they name, and which do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.parts import part_names
from fedssl.recipe.overrides import recipe_names
from fedssl.recipe.reading import load_recipe, parse_recipe
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_valid_and_resolves_to_itself(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(recipe.to_yaml())
    assert load_recipe(resolved) == recipe


def test_the_resolved_recipe_holds_the_options_of_parts_and_overrides_reach_mappings_and_lists():
    recipe = load_recipe("hetero_ssfl", ["training.batch_size=16", "regularizers.0.weight=2", "seed=5"])
    assert (recipe.training.batch_size, recipe.regularizers[0].weight, recipe.seed) == (16, 2, 5)
    assert "target: peers" in recipe.to_yaml()
    assert "target_momentum: 0.99" in recipe.to_yaml()


def test_another_part_does_not_inherit_the_old_ones_options():
    changes = ["objective.name=simsiam", "preset=none", "rounds=1", "architectures=[resnet18]"]
    recipe = load_recipe("hetero_ssfl", changes)
    assert (recipe.objective.name, recipe.objective.output_features) == ("simsiam", 2048)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainin.batch_size=16", ["trainin: unknown key", "did you mean training?"]),
        ("training.batch=16", ["training.batch: unknown key", "did you mean batch_size?", "local_epochs"]),
        ("training.batch_size=abc", ["training.batch_size", "integer", "'abc'"]),
        ("training.batch_size=1", ["training.batch_size", "greater than or equal to 2", "got 1"]),
        ("regularizers.0.weights=1", ["regularizers.0.weights: unknown key", "did you mean weight?"]),
        ("regularizers.0.weight=.nan", ["regularizers.0.weight", "finite"]),
        ("regularizers.3.weight=1", ["list of 1", "'3'"]),
        ("regularizers=cka_alignment", ["regularizers: expected a list"]),
        ("aggregators.0.target=friends", ["aggregators.0.target", "'peers', 'self' or 'untrained'", "'friends'"]),
        ("objective.name=byoll", ["objective.name", ", ".join(part_names("objectives"))]),
        ("objective=3", ["objective: expected a part", "got 3"]),
        ("data.name=mnist", ["data.name", "'digits'", "'mnist'"]),
        ("rounds=0", ["rounds", "got 0"]),
        ("rounds", ["'rounds' is not key=value"]),
        ("seed.a=1", ["seed is 0 and has no entries"]),
        ("architectures=[", ["not YAML"]),
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


PART = """
from fedssl.regularizers.base import Regularizer


class Nothing(Regularizer):
    weight: float = 1.0

    def start_round(self, local):
        return lambda step: self.weight * step.loss.new_zeros(())
"""


@pytest.fixture
def recipe_with_own_part(tmp_path):
    """`study/mine.yaml`, which names `study/parts/nothing.py` as seen from its own folder."""
    folder = tmp_path / "study"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "nothing.py").write_text(PART)
    values = tiny_values(regularizers=["./parts/nothing.py", {"name": "./parts/nothing.py", "weight": 2.0}])
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))
    return folder / "mine.yaml"


def test_part_files_are_seen_from_the_recipes_folder_whoever_reads_it(recipe_with_own_part, tmp_path, monkeypatch):
    part = str(recipe_with_own_part.parent / "parts" / "nothing.py")
    for folder, path in [
        ("/", recipe_with_own_part),
        (tmp_path, Path("study/mine.yaml")),
        (tmp_path / "study", "mine.yaml"),
    ]:
        monkeypatch.chdir(folder)
        recipe = load_recipe(path)
        assert [regularizer.name for regularizer in recipe.regularizers] == [part, part]
        assert recipe.regularizers[1].weight == 2.0
    monkeypatch.chdir(tmp_path / "study" / "parts")  # an override is seen from where it is typed
    assert load_recipe("fedbyol", ["regularizers=[./nothing.py]"]).regularizers[0].name == part


def test_a_run_with_a_part_file_resumes_from_another_folder(recipe_with_own_part, tmp_path, monkeypatch):
    class Interrupted(Observer):
        def round_ended(self, round_number, rows):
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(load_recipe("study/mine.yaml"), tmp_path / "run", Interrupted())
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run").checkpoint.finished
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == load_recipe(recipe_with_own_part)


@pytest.mark.parametrize(("text", "message"), [("a: [1", "not YAML"), ("- 1", "must hold a mapping")])
def test_a_recipe_that_is_no_yaml_or_no_mapping(text, message, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients_per_round": 4}, "clients_per_round is 4, but partition.clients is only 3"),
        (ALIGNED | {"data": {"name": "digits"}}, "representation_mean needs public images|cka_alignment needs public"),
        ({"regularizers": ALIGNED["regularizers"]}, "cka_alignment reads what representation_mean sends"),
        (AVERAGED | {"architectures": ["small_convnet", "small_resnet10"]}, "name one architecture"),
        (AVERAGED | {"local_update": "keep_own"}, "keep_own does not go with aggregators .*weighted_mean.*use replace"),
        ({"local_update": "replace"}, "without exchanged weights use keep_own"),
        ({"architectures": ["resnet19"]}, "resnet1"),
        ({"training": {"batch_size": 64}}, "fewer than training.batch_size 64.*lower the batch size"),
        ({"partition": {"name": "iid", "clients": 120, "min_samples": 1}}, "client 0 has 1 image, fewer than"),
        (ALIGNED | {"aggregators": [{"name": "representation_mean", "weights": [1, 2]}]}, "2 entries for 3 clients"),
        (ALIGNED | {"aggregators": [{"name": "representation_mean", "weights": [1, -2, 3]}]}, "non-negative"),
        ({"data": {"name": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
        ({"partition": {"name": "disjoint_classes", "clients": 11}}, "11"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_training(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        build_federation(parse_recipe(tiny_values(**changes)))
    assert "\n" not in str(caught.value)
