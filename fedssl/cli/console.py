"""The terminal, and the arguments that several commands take."""

import shlex
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from ..untrusted import printable

console = Console()

_RECIPE = Argument(metavar="RECIPE", help="Name of a shipped recipe, or path of a .yaml file.")
RecipeName = Annotated[str, _RECIPE]
OptionalRecipeName = Annotated[str | None, _RECIPE]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY=VALUE...", help="Settings to change, such as training.batch_size=64 seed=1."),
]
Trust = Annotated[
    bool, Option("--trust", help="Run the code of part files and modules that the file or run names; read it first.")
]


def print_next(*words: str | Path, overrides: list[str] | None = None, trust: bool = False) -> None:
    """Print the `fedssl` command that comes next, so that it can be pasted, with what this one got of the same."""
    words = (*words, *(overrides or ()), *(["--trust"] if trust else []))
    print_text(f"Next: {shlex.join(['fedssl', *map(str, words)])}")


def print_text(text: str) -> None:
    """Print plain text: square brackets are no markup, numbers get no colours, control characters are escaped."""
    console.print(printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=True)
