"""Federated self-supervised learning, for a script or a notebook; `fedssl` on the command line does the same.

    import fedssl

    recipe = fedssl.load_recipe("fedbyol", ["rounds=2"])
    run = fedssl.run(recipe, "runs/two-rounds")
    print(run.evaluated("knn", "before"), run.evaluated("knn", "after"))

What `__all__` names is meant for use in other programs. It is imported on first use, so `import fedssl` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines.observers import Observer
    from .errors import UserError
    from .library import evaluate, load_recipe, read_run, resume, run, write_report
    from .recipe.overrides import recipe_names
    from .recipe.recipe import Recipe
    from .run.record import Run

__all__ = [
    "Observer",
    "Recipe",
    "Run",
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
    "Observer": "engines.observers",
    "Recipe": "recipe",
    "Run": "run_record",
    "UserError": "errors",
    "recipe_names": "recipe_text",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedssl' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES.get(name, 'library')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
