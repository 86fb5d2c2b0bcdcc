"""What a page's `<!-- generated: KIND ARGUMENT -->` stands for."""

import re

import typer.main
from click import Context
from typer.cli import get_docs_for_click

from fedssl.cli import app
from fedssl.parts import part_class, part_names
from website import methods, options
from website.repository_files import ROOT


def commands() -> str:
    """A section for each command of `fedssl`, as typer writes it."""
    group = typer.main.get_command(app)
    page = get_docs_for_click(obj=group, ctx=Context(group), name="fedssl")
    return re.sub(r"(\*\*Options\*\*:\n\n)?\* `--help`.*\n", "", page[page.index("\n## ") :])


def parts(folder: str) -> str:
    """What a part of the kind overrides, then each shipped part, with its code."""
    shipped = [part_class(folder, name) for name in part_names(folder)]
    base = [one for one in shipped[0].__mro__ if one.__module__ == f"fedssl.{folder}.base"][-1]
    entries = [f"::: {methods.dotted_name(part)}" for part in (base, *shipped)]
    return "\n\n".join([f"{entries[0]}\n    options:\n      members: true", *entries[1:]])


def figure(name: str) -> str:
    """A drawing with sliders, whose numbers the operators have computed; docs/assets/figures.js draws it."""
    return (ROOT / "docs" / "figures" / f"{name}.html").read_text(encoding="utf-8")


#: by the word behind `generated:`; words behind it are the function's arguments
KINDS = {"options": options.page, "commands": commands, "parts": parts, "figure": figure}
KINDS |= {"method": methods.facts, "methods": methods.table}
