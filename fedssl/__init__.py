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
    from .aggregators.base import Aggregator
    from .augmentations.base import Augmentation
    from .engines import resume, run
    from .engines.observers import Observer
    from .errors import UserError
    from .federation import Federation
    from .local_updates.base import LocalUpdate
    from .method import Method
    from .objectives.base import Objective
    from .recipe.overrides import recipe_names
    from .recipe.reading import load_recipe
    from .recipe.recipe import Recipe
    from .regularizers.base import Regularizer
    from .reports.evaluation import evaluate
    from .reports.report import write_report
    from .run_folder.record import Run, read_run
    from .schedules.base import Schedule

__all__ = [
    "Aggregator",
    "Augmentation",
    "Federation",
    "LocalUpdate",
    "Method",
    "Objective",
    "Observer",
    "Recipe",
    "Regularizer",
    "Run",
    "Schedule",
    "UserError",
    "evaluate",
    "load_recipe",
    "read_run",
    "recipe_names",
    "resume",
    "run",
    "write_report",
]

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedssl' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
