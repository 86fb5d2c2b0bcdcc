"""Engines run a method: in this process, or on Flower. `run` and `resume` are `fedssl.run` and `fedssl.resume`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..recipe.reading import load_stored_recipe
from ..recipe.recipe import Recipe
from ..run.directory import RunDirectory
from ..run.record import Run, read_run

# Flower and Ray report usage unless these are set when they are imported.
for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)


def run(recipe: Recipe, path: str | Path, *, overwrite: bool = False) -> Run:
    """Run a recipe to its end and read the run back.

    The run is committed to its folder after every round; `resume` continues it if it is interrupted.

    Args:
        recipe: from `load_recipe`, or a `Recipe` made in Python.
        path: the run's folder, which must not exist unless `overwrite` is true.
        overwrite: replace an existing folder.

    Raises:
        UserError: the folder exists, the data cannot be read, or the recipe's parts do not go together.
    """
    return read_run(engine_of(recipe).run(recipe, Path(path), overwrite=overwrite).path)


def resume(path: str | Path, *, trust: bool = False, clients_parallel: int | None = None) -> Run:
    """Continue an interrupted run to its end and read it back; a finished run is only read.

    The result is the same, bit for bit, as if the run had not been interrupted.

    Args:
        path: the run's folder.
        trust: run the code of your own parts that the recipe names even if it has changed since the run began.
        clients_parallel: how many clients train at a time from here on; by default as the recipe has it.

    Raises:
        UserError: the folder holds no run, a file that the run relies on was changed, or a part of the recipe was
            defined in a notebook or script that is no longer running.
    """
    directory = RunDirectory.open(Path(path))
    recipe = load_stored_recipe(directory, trust, resuming=True)
    return read_run(engine_of(recipe).resume(directory.path, trust=trust, clients_parallel=clients_parallel).path)


def engine_of(recipe: Recipe) -> ModuleType:
    """The module with `run` and `resume` for a recipe's engine.

    Raises:
        UserError: Flower is not installed.
    """
    if recipe.engine == "in-process":
        from . import in_process

        return in_process
    return flower_module("engines.flower.simulation")


def flower_module(name: str) -> ModuleType:
    """A module that needs Flower, such as `engines.flower.site` or `deploy.nodes`.

    Raises:
        UserError: Flower is not installed.
    """
    from ..errors import UserError, install_command

    try:
        import_module("flwr")
    except ModuleNotFoundError as error:
        raise UserError(f"engine flower needs Flower: {install_command('flower')}") from error
    return import_module(f"fedssl.{name}")
