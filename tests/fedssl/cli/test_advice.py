"""What a message advises to type is what the command line takes: its options, and the keys and values of recipes."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
from pathlib import Path
from typing import Union

import click
import pytest
from pydantic import TypeAdapter
from typer.main import get_command

import fedssl
from fedssl.cli import app
from fedssl.data.pixels import parse_window
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.options import types_at
from fedssl.recipe.overrides import read_text
from fedssl.recipe.recipe import Recipe
from fedssl.untrusted import PART_KEYS

#: options of docker, and of the programs of Flower that fedssl starts
OF_OTHERS = {"--shm-size", "--auth-supernode-private-key", "--database", "--disable-runtime-dependency-installation"}
OF_OTHERS |= {"--enable-supernode-auth", "--node-config", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
SETTING = re.compile(r"(?<![\w.-])([a-z_]+(?:\.[a-z_0-9]+)*)=('[^']*'|\[[^\]]*\]|[^\s;,:)'\"`]+)")
PLACES = {"LOW": "0", "HIGH": "1", "NUMBER": "1", "N": "1"}  # of what the user fills in


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Every text of the sources, with its place; what an f-string fills in is `{}`."""
    found = []
    for file in sorted(Path(fedssl.__file__).parent.rglob("*.py")):
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


def test_a_folder_with_a_space_is_one_word_of_the_advised_command(tiny, finished, tmp_path):
    path = tmp_path / "my runs" / "one"
    shutil.copytree(finished(tiny()), path)
    with pytest.raises(UserError) as caught:
        run(tiny(), path)
    advised = re.search(r"fedssl (run --resume .*), or give --overwrite", str(caught.value))
    assert advised is not None
    assert shlex.split(advised[1]) == ["run", "--resume", str(path)]
