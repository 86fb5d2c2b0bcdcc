"""What all commands share: the terminal, and the arguments that several of them take."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console()

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or path of a .yaml file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Settings to change, such as training.batch_size=64 seed=1."),
]


def print_text(text: str) -> None:
    """Print plain text: square brackets in it are no markup, and numbers get no colours."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
