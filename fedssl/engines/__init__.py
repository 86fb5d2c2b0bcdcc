"""Engines run a method: in this process, or on Flower. `run` and `resume` are `fedssl.run` and `fedssl.resume`.

Importing this imports no torch: the processes of Flower that wait for runs import modules of this folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import UserError, install_command
from ..untrusted import expand_home

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe
    from ..run_folder.record import Run
    from .observers import Observer

# Flower reports usage unless these are set when it is imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def run(recipe: Recipe, path: str | Path, *, overwrite: bool = False, observers: Iterable[Observer] = ()) -> Run:
    """Run a recipe to its end and read the run back.

    The run is committed to its folder after every round; `resume` continues it if it is interrupted.

    Args:
        recipe: from `load_recipe`, or a `Recipe` made in Python.
        path: the run's folder, which must not exist unless `overwrite` is true.
        overwrite: replace an existing run.
        observers: objects that are called when the run begins, after each round, and at the end; see `Observer`.

    Raises:
        UserError: the folder exists, the data cannot be read, or the recipe's parts do not go together.
    """
    from ..run_folder.record import read_run
    from .observers import Observers

    return read_run(engine_of(recipe).run(recipe, expand_home(path), Observers(observers), overwrite).path)


def resume(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust: bool = False,
    from_round: int | None = None,
    observers: Iterable[Observer] = (),
) -> Run:
    """Continue a run to its end and read it back; a finished run goes on if `overrides` give it more rounds.

    On the same machine and thread count the result is bit-identical to that of a run that was never interrupted; on a
    GPU with `training.deterministic` alone.

    Args:
        path: the run's folder.
        overrides: options to change from here on, such as `["rounds=100"]`: more rounds, and what the finished rounds
            do not depend on (evaluation, device, clients at a time, paths of the same data). The folder keeps them.
        trust: run the code of your own parts even if it has changed since the run began.
        from_round: the round after which it continues, one of the last `checkpoints` rounds of the recipe; by default
            the last one. What came after it is removed.
        observers: as in `run`; `run_began` gives them the round from which the run continues.

    Raises:
        UserError: the folder holds no run, a file that the run relies on was changed, an option may not change, or a
            part of the recipe was defined in a notebook or script that is no longer running.
        TypeError: `overrides` is a single string.
    """
    from ..recipe.reading import load_stored_recipe
    from ..run_folder.directory import RunDirectory
    from ..run_folder.record import read_run
    from .observers import Observers

    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list such as [{overrides!r}], got the string {overrides!r}")
    directory = RunDirectory.open(expand_home(path))
    recipe = load_stored_recipe(directory, trust, resuming=True)
    engine = engine_of(recipe)
    return read_run(engine.resume(directory.path, Observers(observers), trust, overrides, from_round).path)


def engine_of(recipe: Recipe) -> ModuleType:
    """Return the module with `run` and `resume` for a recipe's engine; raise a UserError if Flower is missing."""
    if recipe.engine == "in-process":
        return import_module("fedssl.engines.in_process")
    return flower_module("engines.flower.simulation")


def flower_module(name: str) -> ModuleType:
    """Return a module such as `engines.flower.site` or `deploy.nodes`; raise a UserError if Flower is missing."""
    try:
        import_module("flwr")
    except ModuleNotFoundError as error:
        remedy = install_command("flower") if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
        raise UserError(f"engine flower needs Flower: {remedy}") from error
    return import_module(f"fedssl.{name}")
