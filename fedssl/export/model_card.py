"""The README.md of an exported encoder: its properties, its training, and its use."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ..data.pixels import Window
from ..evaluation.metrics import METRICS, is_measure
from ..run_folder.record import Run, read_run
from .compiled_formats import FILES, FormatName
from .trained_encoder import GLOBAL, EncoderOfRun

_LEFT_OUT = "(left out)"
_DATA_KEYS = ("data", "downstream")

_CARD = """---
library_name: timm
pipeline_tag: image-feature-extraction
tags: [fedssl, self-supervised, federated]
---
# {title}

An image encoder that was trained by federated self-supervised learning: {sentence}

{facts}

{figures}
## Load it

    from load import load_encoder, normalize        # this folder's load.py; it needs torch and timm

    encoder = load_encoder()
    features = encoder(normalize(pixels))           # pixels from 0 to 255, [n, {shape}]

{timm}
`fedssl embed FOLDER IMAGES --output features.npz` writes the features of a folder of images. A recipe of fedssl starts
from these weights with `model.weights=FOLDER`.

The network takes float32 [n, {shape}]: pixels from 0 to 255, divided by 255, minus {mean}, divided by {std}, in every
channel. Bring images of another shape to {height}x{width} pixels first: crop the longer side to a square, then resize
(bilinear, antialiased). It gives float32 [n, {features}], not normalised.{window}
{compiled}
## The recipe

Paths are left out, as they are of the machine that ran it. The folder holds no images.

```yaml
{recipe}```
"""


def model_card(chosen: EncoderOfRun, config: dict[str, Any], path: Path, formats: Collection[FormatName]) -> str:
    """Return the text of README.md, given the content of config.json, the run's folder, and the compiled forms."""
    run = read_run(path)
    ours, (_, height, width) = config["fedssl"], config["fedssl"]["image_shape"]
    recipe = _without_paths(chosen.recipe.model_dump(mode="json")) | {"description": chosen.recipe.description}
    return _CARD.format(
        title=f"{ours['architecture']} by {ours['method']}",
        sentence=" ".join(chosen.recipe.description.split()) or f"the recipe `{ours['method']}`.",
        facts=_facts(chosen, config, run),
        figures=_figures(chosen, run),
        shape=", ".join(map(str, ours["image_shape"])),
        timm=_timm_lines(config),
        mean=ours["mean"][0],
        std=ours["std"][0],
        height=height,
        width=width,
        features=config["num_features"],
        window=_window_line(chosen.encoder.window),
        compiled=_compiled_lines(formats),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110),
    )


def _facts(chosen: EncoderOfRun, config: dict[str, Any], run: Run) -> str:
    ours, recipe = config["fedssl"], chosen.recipe
    parameters = sum(parameter.numel() for parameter in chosen.encoder.network.parameters())
    sizes = [sum(counts) for counts in run.class_counts]
    data_size = f"{sum(sizes):,} of all clients together" if sum(sizes) else "at the clients' sites"
    model = f"the global model after round {chosen.round}"
    if chosen.owner != GLOBAL:
        model = f"of client {chosen.owner}, after its training in round {chosen.round}"
        data_size = f"{sizes[int(chosen.owner)]:,} of this client, {data_size}" if sum(sizes) else data_size
    rows = {
        "architecture": f"{ours['architecture']}, {parameters:,} parameters",
        "stem": ours["stem"],
        "image": "{} x {} x {} (channels x height x width)".format(*ours["image_shape"]),
        "features": config["num_features"],
        "objective": ours["objective"],
        "model": model,
        "rounds": recipe.rounds,
        "clients": recipe.partition.clients,
        "training images": data_size,
        "run": f"{ours['run']}, seed {recipe.seed}, fedssl {ours['version']}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _figures(chosen: EncoderOfRun, run: Run) -> str:
    """Return the measures of this model before and after training as a table; empty if nothing was measured."""
    who = chosen.owner if (run.rounds, chosen.owner, "effective_rank") in run.values else "mean"
    names = dict.fromkeys(name for number, w, name in run.values if number == run.rounds and w == who)
    rows = []
    for name in filter(is_measure, names):
        before = run.values.get((0, who, name))
        after = run.values[run.rounds, who, name]
        decimals = METRICS[name].decimals if name in METRICS else 1
        rows.append(f"| {name} | {'' if before is None else f'{before:.{decimals}f}'} | {after:.{decimals}f} |")
    if not rows:
        return ""
    whose = " (mean over the clients' models)" if who == "mean" else ""
    note = "Lower uniformity is more uniform; higher effective rank is less collapsed."
    if "knn" in names:
        note = "Accuracies are in percent. They use labels, which self-supervised training does not."
    header = [f"| measured on the run's images{whose} | before training | after |", "|---|---|---|"]
    return "\n".join([*header, *rows, "", note, ""])


def _timm_lines(config: dict[str, Any]) -> str:
    """Return the lines about loading the folder by timm alone, or why it cannot."""
    if "model_args" not in config:
        return "The network is not one of timm's: `load.py` holds its definition.\n"
    if config["fedssl"]["stem"].startswith("3x3"):
        return (
            "The stem is a 3x3 convolution without max-pool, as small images need it. timm has no argument for\n"
            "that, so `timm.create_model` alone refuses these weights: use `load.py`, which replaces two modules.\n"
        )
    arguments = ", ".join(f"{name}={value!r}" for name, value in config["model_args"].items())
    return (
        "Or by timm alone, from the folder or from the file:\n\n"
        '    timm.create_model("local-dir:FOLDER", pretrained=True)\n'
        f'    timm.create_model("{config["architecture"]}", pretrained=True, num_classes=0, {arguments},\n'
        '                      pretrained_cfg_overlay={"file": "FOLDER/model.safetensors"})\n'
    )


def _window_line(window: Window | None) -> str:
    """Return the line about the run's window for pixels of more than 8 bits; empty if there were none."""
    if window is None:
        return ""
    values = f"from {window[0]:g} (0) to {window[1]:g} (255)" if isinstance(window, tuple) else f"`{window}`"
    return f"\nPixels of more than 8 bits must be brought to 0 to 255 first, by the run's `data.window`: {values}."


def _compiled_lines(formats: Collection[FormatName]) -> str:
    if not formats:
        return ""
    names = ", ".join(f"`{FILES[name]}`" for name in formats)
    text = "The input `pixels` is float32 between 0 and 1, for any n; the output is `features`."
    return f"\n{names}: the same network with the normalisation inside.\n{text}\n"


def _without_paths(values: Any, in_data: bool = False) -> Any:
    """Return a recipe's values without the places of its data and files; your own part keeps its file's name."""
    if isinstance(values, list):
        return [_without_paths(value, in_data) for value in values]
    if isinstance(values, dict):
        cleaned = {}
        for key, value in values.items():
            if not (in_data and key == "name"):
                value = _without_paths(value, in_data or key in _DATA_KEYS)
            cleaned[_LEFT_OUT if _is_path(key) else key] = value
        return cleaned
    if isinstance(values, str) and values.endswith(".py"):
        return Path(values).name
    return _LEFT_OUT if isinstance(values, str) and (in_data or _is_path(values)) else values


def _is_path(text: Any) -> bool:
    return isinstance(text, str) and ("/" in text or "\\" in text)
