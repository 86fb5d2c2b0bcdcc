"""Two pictures of a run's images as its encoder sees them: nearest neighbours, and a map. They need no labels.

They hold images of the run's data, so everybody who gets the report sees them.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.stored_images import Images, images_of_rows
from ..engines.rounds import models_to_evaluate
from ..errors import UserError
from ..evaluation.features import extract_features
from ..federation import federation_of_run, require_same_data
from ..randomness import generator_for, seed_for
from ..run_folder.directory import RunDirectory
from .plots import MOST_NAMED_CLASSES, MUTED, TEXT, PageFigure, class_colours, class_legend, page_figure

_SEARCHED, _ON_THE_MAP = 1000, 400  # images
_QUERIES, _NEIGHBOURS = 8, 9
_CELLS_PER_IMAGE = 2.2  # of the map: free cells leave the groups apart
_LARGEST_THUMBNAIL, _SMALLEST_DRAWN = 48, 32  # pixels
_FRAME = 2  # pixels around an image on the map
_SAME, _OTHER = "#009E73", "#D55E00"


def draw_pictures(path: Path, trust: bool = False) -> list[PageFigure]:
    """Draw the pictures of a run's last round, each with its caption; none if there are too few images.

    For `trust` see `load_stored_recipe`.

    Raises:
        UserError: the data have changed or are no longer there, the clients' models are not here, the recipe names code
            that is not trusted, or representations are not finite.
    """
    directory = RunDirectory.open(path)
    federation = federation_of_run(directory, trust)
    require_same_data(path, federation.data_digests())
    dataset, seed, name = federation.dataset, federation.recipe.seed, federation.recipe.name
    if len(dataset.measured_images) == 0:
        raise UserError(
            f"there are no images to measure models on: data.name is {dataset.name}, and the sites hold the data"
        )
    has_test_images = len(dataset.test_images) > 0
    generator = generator_for(seed, "pictures", "images")
    order = torch.randperm(len(dataset.measured_images), generator=generator)[:_SEARCHED]
    images = images_of_rows(dataset.measured_images, order)
    if len(images) < 5:  # too few for any t-SNE
        return []
    labels = dataset.test_labels[order] if has_test_images and dataset.labelled else None
    who, model = next(models_to_evaluate(federation, directory))
    features = extract_features(model.encoder, images)
    queries = torch.arange(min(_QUERIES, len(images)))  # whose order is drawn
    nearest, similarity = nearest_images(features, queries, _NEIGHBOURS)
    points = tsne(features[:_ON_THE_MAP], seed_for(seed, "pictures", "map"))
    few_classes = 1 < len(dataset.class_names) <= MOST_NAMED_CLASSES
    sheet = draw_neighbours(images, queries, nearest, similarity, labels)
    image_map = draw_map(images, points, labels if few_classes else None, dataset.class_names)
    owner = "the global model" if who == "global" else f"client {who}'s model"
    shown = f"{name}, {owner} after round {directory.checkpoint.round}."
    source = f"{'test' if has_test_images else 'training'} images"
    green = ""
    if labels is not None:
        same_class = float((labels[nearest] == labels[queries][:, None]).double().mean())
        green = f" A green line marks the image's own class, an orange one another: {same_class:.0%} are green."
    of_sheet = (
        f"{shown} Each row: one image, and those of {len(images)} {source} whose representations lie nearest to it. "
        "They should show the same kind of thing; if they only share brightness or background, the encoder has "
        f"learned little.{green}"
    )
    of_map = (
        f"{shown} t-SNE of {len(points)} {source}. Images that lie together look alike to the encoder; each is moved "
        "to the nearest free place. Distances between groups mean nothing."
    )
    return [
        page_figure(sheet, f"Nearest neighbours: {name}", of_sheet, png=True),
        page_figure(image_map, f"Map of images: {name}", of_map, png=True),
    ]


def draw_neighbours(
    images: Images, queries: Tensor, nearest: Tensor, similarity: Tensor, labels: Tensor | None
) -> Figure:
    """Draw a row for each query: the query, and its neighbours with their cosines, the nearest first.

    `images` is uint8 [n, C, H, W]; `queries` [q] and `nearest` [q, k] are int64 rows of it; `similarity` is [q, k].
    With `labels`, int64 [n], a neighbour of the query's class gets a green line, another an orange one.
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
    """Draw each image at the place of its representation; with labels, in a frame of its class's colour.

    `points` is floating point [n, 2]. The first n are drawn of `images`, uint8 [n or more, C, H, W].
    """
    columns = int(np.ceil(np.sqrt(len(points) * _CELLS_PER_IMAGE)))
    drawn = thumbnails(images, torch.arange(len(points)))
    side_y, side_x = (side + 2 * _FRAME for side in drawn.shape[1:3])
    canvas = np.full((columns * side_y, columns * side_x, 3), 255, np.uint8)
    colours = (class_colours(len(class_names))[:, :3] * 255).astype(np.uint8) if labels is not None else None
    for index, (column, row) in enumerate(grid_cells(points, columns).tolist()):
        top, left = (columns - 1 - row) * side_y, column * side_x
        cell = canvas[top : top + side_y, left : left + side_x]
        if colours is not None and labels is not None:
            cell[:] = colours[int(labels[index])]
        cell[_FRAME:-_FRAME, _FRAME:-_FRAME] = drawn[index] if drawn.ndim == 4 else drawn[index][..., None]
    figure = Figure(figsize=(8.2, 8.2 * side_y / side_x), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(canvas, interpolation="antialiased")
    axes.set_axis_off()
    if labels is not None:
        class_legend(figure, class_names)
    return figure


def thumbnails(images: Images, rows: Tensor) -> NDArray[np.uint8]:
    """Return images as uint8 [n, h, w] or [n, h, w, 3], large ones reduced and small ones enlarged by whole pixels.

    Of more than three channels the first three are shown, of two channels the mean.
    """
    from torchvision.transforms.v2 import functional

    chosen = images[rows]
    if chosen.shape[1] == 2:
        chosen = chosen.float().mean(1, keepdim=True).to(torch.uint8)
    chosen = chosen[:, :3]
    side = max(chosen.shape[2:])
    if side > _LARGEST_THUMBNAIL:
        size = [max(1, round(length * _LARGEST_THUMBNAIL / side)) for length in chosen.shape[2:]]
        chosen = functional.resize(chosen, size, antialias=True)
    elif side < _SMALLEST_DRAWN:
        factor = -(-_SMALLEST_DRAWN // side)
        chosen = F.interpolate(chosen.float(), scale_factor=float(factor), mode="nearest").to(torch.uint8)
    array: NDArray[np.uint8] = chosen.permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def grid_cells(points: Tensor, columns: int) -> Tensor:
    """Choose a cell of a square grid for each point [n, 2], no cell twice, so that the squared distances sum to least.

    Return the cells' columns and rows, int64 [n, 2], from the lower left. The grid has `columns` cells along each side,
    at least n in all.
    """
    from scipy.optimize import linear_sum_assignment  # here, as importing it takes time

    low, high = points.aminmax(dim=0)
    placed = (points - low) / (high - low).clamp(min=1e-9) * (columns - 1)
    cells = torch.cartesian_prod(torch.arange(columns), torch.arange(columns)).flip(1)
    _, chosen = linear_sum_assignment(torch.cdist(placed.double(), cells.double()).square().numpy())
    return cells[torch.from_numpy(chosen)]


def nearest_images(features: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the images nearest to some of them, by the cosine of their representations, without the image itself.

    Of each of `queries`, int64 [q] rows of `features` [n, d], they are the k = min(count, n - 1) nearest ones: int64
    [q, k] rows and float64 [q, k] cosines, the nearest first. A zero vector has similarity 0 to everything.
    """
    rows = F.normalize(features.detach().double(), dim=1)
    similarity = rows[queries] @ rows.T
    similarity[torch.arange(len(queries)), queries] = -torch.inf
    nearest = similarity.topk(min(count, len(rows) - 1), dim=1)
    return nearest.indices, nearest.values


def tsne(features: Tensor, seed: int) -> Tensor:
    """Embed the l2-normalised representations [n, d], n above 3, in the plane: float64 [n, 2].

    van der Maaten & Hinton 2008, by scikit-learn: perplexity 30 (a third of the points if they are few), started from
    the first two principal components. The distances between groups and the groups' sizes mean nothing. The same seed
    gives the same points on one machine.
    """
    from sklearn.manifold import TSNE

    rows = F.normalize(features.detach().cpu().double(), dim=1)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    # a collapsed representation has no principal components to start from, and scikit-learn would divide by 0
    start = "pca" if (rows - rows[0]).abs().max() > 1e-6 and rows.shape[1] > 1 else "random"
    points = TSNE(perplexity=perplexity, init=start, random_state=seed % 2**32).fit_transform(rows.numpy())
    return torch.from_numpy(points).double()
