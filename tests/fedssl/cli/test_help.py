"""The help that a user reads: every argument and option is explained, also at 80 columns."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any, get_type_hints

import pytest

from fedssl.cli import app
from fedssl.errors import installed_distribution

COMMANDS = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}


def plain(text: str) -> str:
    """Help without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def parameters(callback: Any) -> dict[str, Any]:
    """What a command declares of each of its arguments and options."""
    hints = get_type_hints(callback, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if name != "return"}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_is_explained_in_the_rendered_help(fedssl, name, columns):
    code, text, _ = fedssl(name, "--help", columns=columns)
    assert code == 0
    assert max(map(len, text.splitlines())) <= columns
    shown = plain(text)
    for parameter, declared in parameters(COMMANDS[name]).items():
        assert declared.help, f"{name}: {parameter} has no help text"
        assert declared.help in shown, f"{name}: the help of {parameter} is not shown"
        assert re.fullmatch(r"[A-Z].*\.", declared.help), f"{name}: the help of {parameter} is not a sentence"


@pytest.mark.parametrize("columns", [80, 120])
def test_every_command_is_explained_in_one_line_where_all_are_listed(fedssl, columns):
    shown = plain(fedssl("--help", columns=columns)[1])
    for name, callback in COMMANDS.items():
        first_line = callback.__doc__.splitlines()[0]
        assert f"{name} {first_line}".replace("`", "") in shown.replace("`", "")
    assert "--version" in shown


def test_version(fedssl):
    assert fedssl("--version")[1] == f"fedssl {importlib.metadata.version(installed_distribution())}\n"
