"""Presets: the settings of a recipe that belong to a kind of data, or to a paper's experiments, and not to a method."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from ..data.summary import DataSummary, summarise
from ..errors import UserError
from ..options import Options
from ..untrusted import PART_KEYS
from .overrides import PartModel, apply_override, part_name, with_paths_from

PAPER = "paper:"


class PartSettings(Options):
    """What a preset says where a recipe has a part of a certain name."""

    options: dict[str, Any] = Field({}, description="options of the part")
    settings: dict[str, Any] = Field({}, description="settings of the recipe; they replace the preset's own")


class Preset(Options):
    """Values for the keys that a recipe leaves open; what the recipe or the command line says goes first."""

    name: str = Field(..., description="what `preset` in a recipe says")
    description: str = Field(..., description="for which data it is")
    source: str = Field(..., description="where its values come from: a paper, released code, or our own measurement")
    settings: dict[str, Any] = Field(..., description="settings of every recipe")
    several: list[str] = Field(
        ..., description="the architectures of recipes that say `architectures: several`, as their clients differ"
    )
    public_images: int = Field(
        ...,
        ge=1,
        description="training images that become public where a part needs public images and the recipe names none; "
        "never more than a quarter of them",
    )
    parts: dict[str, PartSettings] = Field({}, description="by a part's name, what holds where a recipe has that part")


def preset_names() -> list[str]:
    """The presets that ship with fedssl: those by kind of data, then the papers'."""
    folder = resources.files("fedssl") / "presets"
    names = [entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted((_name_of(name) for name in names), key=lambda name: (name.startswith(PAPER), name))


def read_preset(name: str) -> Preset:
    """A shipped preset by name."""
    file = f"{name.replace(PAPER, 'paper_')}.yaml"
    text = (resources.files("fedssl") / "presets" / file).read_text(encoding="utf-8")
    return Preset.model_validate(yaml.safe_load(text) | {"name": name})


def _name_of(stem: str) -> str:
    return f"{PAPER}{stem.removeprefix('paper_')}" if stem.startswith("paper_") else stem


AUTO, NONE = "auto", "none"


_ONE_ARCHITECTURE = "architectures."


SEVERAL = "several"  # what a recipe says in place of a list of architectures, where its clients differ


_SMALL = 64  # the largest side in pixels of the presets for small images


_FEWEST_IN_A_BATCH = 4


_UNEVEN = ("dirichlet", "quantity_skew")  # partitions that may leave a client without a batch


_PUBLIC_SHARE = 4  # at most one of so many training images becomes public


@dataclass(frozen=True)
class AppliedPreset:
    """A recipe's mapping with a preset's values.

    Attributes:
        given: what the recipe and the overrides say.
        values: the same with the preset's values, complete but for what has a default.
        name: the preset's name, or `none`.
        reasons: sentences that say why this preset and which of its values were adapted to the data.
    """

    given: dict[str, Any]
    values: dict[str, Any]
    name: str
    reasons: tuple[str, ...]


def apply_preset(values: dict[str, Any], overrides: Sequence[str], part: PartModel) -> AppliedPreset:
    """Apply overrides to a recipe, and fill in what it leaves open.

    This is done by the preset that the recipe names or, without one, by the preset for its data.

    Args:
        values: the recipe as YAML gives it; it is not changed.
        overrides: `training.batch_size=64` and the like.
        part: gives the model of a part; it may raise a UserError, which the recipe's checks repeat.

    Raises:
        UserError: an override that does not fit, an unknown preset, or data that cannot be looked at where no preset
            is named.
    """
    values = copy.deepcopy(values)
    later = [override for override in overrides if override.startswith(_ONE_ARCHITECTURE)]
    for override in overrides:
        if override not in later:
            apply_override(values, override)
    filled = _filled_in(values, part)
    for override in later:  # it changes one entry of a list that may be the preset's
        apply_override(filled.values, override)
    return filled


def _filled_in(values: dict[str, Any], part: PartModel) -> AppliedPreset:
    given = copy.deepcopy(values)
    name = values.get("preset", AUTO)
    if name == NONE:
        return AppliedPreset(values, values, NONE, ())
    seen: DataSummary | None = None
    if name == AUTO:
        try:
            seen = _summary_of(values)
        except UserError as error:
            raise UserError(
                f"{error}; the preset is chosen from the data: correct data.path, or where the data lie on another "
                f"machine name one with preset=NAME, of {', '.join(preset_names())}"
            ) from error
        name, reason = _preset_for(seen, _get(values, "data", "name"))
    else:
        if name not in preset_names():
            near = difflib.get_close_matches(str(name), preset_names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"preset: {name!r} is unknown; {hint}expected {AUTO}, {NONE} or {', '.join(preset_names())}"
            )
        reason = "the recipe or the command line names it"
    preset = read_preset(name)
    source = " ".join(preset.source.split())
    reasons = [f"{name}: {preset.description}. It was chosen because {reason}. Source: {source}"]
    _fill_in(values, _settings_for(preset, values))
    if seen is None:
        with contextlib.suppress(UserError):  # the data may lie on another machine
            seen = _summary_of(values)
    if values.get("architectures") == SEVERAL:
        values["architectures"] = list(preset.several)
    for _, part_values in _parts_in(values):
        if (own := preset.parts.get(part_values["name"])) is not None:
            _fill_in(part_values, own.options)
    values["preset"] = name
    if not name.startswith(PAPER):
        reasons += _adapt_partition(values, given, seen)
    reasons += _one_size(values, seen)
    reasons += _take_public_images(values, preset, part, seen)
    reasons += _adapt_batch(values, given, preset, seen)
    return AppliedPreset(given, values, name, tuple(reasons))


def _summary_of(values: dict[str, Any]) -> DataSummary | None:
    """The recipe's data; None where `data` is invalid, which the recipe's checks say."""
    data = values.get("data", {})
    return summarise(data) if isinstance(data, dict) else None


def _preset_for(seen: DataSummary | None, data: Any) -> tuple[str, str]:
    """The name of the preset for a kind of data, and why."""
    if seen is None or data in (None, "digits"):
        return "digits", "the data are scikit-learn's digits"
    count = f"{seen.images} " if seen.images else ""
    what = f"the data are {count}{'grey' if seen.channels == 1 else 'colour'} images of {seen.side} pixels"
    small = seen.side <= _SMALL
    if seen.channels == 1:
        return ("small_grey" if small else "grey_medical"), what
    return ("small_colour" if small else "natural"), what


# Filling in


def _settings_for(preset: Preset, values: dict[str, Any]) -> dict[str, Any]:
    """The preset's settings for a recipe with these parts."""
    settings: dict[str, Any] = {}
    for _, part_values in _parts_in(values):
        if (own := preset.parts.get(part_values["name"])) is not None:
            _fill_in(settings, own.settings)
    _fill_in(settings, preset.settings)
    return settings


def _fill_in(values: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set each key that is missing in `values`, also in the mappings in it."""
    for key, setting in settings.items():
        if key not in values:
            values[key] = copy.deepcopy(setting)
        elif key == "partition" and "name" in (values[key] if isinstance(values[key], dict) else {}):
            values[key].setdefault("clients", setting["clients"])  # the rest belongs to the preset's partition
        elif key in PART_KEYS and part_name(key, values[key]) != part_name(key, setting):
            continue  # the options of another part
        elif isinstance(values[key], dict) and isinstance(setting, dict):
            _fill_in(values[key], setting)


def _parts_in(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder and the mapping of each part; a part that is given as a name becomes a mapping in `values`."""
    for key, (folder, many) in PART_KEYS.items():
        parts = values.get(key)
        for position, one in enumerate(parts if many and isinstance(parts, list) else [] if many else [parts]):
            named = {"name": one} if isinstance(one, str) else one
            if isinstance(named, dict) and isinstance(named.get("name"), str):
                if many:
                    values[key][position] = named
                else:
                    values[key] = named
                yield folder, named


def _get(values: dict[str, Any], section: str, key: str) -> Any:
    """The value of a dotted key; None where it or its section is missing or invalid."""
    inner = values.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


# Adapting to the data


def _adapt_partition(values: dict[str, Any], given: dict[str, Any], seen: DataSummary | None) -> list[str]:
    """Equal random shares where the data have no labels to deal by."""
    if seen is None or seen.labelled or "name" in (given.get("partition") or {}):
        return []
    partition = values["partition"]
    values["partition"] = {"name": "iid", "clients": partition["clients"]} | (given.get("partition") or {})
    return ["partition.name is iid, as the images have no labels."]


def _one_size(values: dict[str, Any], seen: DataSummary | None) -> list[str]:
    """The size to which image files are brought."""
    data = values.get("data")
    if seen is None or not seen.from_files or not isinstance(data, dict) or "image_size" in data:
        return []
    data["image_size"] = seen.side
    return [f"data.image_size is {seen.side}, by the files' sizes; larger images cost more time."]


def _take_public_images(values: dict[str, Any], preset: Preset, part: PartModel, seen: DataSummary | None) -> list[str]:
    """Public images from the training images, where a part needs them and the recipe does not say where they are."""
    data = values.setdefault("data", {})
    if not isinstance(data, dict) or "public_holdout" in data or data.get("public_path") is not None:
        return []
    if data.get("name") == "none":  # there is nothing to take them from
        return []
    user = next((one["name"] for folder, one in _parts_in(values) if _needs_public_images(part, folder, one)), None)
    if user is None:
        return []
    most = seen.images // _PUBLIC_SHARE if seen is not None else preset.public_images
    data["public_holdout"] = min(preset.public_images, most)
    return [f"data.public_holdout is {data['public_holdout']}, as {user} needs public images."]


def _needs_public_images(part: PartModel, folder: str, values: dict[str, Any]) -> bool:
    try:
        model = part(folder, with_paths_from(Path(), values)["name"])
    except UserError:
        return False  # the checks of the recipe say what is wrong with the part
    return bool(getattr(model, "needs_public_images", False))


def _adapt_batch(values: dict[str, Any], given: dict[str, Any], preset: Preset, seen: DataSummary | None) -> list[str]:
    """Smaller batches where the preset's would hold more than half of a client's images."""
    partition, training = values.get("partition"), values.get("training")
    if seen is None or not seen.images or not isinstance(partition, dict) or not isinstance(training, dict):
        return []
    clients, batch = partition.get("clients"), training.get("batch_size")
    if not isinstance(clients, int) or clients < 1 or not isinstance(batch, int):
        return []
    reasons = []
    if _get(given, "training", "batch_size") is None and not preset.name.startswith(PAPER):
        holdout = _get(values, "data", "public_holdout")
        share = (seen.images - (holdout if isinstance(holdout, int) else 0)) // clients
        while batch > max(_FEWEST_IN_A_BATCH, share // 2):
            batch //= 2
        if batch != training["batch_size"]:
            reasons.append(f"training.batch_size is {batch}, as a client has about {share} images.")
            training["batch_size"] = batch
    if partition.get("name") in _UNEVEN and "min_samples" not in partition:
        partition["min_samples"] = batch
        reasons.append(f"partition.min_samples is {batch}, so that every client can fill a batch.")
    return reasons
