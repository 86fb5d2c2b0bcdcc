"""Presets: the settings of a recipe that belong to a kind of data, or to a paper's experiments, and not to a method."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml
from pydantic import Field

from ..options import Options

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
    folder = resources.files(__package__)
    names = [entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted((_name_of(name) for name in names), key=lambda name: (name.startswith(PAPER), name))


def read_preset(name: str) -> Preset:
    """A shipped preset by name."""
    file = f"{name.replace(PAPER, 'paper_')}.yaml"
    text = (resources.files(__package__) / file).read_text(encoding="utf-8")
    return Preset.model_validate(yaml.safe_load(text) | {"name": name})


def _name_of(stem: str) -> str:
    return f"{PAPER}{stem.removeprefix('paper_')}" if stem.startswith("paper_") else stem
