"""The engines that run a method: in this process, or on Flower."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from ..errors import UserError, install_command
from ..recipe.recipe import Recipe

# Flower and Ray report usage unless these are set when they are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def engine_of(recipe: Recipe) -> ModuleType:
    """Return the module with `run` and `resume` for a recipe's engine.

    Raises:
        UserError: Flower is not installed.
    """
    if recipe.engine == "in-process":
        return import_module("fedssl.engines.in_process")
    return flower_module("engines.flower.simulation")


def flower_module(name: str) -> ModuleType:
    """Return a module that needs Flower, such as `engines.flower.site` or `deploy.nodes`.

    Raises:
        UserError: Flower is not installed.
    """
    try:
        import_module("flwr")
    except ModuleNotFoundError as error:
        raise UserError(f"engine flower needs Flower: {install_command('flower')}") from error
    return import_module(f"fedssl.{name}")
