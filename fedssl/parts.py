"""Finding the class of a part by its name in a recipe, which is its file's name.

`name: cka_alignment` under `regularizers` is the one part class in `fedssl/regularizers/cka_alignment.py`.
A part of your own is named by its file (`name: ./my_regularizer.py`, relative to the recipe's folder) or its module
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
from typing import Any, TypeVar

from pydantic import Field

from .errors import UserError
from .models.model import Model
from .options import Options
from .untrusted import absolute_path

Base = TypeVar("Base")


class Part(Options):
    """Base of all parts: typed options (pydantic, frozen, unknown keys refused) and the methods that use them."""

    name: str = Field("", description="the part's file name, or the path or module of a part of your own")

    @classmethod
    def says_data_parallel(cls) -> bool:
        """Whether this class itself, and not one that it derives from, says that processes can share its batches."""
        return bool(vars(cls).get("data_parallel", False))

    def check_model(self, model: Model) -> None:
        """Raise a UserError for a model that lacks what the part needs; called before anything runs."""


def part_names(folder: str) -> list[str]:
    """The sorted names of the parts in `fedssl/<folder>/`."""
    package = importlib.import_module(f"fedssl.{folder}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def part_class(folder: str, name: str) -> type[Part]:
    """The class behind a part's name.

    Args:
        folder: `objectives`, `augmentations`, `regularizers`, `schedules`, `aggregators` or `local_updates`.
        name: a file name in that folder, a path to a `.py` file, or a dotted module.

    Raises:
        UserError: there is no such part, its file cannot be imported, or the file does not define exactly one part.
    """
    base = _base_class(folder)
    if name.endswith(".py"):
        module = load_file(Path(name))
    elif "." in name:
        module = _load_module(name)
    elif name in part_names(folder):
        module = importlib.import_module(f"fedssl.{folder}.{name}")
    else:
        raise UserError(
            f"{folder} has no part {name!r}; expected one of {', '.join(part_names(folder))}, "
            "or a file of your own (./my_part.py)"
        )
    return only_class(module, base, name)


def only_class(module: ModuleType, base: type[Base], name: str) -> type[Base]:
    """Return the one subclass of `base` that a module defines; raise a UserError, which begins with `name`, if not."""
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UserError(f"{name} must define exactly one subclass of {base.__name__}, got {len(classes)}")
    return classes[0]


def _base_class(folder: str) -> type[Part]:
    module = importlib.import_module(f"fedssl.{folder}.base")
    return next(
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Part) and value.__module__ == module.__name__
    )


def load_file(path: Path) -> ModuleType:
    """Import a .py file of the user's own and return its module; raise a UserError if that fails."""
    path = absolute_path(Path(), path)
    if not path.is_file():
        raise UserError(f"there is no part file {path}; give the path of an existing .py file")
    module_name = f"fedssl_part_{path.stem}"
    loaded: Any = sys.modules.get(module_name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
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


def _not_imported(part: Path | str, error: Exception) -> UserError:
    first_line = str(error).strip().partition("\n")[0]  # Pydantic adds lines with a link
    return UserError(f"{part} could not be imported: {type(error).__name__}: {first_line}")
