"""Count what each row of a table of kind `resources` takes, without training, beside a paper's figures.

The figures are counted as in the LW-FedSSL paper, for one client:

- `memory` (GB): of one step, at the stage where it is largest, as accounting.py counts it.
- `flops` (GFLOPs, a multiply-add counts as one): the local epochs of all rounds, with one image an epoch, through the
  online network only. Frozen layers count once, for their forward pass, active ones three times (appendix A.1). One
  view is counted, or two if the objective is SimCLR, which passes both as one batch. This reproduces the paper's
  figures; `fedssl cost` counts what a step really runs.
- `traffic` (GB): down and up together, over all rounds. The paper's GB is 1,000 MiB: with this unit, its heads and the
  444,864 parameters of a block give its figures to the last digit. The figures here use the same unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import build_federation
from ..recipe.recipe import Recipe
from ..reports.cost import estimate
from ..run_folder.storage import csv_text, make_folder, write_atomically
from .files import Note, markdown_table, plain_table, write_description
from .table import RESOURCES, Metric, Table, TableRow, cell_recipe

_PAPER_GB = 1000 * 2**20
_TITLES = {"memory": "memory (GB)", "flops": "GFLOPs", "traffic": "traffic (GB)"}


class Figures(NamedTuple):
    """One row's figures of one resource, and their ratios to the reference row's; None where the paper has none."""

    ours: float
    ratio: float
    paper: float | None
    paper_ratio: float | None


def run_resource_table(
    table: Table, output: Path, overrides: Sequence[str] = (), note: Note = lambda text: None
) -> dict[str, dict[Metric, Figures]]:
    """Count every row of a table and write OUTPUT/table.md, table.csv and table.yaml.

    `note` is called with each line of progress, and finally with the table.

    Returns:
        The figures by row label, in the table's order, and metric.
    """
    recipes = [cell_recipe(table, row, table.seeds[0], overrides) for row in table.rows]
    make_folder(output)
    counted: dict[str, dict[Metric, float]] = {}
    for row, recipe in zip(table.rows, recipes, strict=True):
        note(f"counting {row.label}")
        counted[row.label] = _count(table, row, recipe)
    rows = {row.label: _compare(table, row, counted) for row in table.rows}
    header = ["row"]
    for metric in table.metrics:
        header += [_TITLES[metric], "ratio", "paper", "ratio"]
    cells = [
        [label, *(cell for metric in table.metrics for cell in _cells(metric, figures[metric]))]
        for label, figures in rows.items()
    ]
    description = " ".join(table.description.split())
    text = "\n\n".join([f"# {table.name}", description, markdown_table(header, cells)]) + "\n"
    lines: list[list[object]] = [["row", "resource", "ours", "ratio", "paper", "paper_ratio"]]
    for label, figures in rows.items():
        for metric in RESOURCES:
            lines.append([label, metric, *("" if figure is None else repr(figure) for figure in figures[metric])])
    write_atomically(output / "table.md", text.encode())
    write_atomically(output / "table.csv", csv_text(lines).encode())
    write_description(table, output, overrides)
    note("\n" + plain_table(header, cells))
    note(f"\nwritten: {output / 'table.md'}")
    return rows


def _count(table: Table, row: TableRow, recipe: Recipe) -> dict[Metric, float]:
    if recipe.training.local_steps is not None:
        raise UserError(
            f"row {row.label} has training.local_steps {recipe.training.local_steps}, but a table of resources counts "
            "passes over a client's images: use training.local_epochs"
        )
    images = recipe.partition.clients * max(recipe.training.batch_size, recipe.partition.min_samples)
    federation = build_federation(recipe, noise_images(images, row.image or table.image))
    costs = estimate(federation, newcomers=row.newcomers)
    passes = (2 if recipe.objective.name == "simclr" else 1) * recipe.training.local_epochs
    return {
        "memory": max(step.memory for cost in costs for step in cost.step.values()) / 1e9,
        "flops": sum(fmean(cost.one_view_flops.values() or [0]) for cost in costs) * passes / 2 / 1e9,
        "traffic": sum(fmean(d.values() or [0]) for cost in costs for d in (cost.bytes_down, cost.bytes_up))
        / _PAPER_GB,
    }


def noise_images(count: int, shape: tuple[int, int, int], classes: int = 2, public: int = 0) -> Dataset:
    """Return `count` training and `public` public images of noise, because the cost of a step is that of real ones.

    `shape` is channels, height and width of an image, `classes` the number of classes.
    """
    generator = torch.Generator().manual_seed(0)
    images, public_images = (
        torch.randint(0, 256, (number, *shape), generator=generator, dtype=torch.uint8) for number in (count, public)
    )
    labels = torch.arange(count) % classes
    names = tuple(map(str, range(classes)))
    return Dataset("made up", images, labels, images[:2], labels[:2], names, public_images if public else None)


def _compare(table: Table, row: TableRow, counted: dict[str, dict[Metric, float]]) -> dict[Metric, Figures]:
    reference = row.relative_to or row.label
    figures = {}
    for metric in RESOURCES:
        ours = counted[row.label][metric]
        paper, whole = (table.paper.get(label, {}).get(metric) for label in (row.label, reference))
        figures[metric] = Figures(
            ours,
            ours / counted[reference][metric],
            None if paper is None else float(paper),
            None if paper is None or whole is None else float(paper) / float(whole),
        )
    return figures


def _cells(metric: Metric, figures: Figures) -> list[str]:
    digits = 0 if metric == "flops" else 2
    return [
        f"{figures.ours:.{digits}f}",
        f"{figures.ratio:.3f}",
        "-" if figures.paper is None else f"{figures.paper:.{digits}f}",
        "-" if figures.paper_ratio is None else f"{figures.paper_ratio:.2f}",
    ]
