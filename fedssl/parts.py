"""Find the class of a part by its name in a recipe.

A shipped part is named by its file: `cka_alignment` under `regularizers` is the one part class in
`fedssl/regularizers/cka_alignment.py`. Your own part is named by its file (`./my_part.py`, relative to the recipe's
folder), its module (`my_package.my_part`), or its module and class (`my_package.parts:MyPart`). A class that this
process alone has, such as one from a notebook's cell, is named `__main__:MyPart`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from .errors import UserError
from .options import Options
from .untrusted import absolute_path

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

    from .models.model import Model  # it imports torch, which listing the presets does without

Base = TypeVar("Base")

_FILE_MODULE = "fedssl_part_"  # how modules of part files are called
_SESSION = "__main__:"
_session_classes: dict[str, type[Part]] = {}  # by name, those of which this process has made a part


class Part(Options):
    """Base of all parts: typed options (pydantic, frozen, unknown keys refused) and the methods that use them."""

    name: str = Field("", description="the part's file name, or the path or module of a part of your own")

    @model_validator(mode="before")
    @classmethod
    def _name_after_class(cls, values: Any) -> Any:
        """Name a part that is made in Python, so that the recipe of a run can be read back."""
        return {"name": _name_of(cls)} | values if isinstance(values, dict) else values

    #: the network behind the encoder whose outputs it works on; a recipe whose objective has none is refused
    needs_head: ClassVar[str | None] = None

    def recorded(self, image_shape: tuple[int, ...]) -> Self:
        """Return the part as a run on images [C, H, W] records it, for instance with digests of files that it reads."""
        return self

    def check_model(self, model: Model) -> None:
        """Raise a UserError for a model that lacks what the part needs; called before anything runs."""


def part_names(folder: str) -> list[str]:
    """Return the sorted names of the parts in `fedssl/<folder>/`."""
    package = importlib.import_module(f"fedssl.{folder}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def part_class(folder: str, name: str) -> type[Part]:
    """Return the class of a part.

    Args:
        folder: `objectives`, `augmentations`, `regularizers`, `schedules`, `aggregators` or `local_updates`.
        name: a file name in that folder, a path to a `.py` file, a dotted module, `module:Class`, or `__main__:Class`.

    Raises:
        UserError: there is no such part, its file cannot be imported, or the file does not define exactly one part.
    """
    base = next(c for c in _classes_in(importlib.import_module(f"fedssl.{folder}.base")) if issubclass(c, Part))
    if name.endswith(".py"):
        return only_class(load_file(Path(name)), base, name)
    if defined_elsewhere(name):
        raise UserError(
            f"the class {name.removeprefix(_SESSION)} was defined in a notebook or a script, and this process has no "
            "such class: put it into a file, for instance my_part.py, and start a new run with {name: ./my_part.py} "
            f"or `from my_part import {name.rpartition('.')[2].removeprefix(_SESSION)}` (docs/compose_in_python.md)"
        )
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        cls = _session_classes[name] if is_session_part(name) else getattr(_load_module(module_name), class_name, None)
        if not (inspect.isclass(cls) and issubclass(cls, base)):
            raise UserError(f"{name} must be a subclass of {base.__name__}, got {cls!r}")
        return cls
    if "." in name:
        return only_class(_load_module(name), base, name)
    if name in part_names(folder):
        return only_class(importlib.import_module(f"fedssl.{folder}.{name}"), base, name)
    raise UserError(
        f"{folder} has no part {name!r}; expected one of {', '.join(part_names(folder))}, "
        "or a file of your own (./my_part.py)"
    )


def is_session_part(name: str) -> bool:
    """Return whether a part's class was defined in a notebook or script, so that no other process can import it."""
    return name.startswith(_SESSION)


def defined_elsewhere(name: str) -> bool:
    """Return whether a part's class was defined in a notebook or script, and not in this process."""
    return is_session_part(name) and name not in _session_classes


def _name_of(cls: type[Part]) -> str:
    """Return the name by which `part_class` finds a class."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file is None or cls.__module__ == "__main__" or getattr(module, cls.__name__, None) is not cls:
        _session_classes[f"{_SESSION}{cls.__qualname__}"] = cls
        return f"{_SESSION}{cls.__qualname__}"
    if cls.__module__.startswith(_FILE_MODULE):
        return str(file)
    package, _, stem = cls.__module__.rpartition(".")
    return stem if package.startswith("fedssl.") else f"{cls.__module__}:{cls.__name__}"


def only_class(module: ModuleType, base: type[Base], name: str) -> type[Base]:
    """Return the one subclass of `base` that a module defines; raise a UserError, which begins with `name`, if not."""
    classes = [cls for cls in _classes_in(module) if issubclass(cls, base)]
    if len(classes) != 1:
        raise UserError(f"{name} must define exactly one subclass of {base.__name__}, got {len(classes)}")
    return classes[0]


def _classes_in(module: ModuleType) -> list[type[Any]]:
    return [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]


def load_file(path: Path) -> ModuleType:
    """Import a .py file of the user's own and return its module; raise a UserError if that fails."""
    path = absolute_path(Path(), path)
    if not path.is_file():
        raise UserError(f"there is no part file {path}; give the path of an existing .py file")
    module_name = f"{_FILE_MODULE}{path.stem}"
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
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise _not_imported(path, error) from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_imported(name, error) from error


def _not_imported(part: Path | str, error: BaseException) -> UserError:
    first_line = str(error).strip().partition("\n")[0]  # Pydantic adds lines with a link
    return UserError(f"{part} could not be imported: {type(error).__name__}: {first_line}")
