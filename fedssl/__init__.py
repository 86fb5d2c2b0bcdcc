"""Federated self-supervised learning, for a script or a notebook; `fedssl` on the command line does the same.

    import fedssl

    recipe = fedssl.load_recipe("fedbyol", ["rounds=2"])
    run = fedssl.run(recipe, "runs/two-rounds")
    print(run.evaluated("knn", "before"), run.evaluated("knn", "after"))

The names in `__all__` are meant for use in other programs. Each is imported on first use, so `import fedssl` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aggregators.base import Aggregator as Aggregator
    from .augmentations.base import Augmentation as Augmentation
    from .engines import resume as resume
    from .engines import run as run
    from .engines.observers import Observer as Observer
    from .errors import UserError as UserError
    from .federation import Federation as Federation
    from .local_updates.base import LocalUpdate as LocalUpdate
    from .method import Method as Method
    from .objectives.base import Objective as Objective
    from .recipe.overrides import recipe_names as recipe_names
    from .recipe.reading import load_recipe as load_recipe
    from .recipe.recipe import Recipe as Recipe
    from .regularizers.base import Regularizer as Regularizer
    from .reports.evaluation import evaluate as evaluate
    from .reports.report import write_report as write_report
    from .run_folder.record import Run as Run
    from .run_folder.record import read_run as read_run
    from .schedules.base import Schedule as Schedule

_MODULES = {
    "Aggregator": "aggregators.base",
    "Augmentation": "augmentations.base",
    "Federation": "federation",
    "LocalUpdate": "local_updates.base",
    "Method": "method",
    "Objective": "objectives.base",
    "Observer": "engines.observers",
    "Recipe": "recipe.recipe",
    "Regularizer": "regularizers.base",
    "Run": "run_folder.record",
    "Schedule": "schedules.base",
    "UserError": "errors",
    "evaluate": "reports.evaluation",
    "load_recipe": "recipe.reading",
    "read_run": "run_folder.record",
    "recipe_names": "recipe.overrides",
    "resume": "engines",
    "run": "engines",
    "write_report": "reports.report",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedssl' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
