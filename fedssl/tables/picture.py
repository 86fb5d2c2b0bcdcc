"""Draw a table as one picture."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.datasets import load_dataset
from ..data.partitions import deal
from ..data.stored_images import Images, images_of_rows
from ..recipe.reading import parse_recipe
from ..recipe.rules import public_image_users
from ..reports.plots import Card, draw_table_picture
from ..run.record import Run, read_run
from .results import Results, reference_row, verdict
from .table import Table, cell_path

_MOST_CLIENTS = 5
_MOSAIC_ROWS, _MOSAIC_COLUMNS = 3, 4


def draw_picture(table: Table, results: Results, output: Path) -> Figure:
    """Draw the picture of one scenario: some clients with their images, every row's bars, and the verdict.

    The clients are those of the reference row's first finished run in the table's folder `output`, or of the first row
    with one. At least one run must be finished.

    Raises:
        UserError: the run's data is missing, or its folder cannot be read.
    """
    reference = reference_row(table)
    label = reference if reference in results.finished else next(iter(results.finished))
    run = read_run(cell_path(output, label, results.finished[label][0], results.label))
    panels: dict[str, list[tuple[str, str, list[float], list[float]]]] = {metric: [] for metric in table.metrics}
    for metric, bars in panels.items():
        for row in table.rows:
            before, after = results.values(row.label, metric, "before"), results.values(row.label, metric)
            bars.append((row.label, table.role(row.label), before, after))
    untrained: dict[str, list[float]] = {m: results.values(reference, m, "before") for m in table.metrics}
    seeds = f"{len(table.seeds)} seeds" if len(table.seeds) > 1 else f"seed {table.seeds[0]}"
    clients = int(run.recipe["partition"]["clients"])
    shown = f", {_MOST_CLIENTS} of them shown" if clients > _MOST_CLIENTS else ""
    data = run.recipe["data"]
    name = Path(data["path"]).stem if data["name"] in ("npz", "images", "folder") else data["name"]
    subtitle = f"{results.label}: " if results.label else ""
    subtitle += f"{name}, {clients} client{'s' * (clients > 1)}{shown}, {run.rounds} rounds, {seeds}"
    # the description's first sentence; "et al. 2024" does not end it
    title = re.split(r"\.\s(?=[A-Z])", " ".join(table.description.split()))[0] or table.name
    return draw_table_picture(title, subtitle, _cards(run), panels, untrained, verdict(table, results))


def _cards(run: Run) -> list[Card]:
    """Return a card for each of the first clients of a run, and one for the public images if the method uses them."""
    recipe = parse_recipe(dict(run.recipe))
    dataset = load_dataset(recipe.data, recipe.seed)
    rows = deal(dataset, recipe.partition, recipe.seed)
    cards = []
    for k, client_rows in enumerate(rows[:_MOST_CLIENTS]):
        labels = dataset.train_labels[client_rows]
        names = [dataset.counted_as[label] for label in sorted(set(labels.tolist()))]
        held = f"only {' and '.join(names)}" if len(names) <= 2 else f"{len(names)} classes"
        if not dataset.labelled:
            held = "no labels"
        elif len(names) == len(dataset.class_names):
            held = f"all {len(names)} classes"
        lines = (textwrap.shorten(held, 26, placeholder=" ..."), run.architecture_of(k), f"{len(client_rows)} images")
        mosaic = _mosaic(images_of_rows(dataset.train_images, client_rows), labels)
        cards.append(Card(f"client {k}", "\n".join(lines), mosaic))
    public = dataset.public_images
    if public_image_users(recipe) and public is not None:
        mosaic = _mosaic(public, torch.zeros(len(public), dtype=torch.int64))
        cards.append(Card("public images", f"without labels,\nfor all clients\n{len(public)} images", mosaic))
    return cards


def _mosaic(images: Images, labels: Tensor) -> NDArray[np.uint8]:
    """Draw some images in a grid, spread evenly over the images in the order of their classes.

    Args:
        images: uint8 [n, channels, height, width].
        labels: int64 [n].

    Returns:
        uint8 [h, w] for one channel, otherwise [h, w, channels].
    """
    order = labels.argsort(stable=True)
    chosen = images[order[torch.linspace(0, len(order) - 1, _MOSAIC_ROWS * _MOSAIC_COLUMNS).long()]]
    framed = F.pad(chosen, (0, 1, 0, 1), value=255)
    grid = framed.unflatten(0, (_MOSAIC_ROWS, _MOSAIC_COLUMNS)).permute(0, 3, 1, 4, 2)
    array: NDArray[np.uint8] = grid.flatten(2, 3).flatten(0, 1).numpy()[:-1, :-1]
    return array[..., 0] if array.shape[-1] == 1 else array
