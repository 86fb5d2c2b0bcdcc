"""The command line: the commands of the files beside this one, and one line on stderr and exit code 2 for a mistake."""

import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

from rich.console import Console
from typer import Exit, Option, Typer

from ..errors import UserError, installed_distribution, memory_sentence
from ..interrupts import raise_ignored_interrupts
from ..untrusted import printable
from . import across_machines
from .console import console
from .recipes import cost, doctor, partition, presets, privacy, recipes, show, tables
from .runs import embed, evaluate, export, pretrain, report, run, run_table

app = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train an encoder on images of your own": (pretrain,),
    "What there is": (recipes, show, presets, tables, doctor),
    "Run and look at the results": (partition, cost, privacy, run, run_table, evaluate, report),
    "Use the encoder": (export, embed),
}
for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(_function.__name__.replace("_", "-"), rich_help_panel=_panel)(_function)
_SWEEP = "Choose the options of a table's rows by equally many trials of each, then run the table, as run-table does."
app.command("sweep", rich_help_panel="Run and look at the results", help=_SWEEP)(run_table)
_ACROSS_MACHINES = "Across machines, with Flower (docs/deploy.md)"
app.add_typer(across_machines.app, name="provision", rich_help_panel=_ACROSS_MACHINES)
app.command("app", rich_help_panel=_ACROSS_MACHINES)(across_machines.flower_app)
app.command(rich_help_panel=_ACROSS_MACHINES)(across_machines.superlink)
app.command(rich_help_panel=_ACROSS_MACHINES)(across_machines.supernode)


_python_shows_warning = warnings.showwarning


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"fedssl {version(installed_distribution())}", highlight=False)
        raise Exit


@app.callback()
def options_of_fedssl(
    show_version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run, compare and report federated self-supervised methods."""


def _show_warning(message: Warning | str, category: type[Warning], *place: object, **_: object) -> None:
    """Print a warning of fedssl as a line on stderr; others, which are for programmers, as Python does."""
    if category is UserWarning and str(place[0]).startswith(str(Path(__file__).parent.parent)):
        Console(stderr=True).print(f"fedssl: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    else:
        _python_shows_warning(message, category, *place)  # type: ignore[arg-type]


def main() -> None:
    """Entry point of the `fedssl` command."""
    warnings.showwarning = _show_warning
    raise_ignored_interrupts()
    sys.argv[1:] = map(_with_home, sys.argv[1:])
    try:
        app()
    except UserError as error:
        _end_with(str(error))
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:  # of the machine, such as a full disk, where no code before could say more
        _end_with(f"{error.filename or 'the output'} cannot be read or written: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if sentence := memory_sentence(error):
            _end_with(sentence)
        raise


def _with_home(word: str) -> str:
    """Expand `~` in a word such as --output=~/run, which no shell does, nor in quotes."""
    return re.sub(r"^(--[a-z-]+=)?~(?=/|\Z)", lambda found: f"{found[1] or ''}{os.path.expanduser('~')}", word)


def _end_with(message: str) -> NoReturn:
    """Print a message as one line on stderr, and exit with code 2."""
    text = f"fedssl: {printable(message)}"
    with suppress(OSError):
        Console(stderr=True).print(text, style="bold red", highlight=False, markup=False, soft_wrap=True)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    sys.exit(2)


def _drop_output() -> None:
    """Send what is still written to standard output nowhere, since its reader is gone or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
