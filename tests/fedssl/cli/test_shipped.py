"""`fedssl recipes`, `tables`, `presets` and `show`: what they print and refuse, and that the lists need no torch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from fedssl.recipe.overrides import read_values, shipped_names
from fedssl.recipe.reading import load_recipe

HEAVY = ("torch", "torchvision", "timm", "sklearn", "numpy", "matplotlib")
LISTS = (["recipes"], ["tables"], ["presets"], ["--version"], ["--help"], ["run", "--help"])
WITHOUT_HEAVY_PACKAGES = f"""
import sys
from fedssl.cli import main
for arguments in {LISTS}:
    sys.argv = ["fedssl", *arguments]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code, arguments
    assert not (heavy := [name for name in {HEAVY} if name in sys.modules]), (arguments, heavy)
"""
OWN_PART = '''"""A term of one's own."""

from pydantic import Field

from fedssl.regularizers.base import Regularizer


class Own(Regularizer):
    """Adds nothing.

    It is for a test.
    """

    strength: float = Field(0.5, ge=0, description="how much of nothing")

    def start_round(self, local):
        return lambda step: 0.0
'''


@pytest.fixture
def fedssl(fedssl):
    """The same at the width of a plain terminal."""
    return functools.partial(fedssl, columns=80)


def test_what_only_lists_imports_neither_torch_nor_other_heavy_packages():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY_PACKAGES], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["recipe", "table"])
def test_a_list_has_one_line_for_each_under_its_paper(fedssl, kind):
    code, out, _ = fedssl(f"{kind}s")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    headings, entries = [], []
    for line in filter(None, lines):
        if line.startswith("  "):
            name = line.split()[0]
            entries.append(name)
            assert read_values(name, kind)["description"].startswith(f"{headings[-1]}: ")
        else:
            headings.append(line)
    assert sorted(entries) == shipped_names(kind)
    assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("columns", [80, 120])
def test_show_tells_value_origin_and_meaning_of_every_key(fedssl, columns):
    code, out, _ = fedssl(
        "show", "hetero_ssfl", "rounds=2", "training.learning_rate=1e-3", "architectures.0=resnet18", columns=columns
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    text = " ".join(out.split())
    assert "rounds = 2 (override) rounds of the whole run [integer >= 1]" in text
    assert "training.learning_rate = 0.001 (override)" in text
    assert "architectures = [resnet18, small_convnet," in text
    assert "small_resnet18] (override)" in text
    assert "training.local_epochs = 3 (preset)" in text
    assert "training.momentum = 0.9 (default)" in text
    assert "clients_per_round = null (default)" in text
    assert "data.public_holdout = 300 (preset)" in text
    assert "objective.symmetric = false (recipe)" in text
    assert "regularizers.0.name = cka_alignment (recipe) Hetero-SSFL's proximal term:" in text
    shown = {line.partition(" = ")[0] for line in out.splitlines() if " = " in line and line[:1].isalpha()}
    assert shown == set(dotted(load_recipe("hetero_ssfl").model_dump(mode="json")))


def dotted(values, prefix=""):
    """The keys of all values that are no mapping and no part, as overrides name them."""
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_another_part_shows_its_own_values_and_not_the_recipes(fedssl):
    _, out, _ = fedssl("show", "hetero_ssfl", "objective.name=simsiam")
    assert "objective.name = simsiam  (override)" in out
    assert "objective.output_features = 256  (preset)" in out
    assert "objective.stop_gradient = true  (default)" in out
    assert "symmetric" not in out


CHANGES = ["seed=3", "training.learning_rate=1e-3", "evaluation.fine_tune={}"]
PRIVACY = "flower.differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 2, delta: 1e-5}"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [*((name, CHANGES) for name in shipped_names("recipe")), ("fedbyol", ["engine=flower-simulation", PRIVACY])],
)
def test_yaml_is_the_recipe_that_run_resolves(fedssl, tmp_path, name, overrides):
    code, out, _ = fedssl("show", name, *overrides, "--yaml")
    assert code == 0
    resolved = load_recipe(name, overrides)
    assert out == resolved.to_yaml()
    (tmp_path / "shown.yaml").write_text(out)
    assert load_recipe(tmp_path / "shown.yaml") == resolved


def test_a_part_of_ones_own_is_shown_like_any_other(fedssl, tmp_path):
    (tmp_path / "own.py").write_text(OWN_PART)
    code, out, _ = fedssl("show", "fedbyol", "regularizers=[{name: ./own.py, strength: 2}]")
    text = " ".join(out.split())  # a long path may start a line of its own
    assert code == 0
    assert f"regularizers.0.name = {tmp_path / 'own.py'} (override) Adds nothing. [" in text
    assert "regularizers.0.strength = 2.0 (override) how much of nothing [number >= 0]" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["heterossfl"],
        ["hetero_ssfl", "seed=-1", "data.bogus=1", "training.optimizer=sgdd"],
        ["hetero_ssfl", "flower.differential_privacy={name: other}"],
    ],
)
def test_show_refuses_a_wrong_key_or_value_with_the_message_of_run(fedssl, tmp_path, arguments):
    code, out, err = fedssl("show", *arguments)
    assert (code, out) == (2, "")
    assert (2, "", err) == fedssl("run", *arguments)
    assert err.startswith("fedssl: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
