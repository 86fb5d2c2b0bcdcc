"""What the command line lists, shows and advises: complete, quick, and as `run` understands it."""

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Union

import click
import pytest
from pydantic import TypeAdapter
from typer.main import get_command

import fedssl as package
from fedssl.cli import app
from fedssl.data.pixels import parse_window
from fedssl.options import types_at
from fedssl.recipe.overrides import flatten_keys, read_text, read_values, shipped_names
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.untrusted import PART_KEYS
from tests.fedssl.conftest import ALIGNED, OWN_PART
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.short_runs import SMALL

# `fedssl recipes`, `tables`, `presets` and `show`

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


def test_show_tells_value_origin_and_meaning_of_every_key(fedssl):
    code, out, _ = fedssl("show", "hetero_ssfl", "rounds=2", "training.learning_rate=1e-3", "architectures=[resnet18]")
    assert code == 0
    assert max(map(len, out.splitlines()[:-1])) <= 80  # the last line is to be pasted
    text = " ".join(out.split())
    assert "rounds = 2 (override) rounds of the whole run [integer >= 1]" in text
    assert "training.learning_rate = 0.001 (override)" in text
    assert "architectures = [resnet18] (override)" in text
    assert "training.local_epochs = 3 (preset)" in text
    assert "training.momentum = 0.9 (default)" in text
    assert "[sgd, adam or adamw]" in text
    assert "objective.symmetric = false (recipe)" in text
    assert "regularizers.0.name = cka_alignment (recipe) Hetero-SSFL's proximal term:" in text
    shown = {line.partition(" = ")[0] for line in out.splitlines() if " = " in line and line[:1].isalpha()}
    values = flatten_keys(load_recipe("hetero_ssfl").model_dump(mode="json"))
    assert shown == {re.sub(r"\.\d+$", "", key) for key in values}  # a list of texts is one value


def test_another_part_shows_its_own_values_and_not_the_recipes(fedssl):
    _, out, _ = fedssl("show", "hetero_ssfl", "objective.name=simsiam")
    assert "objective.name = simsiam  (override)" in out
    assert "objective.output_features = 256  (preset)" in out
    assert "objective.stop_gradient = true  (default)" in out
    assert "symmetric" not in out


PRIVACY = "flower.differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 2, delta: 1e-5}"


def test_yaml_is_the_recipe_that_run_resolves(fedssl, tmp_path):
    changes = ["seed=3", "training.learning_rate=1e-3", "evaluation.fine_tune={}", "engine=flower-simulation", PRIVACY]
    code, out, _ = fedssl("show", "fedbyol", *changes, "--yaml")
    assert code == 0
    resolved = load_recipe("fedbyol", changes)
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


# The next command


def test_each_command_names_the_next_which_can_be_pasted(fedssl, finished, tiny, tmp_path, monkeypatch, capsys):
    def following(*words: str) -> list[str]:
        return shlex.split(fedssl(*words)[1].splitlines()[-1].removeprefix("Next: fedssl"))

    for listing in ("recipes", "presets"):
        assert following(*following(listing))[:2] == ["partition", "fedbyol"]
    assert following(*following("show", "fedbyol", "name=my own")) == ["run", "fedbyol", "name=my own"]
    for command in ("partition", "cost"):
        assert following(command, "fedbyol", "rounds=1", "engine=flower")[:3] == ["app", "fedbyol", "app"]
    shutil.copytree(finished(tiny(**ALIGNED | SMALL)), tmp_path / "a run")
    save_array(tmp_path / "my_images" / "0.png", random_pixels(8, 8))
    monkeypatch.setattr(webbrowser, "open", lambda uri: uri == (tmp_path / "a run" / "report.html").as_uri())
    words = following("report", "a run", "--no-images", "--open")
    assert words == ["export", "a run", "encoder", "--client", "0"]
    lines = re.findall(r"^    (.*)$", fedssl(*words)[1], re.MULTILINE)
    assert len(lines) == 4
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "load", raising=False)
    exec("\n".join(lines), {})
    assert capsys.readouterr().out.startswith("torch.Size([1, ")
    shutil.rmtree(tmp_path / "encoder")
    assert following(*words) == ["embed", "encoder", "my_images", "--output", "features.npz"]


# What a message advises to type is what the command line takes

#: options of docker, and of the programs of Flower that fedssl starts
OF_OTHERS = {"--shm-size", "--auth-supernode-private-key", "--database", "--disable-runtime-dependency-installation"}
OF_OTHERS |= {"--host", "--insecure", "--isolation", "--runtime-api-address", "--local-dir"}  # of Flower and hf
OF_OTHERS |= {"--enable-supernode-auth", "--node-config", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
SETTING = re.compile(r"(?<![\w.-])([a-z_]+(?:\.[a-z_0-9]+)*)=('[^']*'|\[[^\]]*\]|[^\s;,:)'\"`]+)")
PLACES = {"LOW": "0", "HIGH": "1", "NUMBER": "1", "N": "1"}  # of what the user fills in


@functools.cache
def texts(name: str = "fedssl") -> list[tuple[str, str]]:
    """Every text of a package's sources, with its place; what an f-string fills in is `{}`."""
    found = []
    for file in sorted((Path(package.__file__).parents[1] / name).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inner = {id(part) for node in joined for part in node.values}
        for node in ast.walk(tree):
            place = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found.append((place, "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                found.append((place, node.value))
    return found


def commands(command: click.Command, name: str = "fedssl") -> dict[str, set[str]]:
    """The options of each command, by its whole name."""
    options = {name: {option for parameter in command.params for option in parameter.opts} | {"--help"}}
    for word, inner in getattr(command, "commands", {}).items():
        options |= commands(inner, f"{name} {word}")
    return options


def filled_in(text: str) -> str:
    return re.sub("|".join(rf"\b{name}\b" for name in PLACES), lambda match: PLACES[match[0]], text)


def test_every_option_that_a_text_names_is_one():
    known = commands(get_command(app))
    known["fedssl provision"] |= known["fedssl provision folders"]  # which may be left out
    every = set().union(*known.values()) | OF_OTHERS
    wrong = [(place, option) for place, text in texts() for option in OPTION.findall(text) if option not in every]
    for place, text in texts():
        for name in sorted(known, key=len, reverse=True)[:-1]:
            for words in re.findall(rf"{name}((?: (?:[A-Z{{][\w{{}}.-]*|--[a-z-]+))+)", text):
                wrong += [(place, f"{name} {o}") for o in OPTION.findall(words) if o not in known[name]]
    assert wrong == []


def test_every_setting_that_a_text_names_can_be_made():
    checked = 0
    for place, text in texts():
        for key, value in SETTING.findall(text):
            keys = key.split(".")
            if keys[0] not in Recipe.model_fields or keys[0] in PART_KEYS or (len(keys) == 1 and keys[0] == "name"):
                continue  # not a setting, or one of a part
            types = types_at(Recipe, keys)
            assert types, f"{place}: there is no key {key}"
            if "{}" not in value:
                given = filled_in(value.strip("'").rstrip("."))
                TypeAdapter(Union[tuple(types)]).validate_python(read_text(Recipe, keys, given, place))  # noqa: UP007
                checked += 1
    assert checked > 30


def test_every_window_that_a_text_shows_can_be_given():
    windows = [window for _, text in texts() for window in re.findall(r"--window (\S+?)(?:, the|;|$)", text)]
    assert [parse_window(filled_in(window)) for window in windows] == [(0.0, 1.0)]
