"""Read a recipe and check every key: from a name, a file, a mapping or a run's folder to a `Recipe`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from ..options import explain_errors, shortened, validated
from ..parts import defined_elsewhere, is_session_part, part_class
from ..run_folder.directory import RunDirectory
from ..untrusted import MOST_BYTES, PART_KEYS, own_part_file, own_parts, parse_yaml, read_regular_file
from .overrides import DEFAULT_AUGMENTATION, read_values, with_paths_from
from .presets import apply_preset, parts_in, with_overrides
from .recipe import Recipe
from .rules import rules_of_privacy

#: options that every run stored before they went, by the mapping or part that had them, with what now always holds
_GONE: dict[str, dict[str, Any]] = {
    "training": {"processes": 1, "join_views": False},
    "flower": {"cpus": None, "client_cpus": 1, "client_gpus": 0.0, "object_store_megabytes": None},
    "supervised": {"mild_augmentation": True},
    "cka_alignment": {"statistics": "batch"},
    "representation_mean": {"bandwidth": 1.0, "send": "auto", "statistics": "running", "batch_size": 500}
    | {"weights": None},
    "orchestra_clusters": {"average_target": True},
    "uniformity": {"reduction": "sum"},
    "dictionary_contrast": {"temperature": None},
    "sliced_uniformity": {"tangent_spaces": None, "scale": "released"},
    "fine_tune": {"rand_augment": True, "classifier_learning_rate": None, "weight_decay": None},
    "semi_supervised_protocol": {"classifier_learning_rate": None, "weight_decay": None},
    "differential_privacy": {"sensitivity": None},
    "guard": {"largest_value": 1e6},
}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Recipe:
    """Load a recipe, apply overrides, fill in what is left open by its preset, and check every key.

    A part's relative path (`./my_part.py`) is resolved from the recipe file's folder, or in an override from the
    working directory. The returned recipe, and so the one that a run stores, has the absolute path.

    Args:
        name_or_path: name of a shipped recipe (`recipe_names()` lists them), or path of a YAML file.
        overrides: settings to change, such as `["rounds=2", "regularizers.0.weight=1"]`; each value is YAML.
        trust: run the code of part files and modules that the recipe's file names; those in `overrides` need no trust.

    Raises:
        UserError: there is no such recipe, it is not YAML, it names code that is not trusted, or a key or value is
            invalid. The message names the key's path and says what is allowed.
        TypeError: `overrides` is a single string.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list such as [{overrides!r}], got the string {overrides!r}")
    values, _ = fill_in(name_or_path, overrides, trust)
    return parse_recipe(values, str(name_or_path))


def fill_in(name_or_path: str | Path, overrides: Sequence[str], trust: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's mapping with overrides and its preset's values, not checked yet, and what `apply_preset` says.

    The arguments are those of `load_recipe`.
    """
    source, values = str(name_or_path), read_values(name_or_path)
    changed = with_overrides(values, overrides, source)
    if not trust:  # before the preset asks the parts what they need; what an override replaces does not run
        refuse_code(set(own_parts(values)) & set(own_parts(changed)), source)
    return changed, apply_preset(changed, source)


def refuse_code(names: Iterable[str], source: str) -> None:
    """Raise a UserError that tells which code would be run, if `names` are parts with code that `source` names."""
    told = sorted(name for name in names if not is_session_part(name))  # a session's classes have run already
    if told:
        files = [str(file) for name in told if not name.endswith(".py") and (file := own_part_file(name)) is not None]
        where = f" ({', '.join(files)})" if files else ""
        raise UserError(
            f"{source} names the part{'s' if len(told) > 1 else ''} {', '.join(told)}, whose code would be run: read "
            f"that code first{where}, and give --trust (in Python trust=True) if you trust it"
        )


def load_stored_recipe(directory: RunDirectory, trust: bool = False, resuming: bool = False) -> Recipe:
    """Read the recipe of a run's folder, without running code of unknown origin that it may name.

    Args:
        directory: the run's.
        trust: allow the code of part files and modules that the recipe names.
        resuming: the run is continued: also allow code that has not changed since the run began. Otherwise such code is
            allowed only where the recipe has its absolute path, as runs store it: whoever sends a run cannot know where
            it will lie.

    Raises:
        UserError: the recipe names code that is not allowed, or is not valid.
    """
    file = directory.path / "recipe.yaml"
    values = read_values(file)
    _leave_out_gone(values)
    as_written = own_parts(parse_yaml(read_regular_file(file, MOST_BYTES).decode(), str(file)))
    for name in [] if trust else own_parts(values):
        if defined_elsewhere(name):
            continue  # it cannot be run here, which the check of the recipe reports
        known = resuming or (name.endswith(".py") and name in as_written)
        unchanged = directory.part_unchanged(name) if known else None
        if unchanged is None:
            refuse_code([name], str(file))
        if unchanged is False:
            raise UserError(
                f"{name}, a part of {file}, was changed since the run began: put back the file as it was, or give "
                "--trust to use it as it is"
            )
    return parse_recipe(values, str(file))


def _leave_out_gone(values: dict[str, Any]) -> None:
    """Remove the options that are gone where they have the value that now always holds; the checks refuse others."""
    values.pop("client_states", None)  # no result depended on it
    mappings = [(part["name"], part) for _, part in parts_in(values)]
    for outer in (values, values.get("evaluation"), values.get("flower")):
        mappings += outer.items() if isinstance(outer, dict) else ()
    for name, mapping in mappings:
        for option, still in _GONE.get(name, {}).items():
            if isinstance(mapping, dict) and mapping.get(option, ...) == still:
                del mapping[option]


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a recipe that is given as a mapping, without applying a preset; error messages call it `source`.

    Raises:
        UserError: a key or value is not allowed, or options of Flower do not go with the recipe's parts.
    """
    recipe = check_keys(values, source)
    for problem in rules_of_privacy(recipe):
        raise UserError(f"{source}: {problem}")
    return recipe


def check_keys(values: dict[str, Any], source: str) -> Recipe:
    """Check every key and value of a recipe by itself; `parse_recipe` and rules.py check what goes together.

    `values`, the recipe as YAML gives it, is not changed. Error messages call the recipe `source`.

    Raises:
        UserError: a key or value is not allowed; the message names all of them.
    """
    problems: list[str] = []
    values = dict(values)
    if isinstance(views := values.setdefault("augmentation", {}), dict):
        values["augmentation"] = {"name": DEFAULT_AUGMENTATION} | views
    for key, (folder, many) in PART_KEYS.items():
        if key not in values:
            continue
        if not many:
            values[key] = _check_part(folder, values[key], key, problems)
        elif isinstance(values[key], list):
            values[key] = [_check_part(folder, part, f"{key}.{i}", problems) for i, part in enumerate(values[key])]
        else:
            problems.append(f"{key}: expected a list of parts, got {shortened(values[key])}")
    if "model" in values:
        values["model"] = with_paths_from(Path(), "model", values["model"])
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}")
    return validated(Recipe, values, source)


def _check_part(folder: str, value: Any, path: str, problems: list[str]) -> Any:
    """Return the part that a value names; if it is invalid, return the value and add to `problems`."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        problems.append(f"{path}: expected a part such as {{name: ...}}, got {shortened(value)}")
        return value
    value = with_paths_from(Path(), path.partition(".")[0], value)
    try:
        cls = part_class(folder, value["name"])
        if missing := sorted(cls.__abstractmethods__):
            raise UserError(f"{cls.__name__} does not define {', '.join(missing)}; see fedssl/{folder}/base.py")
        return cls.model_validate(value)
    except UserError as error:
        problems.append(f"{path}.name: {error}")
    except ValidationError as error:
        problems.extend(explain_errors(error, cls, path))
    return value
