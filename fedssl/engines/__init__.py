"""What runs a method: in this process, or on Flower."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..recipe import Recipe

# Flower and Ray report usage unless told otherwise, and look at this when they are imported.
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
    from ..errors import UserError

    try:
        from . import flower
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("flwr", "ray"):
            raise UserError(f"engine {recipe.engine} needs Flower: pip install 'fedkernels-fedssl[flower]'") from error
        raise
    return flower
