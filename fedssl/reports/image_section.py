"""The report's section with images: how the encoder of each method's first finished run sees them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..untrusted.files import read_regular_file
from .image_pictures import ImagePictures
from .page import PageFigure

#: by method: a run's folder and what its pictures show, or why there are none
PicturesByMethod = Mapping[str, tuple[Path, ImagePictures] | str]


@dataclass(frozen=True)
class ImageSection:
    """What the section shows.

    Attributes:
        warnings: which methods have no pictures, and why.
        figures: two for each method.
    """

    warnings: Sequence[str]
    figures: Sequence[PageFigure]


def image_section(pictures: PicturesByMethod) -> ImageSection | None:
    """The section; None where there is nothing to say."""
    if not pictures:
        return None
    warnings, figures = [], []
    for name, shown in pictures.items():
        if isinstance(shown, str):
            warnings.append(f"{name}: no pictures of images: {shown}")
            continue
        path, about = shown
        neighbours, image_map = ImagePictures.files(path)
        who = "the global model" if about.model == "global" else f"client {about.model}'s model"
        seen = f"{name}, {who} after round {about.round}"
        figures.append(_figure(neighbours, f"Nearest neighbours: {name}", f"{seen}. {_about_neighbours(about)}"))
        figures.append(_figure(image_map, f"Map of images: {name}", f"{seen}. {_about_map(about)}"))
    return ImageSection(warnings, figures)


def _about_neighbours(about: ImagePictures) -> str:
    text = (
        f"Each row: one image, and those of {about.searched} {about.source} images whose representations lie nearest "
        "to it. They should show the same kind of thing; if they only share brightness or background, the encoder has "
        "learned little."
    )
    if about.same_class is None:
        return text
    return f"{text} A green line marks the image's own class, an orange one another: {about.same_class:.0%} are green."


def _about_map(about: ImagePictures) -> str:
    return (
        f"t-SNE of {about.mapped} {about.source} images. Images that lie together look alike to the encoder; each is "
        "moved to the nearest free place. Distances between groups mean nothing."
    )


def _figure(file: Path, description: str, caption: str) -> PageFigure:
    data = base64.b64encode(read_regular_file(file)).decode()
    return PageFigure(description, f"data:image/png;base64,{data}", caption)
