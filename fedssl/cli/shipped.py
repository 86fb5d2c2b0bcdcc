"""Commands that list what ships with fedssl."""

from __future__ import annotations

from rich.table import Table as TextTable

from .console import console


def recipes() -> None:
    """List the shipped recipes."""
    from ..reading import load_recipe, recipe_names

    table = TextTable("recipe", "what it is", box=None, pad_edge=False)
    for name in recipe_names():
        table.add_row(name, load_recipe(name).description)
    console.print(table)


def tables() -> None:
    """List the shipped tables."""
    from ..tables.table import load_table, table_names

    table = TextTable("table", "what it compares", box=None, pad_edge=False)
    for name in table_names():
        table.add_row(name, load_table(name).description)
    console.print(table)
