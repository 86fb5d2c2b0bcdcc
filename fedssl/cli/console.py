"""The terminal, and the arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..untrusted import printable

console = Console()

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or path of a .yaml file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Settings to change, such as training.batch_size=64 seed=1."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code of part files and modules that the run's recipe names; read it first."),
]


def print_text(text: str) -> None:
    """Print plain text: square brackets are no markup, numbers get no colours, control characters are escaped."""
    console.print(printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=True)
