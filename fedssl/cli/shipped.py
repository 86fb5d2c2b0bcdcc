"""Commands that tell what ships with fedssl, without importing torch: they answer within a second."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.text import Text

from .console import Overrides, RecipeName, console, print_text


def recipes() -> None:
    """List the shipped recipes by paper; `fedssl show RECIPE` tells more of one."""
    _print_shipped("recipe")


def tables() -> None:
    """List the shipped tables of runs by paper."""
    _print_shipped("table")


def presets() -> None:
    """List the presets: settings for a kind of data or of a paper, which a recipe takes where it leaves them open.

    Without preset=NAME, a recipe takes the preset for its data.
    """
    from ..presets.preset import preset_names, read_preset

    for position, name in enumerate(preset_names()):
        preset = read_preset(name)
        if position:
            console.print()
        console.print(Text(name, style="bold"))
        _print_wrapped(f"    For {preset.description}." if ":" not in name else f"    {preset.description}.", "")
        _print_wrapped(f"    {' '.join(preset.source.split())}", "dim")


def show(
    recipe: RecipeName,
    overrides: Overrides = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a recipe file that `fedssl run` takes, with every default filled in.")
    ] = False,
) -> None:
    """Show every setting of a recipe: its value, where the value comes from, and what it means.

    A value comes from the recipe, from an override (KEY=VALUE), from the preset for the data, or is the default. Each
    key and value is checked by itself; whether they go together is checked by `fedssl run`.
    """
    from ..catalogue.resolved_recipe import resolve_recipe

    resolved = resolve_recipe(recipe, overrides or ())
    if as_yaml:
        print_text(resolved.text.rstrip("\n"))
        return
    if resolved.preset:
        _print_wrapped(f"Preset {' '.join(resolved.preset)}", "bold")
    section = ""
    for setting in resolved.settings:
        if setting.section != section:
            section = setting.section
            console.print()
        key = f"{section}.{setting.key}" if section else setting.key
        style = "bold" if setting.origin == "override" else ""
        _print_wrapped(f"{key} = {_as_yaml(setting.value)}  ({setting.origin})", style)
        _print_wrapped(f"    {setting.description} [{setting.allowed}]", "dim")


def _print_wrapped(text: str, style: str) -> None:
    for line in textwrap.wrap(
        text, console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    ):
        console.print(Text(line, style), soft_wrap=True)


def _as_yaml(value: Any) -> str:
    """A value as one writes it after `KEY=`."""
    text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6)
    return text.strip()[1:-1]


def _print_shipped(kind: Literal["recipe", "table"]) -> None:
    """Print one line for each shipped recipe or table, under the paper that it comes from."""
    from ..recipe_text import read_values, shipped_names

    papers: dict[str, list[tuple[str, str]]] = {}
    for name in shipped_names(kind):
        paper, summary = summary_of(read_values(name, kind)["description"])
        papers.setdefault(paper, []).append((name, summary))
    width = max(len(name) for names in papers.values() for name, _ in names)
    for position, paper in enumerate(sorted(papers, key=str.casefold)):
        if position:
            console.print()
        console.print(Text(paper, style="bold"))
        for name, summary in papers[paper]:
            print_text(f"  {name:<{width}}  {summary}")


def summary_of(description: str) -> tuple[str, str]:
    """The paper and the summary in the first sentence of a shipped description, `Paper (Authors Year): summary.`"""
    paper, _, rest = " ".join(description.split()).partition(": ")
    return paper, rest.partition(". ")[0].rstrip(".")
