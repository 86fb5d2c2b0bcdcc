"""How a recipe's names become objects: the file name is the part's name.

`name: cka_alignment` under `regularizers` is the one part class in `fedssl/regularizers/cka_alignment.py`.
A part of your own is named by its file (`name: ./my_regularizer.py`, seen from the recipe's folder) or its module
(`name: my_package.my_regularizer`). There is no registry.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field

from .errors import UserError
from .models.model import Model
from .options import Options


class Part(Options):
    """Base of all parts: typed options (pydantic, frozen, unknown keys refused) and the methods that use them."""

    name: str = Field("", description="the part's file name, or the path or module of a part of your own")

    def check_model(self, model: Model) -> None:
        """Refuse a model that lacks what the part works on (UserError). Called before anything runs."""


def part_names(folder: str) -> list[str]:
    """The parts that ship in `fedssl/<folder>/`, by name."""
    package = importlib.import_module(f"fedssl.{folder}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def part_class(folder: str, name: str) -> type[Part]:
    """The class behind a part's name.

    Args:
        folder: `objectives`, `regularizers`, `schedules`, `aggregators` or `local_updates`.
        name: a file name in that folder, a path to a `.py` file, or a dotted module.

    Raises:
        UserError: no such part, or its file does not define exactly one.
    """
    base = _base_class(folder)
    if name.endswith(".py"):
        module = _load_file(Path(name))
    elif "." in name:
        module = _load_module(name)
    elif name in part_names(folder):
        module = importlib.import_module(f"fedssl.{folder}.{name}")
    else:
        raise UserError(
            f"no part {name!r} in {folder}; there are {', '.join(part_names(folder))}, "
            "or name a file of your own (./my_part.py)"
        )
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise UserError(f"{name} must define exactly one subclass of {base.__name__}, it defines {len(found)}")
    return found[0]


def _base_class(folder: str) -> type[Part]:
    module = importlib.import_module(f"fedssl.{folder}.base")
    return next(
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Part) and value.__module__ == module.__name__
    )


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"no part file {path}; give the path of an existing .py file")
    module_name = f"fedssl_part_{path.stem}"
    known: Any = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pydantic resolves annotations through sys.modules
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise _not_imported(path, error) from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _not_imported(name, error) from error


def _not_imported(what: object, error: Exception) -> UserError:
    first = str(error).strip().partition("\n")[0]  # Pydantic adds a link on lines of its own
    return UserError(f"{what} could not be imported: {type(error).__name__}: {first}")
