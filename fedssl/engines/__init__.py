"""What runs a method: in this process, or on Flower."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from ..recipe.recipe import Recipe

# Flower and Ray report usage unless these are set when they are imported.
for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)


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
