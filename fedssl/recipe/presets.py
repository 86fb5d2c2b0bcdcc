"""Presets: the settings of a recipe that belong to a kind of data, or to a paper's experiments, and not to a method."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from ..data.summary import DataSummary, summarise
from ..errors import UserError
from ..evaluation.verdict import enough_passes
from ..options import Options, nearest
from ..parts import part_class
from ..untrusted import PART_KEYS
from .overrides import apply_override, part_name, read_values, shipped_names, with_paths_from

PAPER = "paper:"

_SHARE_OF_RUN = 0.05  # of the time, for evaluation
# Forward passes of the encoder that training takes for each image: 8 of BYOL (two views forward and backward, and two
# of the target network), 6 of SimCLR, 3 of supervised training. Measuring takes one; without labels also two views of
# every fourth image.
_PASSES_OF_TRAINING, _PASSES_WITHOUT_LABELS = 3, 1.5
_FEWEST_MEASURED = 100
_ENCODER_RATE = 0.05  # of an encoder that starts from weights
_ROUNDS = 40  # where the number of images is not known
_OWN_IMAGES = ("npz", "images", "folder")
_UNKNOWN = DataSummary(images=0, channels=1, side=0, labelled=True)
#: what adapting values raises that the checks of the recipe refuse afterwards, and name
_OF_INVALID_VALUES = (UserError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


class PartSettings(Options):
    """Settings of a preset for recipes that have a part of a certain name."""

    options: dict[str, Any] = Field({}, description="options of the part")
    settings: dict[str, Any] = Field({}, description="settings of the recipe; they replace the preset's own")


class Preset(Options):
    """Values for the keys that a recipe leaves open; the recipe's and the command line's values go first."""

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
    """Return the names of the presets that ship with fedssl: those by kind of data, then the papers'."""
    names = [stem.replace("paper_", PAPER) for stem in shipped_names("preset")]
    return sorted(names, key=lambda name: name.startswith(PAPER))


def read_preset(name: str) -> Preset:
    """Read a shipped preset by name."""
    return Preset.model_validate(read_values(name.replace(PAPER, "paper_"), "preset") | {"name": name})


def with_overrides(values: dict[str, Any], overrides: Sequence[str], source: str) -> dict[str, Any]:
    """Return a recipe's mapping with overrides, and its parts as mappings; run no code.

    Raises:
        UserError: an override does not fit; the message calls the recipe `source`.
    """
    values = copy.deepcopy(values)
    try:
        for override in overrides:
            apply_override(values, override)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    list(parts_in(values))
    return values


def apply_preset(values: dict[str, Any], source: str) -> list[str]:
    """Fill in, in place, the open keys of a recipe by the preset that it names or else the data's preset.

    `values`, which `with_overrides` gave, is complete then except for what has a default. Returns sentences that say
    why this preset was chosen and which of its values were adapted to the data. Error messages begin with `source`.

    Raises:
        UserError: the preset is unknown, or no preset is named and the data cannot be read.
    """
    given = copy.deepcopy(values)
    name = values.get("preset", "auto")
    if name == "none":
        return []
    if name not in ("auto", *preset_names()):
        hint, names = nearest(str(name), preset_names()), ", ".join(preset_names())
        raise UserError(f"{source}: preset: {name!r} is unknown; {hint}expected auto, none or {names}")
    data, reason = _UNKNOWN, "the recipe or the command line names it"
    if name == "auto":
        try:
            data = _summarise(values)
        except UserError as error:
            raise UserError(
                f"{source}: {error}; the preset is chosen from the data: correct data.path, or where the data lie on "
                f"another machine name one with preset=NAME, of {', '.join(preset_names())}"
            ) from error
        name, reason = _preset_for(data, values)
    preset = read_preset(name)
    settings: dict[str, Any] = {}
    for _, part in parts_in(values):
        if part["name"] in preset.parts:
            _fill_in(settings, preset.parts[part["name"]].settings)
    _fill_in(settings, preset.settings)
    _fill_in(values, settings)
    if data is _UNKNOWN:
        with contextlib.suppress(UserError):  # the data, which may be the preset's, may be on another machine
            data = _summarise(values)
    if values.get("architectures") == "several":
        values["architectures"] = list(preset.several)
    for _, part in parts_in(values):
        if part["name"] in preset.parts:
            _fill_in(part, preset.parts[part["name"]].options)
    values["preset"] = name
    from_where = " ".join(preset.source.split())
    reasons = [f"{name}: {preset.description}. It was chosen because {reason}. Source: {from_where}"]
    paper = name.startswith(PAPER)
    for adapt in (
        *(() if paper else (_adapt_partition, _continue_gently, _choose_rounds)),
        *(_choose_image_size, _switch_off_colours, _take_public_images, _adapt_batch),
        *(() if paper or name in ("digits", "small_sgd") else (_limit_evaluation, _mention_weights)),
    ):
        with contextlib.suppress(*_OF_INVALID_VALUES):
            reasons += adapt(_Filled(values, given, preset, data))
    return reasons


def _summarise(values: dict[str, Any]) -> DataSummary:
    data = values.get("data", {})
    return (summarise(data) if isinstance(data, dict) else None) or _UNKNOWN  # the recipe's checks say what is wrong


def _preset_for(data: DataSummary, values: dict[str, Any]) -> tuple[str, str]:
    """Return the name of the preset for a kind of data, and the reason."""
    if data is _UNKNOWN or values.get("data", {}).get("name", "digits") == "digits":
        return "digits", "the data are scikit-learn's digits"
    count = f"{data.images} " if data.images else ""
    kind = {1: "grey images", 3: "colour images"}.get(data.channels, f"images of {data.channels} channels")
    reason = f"the data are {count}{kind}{' of' if data.channels in (1, 3) else ' and'} {data.side} pixels"
    small = data.side <= 64
    if data.channels != 3:
        return ("small_grey" if small else "grey_medical"), reason
    return ("small_colour" if small else "natural"), reason


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


def parts_in(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the folder and the mapping of each part; a part that is given as a name becomes a mapping in `values`."""
    for key, (folder, many) in PART_KEYS.items():
        parts = values.get(key) if many else [values.get(key)]
        for position, part in enumerate(parts if isinstance(parts, list) else []):
            mapping = {"name": part} if isinstance(part, str) else part
            if isinstance(mapping, dict) and isinstance(mapping.get("name"), str):
                if many:
                    values[key][position] = mapping
                else:
                    values[key] = mapping
                yield folder, mapping


class _Filled(NamedTuple):
    """A recipe with its preset's values, which each of the functions below adapts to the data; they yield why."""

    values: dict[str, Any]
    given: dict[str, Any]
    preset: Preset
    data: DataSummary


def _adapt_partition(recipe: _Filled) -> Iterator[str]:
    """Train on image files in one place unless clients are asked for; deal equal shares of what has no labels."""
    values, own = recipe.values, recipe.given.get("partition") or {}
    if not own and recipe.data.from_files and recipe.given.get("architectures") != "several":
        values["partition"] = {"name": "iid", "clients": 1}
        yield (
            "partition.clients is 1: images of one place are one client, and nothing is federated. "
            "partition='{name: iid, clients: 5}' simulates five."
        )
    elif "name" not in own and not recipe.data.labelled:
        values["partition"] = {"name": "iid", "clients": values["partition"]["clients"]} | own
        yield "partition.name is iid, as the images have no labels."


def _continue_gently(recipe: _Filled) -> Iterator[str]:
    """Train an encoder that starts from weights slowly, as what they are of, with their batch statistics."""
    from ..models.weights import described

    model, training = recipe.values.get("model", {}), recipe.values["training"]
    if weights := model.get("weights"):
        if isinstance(weights, str) and "architectures" not in recipe.given and (told := described(weights)):
            recipe.values["architectures"] = [told["architecture"]]
            yield f"architectures is {told['architecture']}, whose weights model.weights holds."
        rate = training.setdefault("encoder_rate", _ENCODER_RATE)
        kept = model.setdefault("batch_statistics", "kept")
        yield f"training.encoder_rate is {rate} and model.batch_statistics {kept}, as the encoder starts from weights."


def _choose_rounds(recipe: _Filled) -> Iterator[str]:
    """Take as many rounds as a good encoder takes for this many images, where the recipe leaves it open."""
    values, images = recipe.values, recipe.data.images
    if "rounds" in values:
        return
    values["rounds"], training = _ROUNDS, values["training"]
    if images and not training.get("local_steps"):
        passes = enough_passes(images, from_weights=bool(values.get("model", {}).get("weights")))
        values["rounds"] = max(1, -(-passes // training["local_epochs"]))
        yield f"rounds is {values['rounds']}, so that each of {images:,} images is seen {passes} times."


def _choose_image_size(recipe: _Filled) -> Iterator[str]:
    data = recipe.values["data"]
    if recipe.data.from_files and "image_size" not in data:
        data["image_size"] = recipe.data.side
        yield f"data.image_size is {recipe.data.side}, by the files' sizes; larger images cost more time."


def _switch_off_colours(recipe: _Filled) -> Iterator[str]:
    """Leave out jitter and grayscale where there are neither grey levels nor colours."""
    views, channels = recipe.values["augmentation"], recipe.data.channels
    if channels in (1, 3) or views.get("name", "random_views") != "random_views":
        return
    for key in ("jitter_probability", "grayscale"):
        if key not in (recipe.given.get("augmentation") or ()):
            views[key] = 0.0
            yield f"augmentation.{key} is 0, as the images have {channels} channels."


def _take_public_images(recipe: _Filled) -> Iterator[str]:
    """Take public images from the training images if a part needs them and the recipe does not say where they are."""
    data, most = recipe.values.setdefault("data", {}), recipe.preset.public_images
    if "public_holdout" in data or data.get("public_path") is not None or data.get("name") == "none":
        return
    parts = [(folder, with_paths_from(Path(), "name", part["name"])) for folder, part in parts_in(recipe.values)]
    classes = {name: part_class(folder, name) for folder, name in parts}
    if users := [name for name, cls in classes.items() if getattr(cls, "needs_public_images", False)]:
        data["public_holdout"] = min(most, recipe.data.images // 4 or most)
        yield f"data.public_holdout is {data['public_holdout']}, as {users[0]} needs public images."


def _adapt_batch(recipe: _Filled) -> Iterator[str]:
    """Make batches smaller if the preset's would hold more than half of a client's images."""
    partition, training, images = recipe.values["partition"], recipe.values["training"], recipe.data.images
    if not images:
        return
    clients, batch = partition["clients"], int(training["batch_size"])
    own = recipe.given.get("training") or {}
    if own.get("batch_size") is None and not recipe.preset.name.startswith(PAPER):
        given = recipe.given.get("data") or {}  # what it holds out is not in the number of images
        taken = 0 if given.get("public_holdout") else recipe.values["data"].get("public_holdout") or 0
        share = (images - taken) // clients
        while batch > max(4, share // 2):
            batch //= 2
        if batch != training["batch_size"]:
            training["batch_size"] = batch
            yield f"training.batch_size is {batch}, as a client has about {share} images."
    # these partitions may leave a client without a batch
    if partition.get("name") in ("dirichlet", "quantity_skew") and "min_samples" not in partition:
        partition["min_samples"] = batch
        yield f"partition.min_samples is {batch}, so that every client can fill a batch."


def _mention_weights(recipe: _Filled) -> Iterator[str]:
    """Say what starting from scratch is to be compared with, where a recipe has images of the user's own."""
    own = recipe.values["data"].get("name") in _OWN_IMAGES
    if own and recipe.values.get("model", {}).get("weights") is None:
        yield (
            "Networks start from scratch: from ImageNet's weights they may learn more in less time "
            "(model.weights; docs/does_federating_pay.md)."
        )


def _limit_evaluation(recipe: _Filled) -> Iterator[str]:
    """Measure on so many of a user's own images that it takes about 5 % of the run, where the recipe leaves it open."""
    values, data = recipe.values, recipe.data
    evaluation = values.setdefault("evaluation", {})
    if values["data"].get("name") not in _OWN_IMAGES or not data.images or "images" in evaluation:
        return
    training, clients, rounds = values["training"], values["partition"]["clients"], values["rounds"]
    sampled = (values.get("clients_per_round") or clients) / clients
    trained = training.get("local_epochs", 1) * data.images * sampled
    if training.get("local_steps"):
        trained = training["local_steps"] * training["batch_size"] * clients * sampled
    every = evaluation.get("every", 0)
    evaluations = 2 + ((rounds - 1) // every if every else 0)
    models = clients if values["local_update"]["name"] == "keep_own" else 1
    passes = 1 if data.labelled else _PASSES_WITHOUT_LABELS
    most = _SHARE_OF_RUN * _PASSES_OF_TRAINING * rounds * trained / (evaluations * models * passes)
    images = max(_FEWEST_MEASURED, int(most))
    if images < data.images:
        evaluation["images"] = images
        yield (
            f"evaluation.images is {images}, so that measuring takes at most about 5 % of the run; "
            "null measures on all."
        )
