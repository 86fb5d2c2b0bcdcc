"""Two pictures of a run's images as its encoder sees them: nearest neighbours, and a map. They need no labels.

RUN/image_pictures.json      what the pictures show; written last, so where it is there, so are they
RUN/figures/neighbours.png   some images, each with those that lie nearest to it
RUN/figures/image_map.png    a t-SNE of the representations, each image drawn at its place

Both hold images of the run's data: whoever gets the report sees them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from ..data.stored_images import Images, images_of_rows
from ..engines.rounds import models_to_evaluate
from ..evaluation.features import extract_features, require_measured_images
from ..evaluation.projections import grid_cells, nearest_images, spread_queries, tsne
from ..federation import Federation, federation_of_run
from ..randomness import generator_for, seed_for
from ..run.directory import RunDirectory
from ..run.storage import make_folder, write_atomically
from ..untrusted import read_regular_file
from .collapse_plots import MOST_NAMED_CLASSES, class_colours, class_legend
from .page import PageFigure
from .plots import MUTED, TEXT, png_bytes

_FILE = "image_pictures.json"


#: the version of the pictures and of the fields of `ImagePictures`
FORMAT = 1


_SEARCHED, _ON_THE_MAP = 1000, 400  # images


_QUERIES, _NEIGHBOURS = 8, 9


_MOST_BYTES = 10_000  # of a stored description; a larger file is no description


_CELLS_PER_IMAGE = 2.2  # of the map: free cells leave the groups apart


_LARGEST_THUMBNAIL, _SMALLEST_DRAWN = 48, 32  # pixels


_SAME, _OTHER = "#009E73", "#D55E00"


@dataclass(frozen=True)
class ImagePictures:
    """What the two pictures show.

    Attributes:
        format: `FORMAT` of the version that drew them.
        round: the round whose model sees the images.
        model: `global`, or the number of the client whose model it is.
        source: `test` or `training`: which images they are.
        searched: among how many images the neighbours are.
        mapped: how many images are on the map.
        same_class: the share of shown neighbours that have their query's class; None without labels.
    """

    format: int
    round: int
    model: str
    source: str
    searched: int
    mapped: int
    same_class: float | None

    @staticmethod
    def files(run: Path) -> tuple[Path, Path]:
        """The pictures' files in a run's folder: the neighbours and the map."""
        return run / "figures" / "neighbours.png", run / "figures" / "image_map.png"


def image_pictures_of_run(path: Path, trust: bool = False) -> ImagePictures | None:
    """The pictures of a run's last round. They are drawn and stored where they are not stored already.

    Args:
        path: the run's folder.
        trust: run the code of parts of one's own that the run's recipe names.

    Returns:
        What they show; None where no round is finished, or there are too few images for a picture.

    Raises:
        UserError: the run's data or its clients' models are not here, representations are not finite, the recipe names
            code that is not trusted, or the files cannot be written.
    """
    directory = RunDirectory.open(path)
    if directory.checkpoint.round < 1 or not directory.checkpoint.files:
        return None
    stored = _read(path)
    if stored is not None and stored.round == directory.checkpoint.round:
        return stored
    return _draw(federation_of_run(directory, trust), directory)


def _read(path: Path) -> ImagePictures | None:
    """What is stored; None where there is nothing of this format."""
    try:
        pictures = TypeAdapter(ImagePictures).validate_json(read_regular_file(path / _FILE, _MOST_BYTES))
        complete = pictures.format == FORMAT and all(file.is_file() for file in ImagePictures.files(path))
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None
    return pictures if complete else None


def _draw(federation: Federation, directory: RunDirectory) -> ImagePictures | None:
    dataset, seed = federation.dataset, federation.recipe.seed
    require_measured_images(dataset)
    of_test = len(dataset.test_images) > 0
    measured = dataset.measured_images
    order = torch.randperm(len(measured), generator=generator_for(seed, "pictures", "images"))[:_SEARCHED]
    images = images_of_rows(measured, order)
    if len(images) < 5:  # too few for any t-SNE
        return None
    labels = dataset.test_labels[order] if of_test and dataset.labelled else None
    who, model = next(models_to_evaluate(federation, directory.server_state(), directory.client_state))
    features = extract_features(model.encoder, images)
    queries = spread_queries(features, _QUERIES, generator_for(seed, "pictures", "queries"))
    nearest, similarity = nearest_images(features, queries, _NEIGHBOURS)
    points = tsne(features[:_ON_THE_MAP], seed_for(seed, "pictures", "map"))

    make_folder(directory.path / "figures")
    sheet = draw_neighbours(images, queries, nearest, similarity, labels)
    classes = len(dataset.class_names) if labels is not None else 0
    image_map = draw_map(images, points, labels if 1 < classes <= MOST_NAMED_CLASSES else None, dataset.class_names)
    for file, figure in zip(ImagePictures.files(directory.path), (sheet, image_map), strict=True):
        write_atomically(file, png_bytes(figure))
    pictures = ImagePictures(
        FORMAT,
        directory.checkpoint.round,
        who,
        "test" if of_test else "training",
        len(images),
        len(points),
        None if labels is None else float((labels[nearest] == labels[queries][:, None]).double().mean()),
    )
    write_atomically(directory.path / _FILE, json.dumps(asdict(pictures)).encode())
    return pictures


def draw_neighbours(
    images: Images, queries: Tensor, nearest: Tensor, similarity: Tensor, labels: Tensor | None
) -> Figure:
    """A row for each query: the query, and its neighbours with their cosines, the nearest first.

    Args:
        images: uint8 [n, C, H, W].
        queries: int64 [q], rows of `images`.
        nearest: int64 [q, k], rows of `images`.
        similarity: floating point [q, k].
        labels: int64 [n]: a neighbour of the query's class is marked by a green line, another by an orange one.
    """
    rows, columns = nearest.shape
    height = 1.08 * rows + 0.3
    figure = Figure(
        figsize=(0.95 * (columns + 1.35), height), layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.25 / height))
    )
    grid = figure.subplots(rows, columns + 2, squeeze=False, width_ratios=[1, 0.22, *[1] * columns])
    for index, line in enumerate(grid):
        query, neighbours, cosines = int(queries[index]), nearest[index].tolist(), similarity[index].tolist()
        for axes, row in zip((line[0], *line[2:]), (query, *neighbours), strict=True):
            thumbnail = thumbnails(images, torch.tensor([row]))[0]
            axes.imshow(thumbnail, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        for axes in line:
            axes.set_axis_off()
        for axes, row, cosine in zip(line[2:], neighbours, cosines, strict=True):
            axes.set_title(f"{cosine:.2f}", fontsize=8, color=MUTED, pad=2)
            if labels is not None:
                colour = _SAME if labels[row] == labels[query] else _OTHER
                axes.plot([0, 1], [-0.04, -0.04], color=colour, lw=2.6, transform=axes.transAxes, clip_on=False)
    for axes, title in ((grid[0, 0], "image"), (grid[0, 2], "nearest images, with the cosine")):
        text = axes.annotate(title, (0, 1), (0, 15), "axes fraction", "offset points", fontsize=10, color=TEXT)
        text.set_in_layout(False)  # its column need not be as wide
    return figure


def draw_map(images: Images, points: Tensor, labels: Tensor | None, class_names: tuple[str, ...] = ()) -> Figure:
    """Each image at the place of its representation; where labels are given, in a frame of its class's colour.

    Args:
        images: uint8 [at least n, C, H, W]; the first n are drawn.
        points: floating point [n, 2].
        labels: int64 [at least n].
        class_names: a name for each label.
    """
    columns = int(np.ceil(np.sqrt(len(points) * _CELLS_PER_IMAGE)))
    cells = grid_cells(points, columns).tolist()
    drawn = thumbnails(images, torch.arange(len(points)))
    height, width = drawn.shape[1:3]
    frame = 2
    side_y, side_x = height + 2 * frame, width + 2 * frame
    canvas = np.full((columns * side_y, columns * side_x, 3), 255, np.uint8)
    colours = (class_colours(len(class_names))[:, :3] * 255).astype(np.uint8) if labels is not None else None
    for index, (column, row) in enumerate(cells):
        top, left = (columns - 1 - row) * side_y, column * side_x
        if colours is not None and labels is not None:
            canvas[top : top + side_y, left : left + side_x] = colours[int(labels[index])]
        picture = drawn[index] if drawn.ndim == 4 else drawn[index][..., None]
        canvas[top + frame : top + frame + height, left + frame : left + frame + width] = picture
    figure = Figure(figsize=(8.2, 8.2 * side_y / side_x), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(canvas, interpolation="antialiased")
    axes.set_axis_off()
    if labels is not None:
        class_legend(figure, class_names)
    return figure


def thumbnails(images: Images, rows: Tensor) -> NDArray[np.uint8]:
    """Some images at a size to draw: large ones are reduced, small ones enlarged by whole pixels.

    Returns:
        uint8 [n, h, w] for one channel, otherwise [n, h, w, 3].
    """
    from torchvision.transforms.v2 import functional

    chosen = images[rows]
    side = max(chosen.shape[2:])
    if side > _LARGEST_THUMBNAIL:
        size = [max(1, round(length * _LARGEST_THUMBNAIL / side)) for length in chosen.shape[2:]]
        chosen = functional.resize(chosen, size, antialias=True)
    elif side < _SMALLEST_DRAWN:
        factor = -(-_SMALLEST_DRAWN // side)
        chosen = F.interpolate(chosen.float(), scale_factor=float(factor), mode="nearest").to(torch.uint8)
    array: NDArray[np.uint8] = chosen.permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


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
