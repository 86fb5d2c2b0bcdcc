"""Every key of a recipe with its value, what it means, and where the value comes from; without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..options import Options
from ..untrusted import PART_KEYS
from .options_file import describe_values, options_schema, part_model, recipe_model
from .overrides import check_recipe, read_values, recipe_yaml
from .presets import apply_preset

Origin = Literal["recipe", "override", "preset", "default"]


@dataclass(frozen=True)
class Setting:
    """One key of a resolved recipe.

    Attributes:
        section: the dotted key of the mapping that holds it, such as `training` or `regularizers.0`; empty at the top.
        key: its name there.
        value: as YAML has it.
        origin: where the value comes from: the recipe's file, an override, the preset, or the default.
        description: what the key means.
        allowed: which values it takes, in words.
    """

    section: str
    key: str
    value: Any
    origin: Origin
    description: str
    allowed: str


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with every default filled in.

    Attributes:
        text: the resolved recipe as a YAML file, the same as `Recipe.to_yaml` gives.
        settings: all its keys; those of a mapping stand together, after the mapping that holds it.
        preset: sentences that say which preset was taken, why, and what was adapted to the data.
    """

    text: str
    settings: list[Setting]
    preset: tuple[str, ...]


def resolve_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Read a recipe, apply overrides, and fill in the preset's values and the defaults.

    Each key is checked by itself. What goes together is checked by `reading.load_recipe` and when a run begins.

    Args:
        name_or_path: name of a shipped recipe, or path of a YAML file.
        overrides: `training.batch_size=64` and the like.

    Raises:
        UserError: see `reading.load_recipe`.
    """
    values = read_values(name_or_path)
    try:
        filled = apply_preset(values, overrides, part_model)
    except UserError as error:
        raise UserError(f"{name_or_path}: {error}") from error
    recipe = check_recipe(filled.values, str(name_or_path), recipe_model(), part_model)
    overridden = [override.partition("=")[0] for override in overrides]
    given, complete = _with_part_names(filled.given), _with_part_names(filled.values)
    settings = list(_settings(recipe, given, complete, "", overridden))
    return ResolvedRecipe(recipe_yaml(recipe.model_dump(mode="json")), settings, filled.reasons)


def _settings(
    options: Options, given: Any, complete: Any, section: str, overridden: Sequence[str]
) -> Iterator[Setting]:
    """The settings of a mapping, then those of the mappings in it.

    Args:
        options: the mapping, with all defaults.
        given: what the recipe and the overrides say of it.
        complete: the same with the preset's values.
        section: its dotted key.
        overridden: the keys of the overrides.
    """
    model = type(options)
    schemas = model.model_json_schema()["properties"]
    is_part = section.partition(".")[0] in PART_KEYS
    nested: list[tuple[str, Options, Any, Any]] = []
    given = given if isinstance(given, dict) else {}
    complete = complete if isinstance(complete, dict) else {}
    for key, field in model.model_fields.items():
        value, path = getattr(options, key), f"{section}.{key}" if section else key
        own, whole = given.get(key), complete.get(key)
        if isinstance(value, Options):
            nested.append((path, value, own, whole))
        elif not section and key in PART_KEYS and value:
            nested += [(f"{path}.{i}", part, own[i], whole[i]) for i, part in enumerate(value)]
        else:
            origin: Origin = "default" if key not in complete else "recipe"
            if any(one.startswith(f"{path}.") or (key in given and _overrides(one, path)) for one in overridden):
                origin = "override"
            elif key in complete and (key not in given or given[key] != complete[key]):
                origin = "preset"
            plain = options.model_dump(mode="json", include={key})[key]
            description, allowed = field.description or "", describe_values(schemas[key])
            if key in PART_KEYS and not section:
                allowed = "a list of parts"
            elif key == "name" and is_part:
                description, allowed = _summary(model), _part_names(section)
            yield Setting(section, key, plain, origin, description, allowed)
    for path, inner, own, whole in nested:
        yield from _settings(inner, own, whole, path, overridden)


def _summary(part: type[Options]) -> str:
    """What a part is, in the first paragraph of its documentation."""
    return " ".join((part.__doc__ or "").partition("\n\n")[0].split())


def _part_names(section: str) -> str:
    """Which names the part at `objective` or `regularizers.0` may have, in words."""
    folder, _ = PART_KEYS[section.partition(".")[0]]
    return f"{', '.join(options_schema()['parts'][folder])}, or a file or module of your own"


def _overrides(override: str, path: str) -> bool:
    """Whether an override of one dotted key sets another, which it holds or which is the list that holds it."""
    return override == path or path.startswith(f"{override}.") or override.startswith(f"{path}.")


def _with_part_names(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's mapping in which every part is a mapping, also where only its name is given."""

    def as_mapping(part: Any) -> Any:
        return {"name": part} if isinstance(part, str) else part

    return {
        key: [as_mapping(part) for part in value]
        if isinstance(value, list)
        else as_mapping(value)
        if key in PART_KEYS
        else value
        for key, value in values.items()
    }
