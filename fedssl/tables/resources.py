"""Tables of kind `resources`: what each row's method takes, without training, beside a paper's figures.

The figures are counted as in the LW-FedSSL paper, for one client:

- `memory` (GB): of one step, at the stage where it is largest. Ours is what accounting.py counts.
- `flops` (GFLOPs, a multiply-add counts as one): the local epochs of all rounds, with one image an epoch, through the
  online network only. Frozen layers count once, for their forward pass, active ones three times (appendix A.1). One
  view is passed; two are where the objective is SimCLR, which passes both as one batch. Counted like this, the paper's
  figures are reproduced. `fedssl cost` tells what a step really runs.
- `traffic` (GB): down and up together, over all rounds. A GB of the paper is 1,000 MiB: with this unit, its heads and
  the 444,864 parameters of a block give its figures to the last digit. The figures here have the same unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import build_federation
from ..recipe.recipe import Recipe
from ..reports.cost import estimate
from ..run.storage import csv_text, make_folder, write_atomically
from .files import markdown_table, plain_table, write_description
from .table import RESOURCES, Metric, Table, TableRow, cell_recipe

_PAPER_GB = 1000 * 2**20
_TITLES = {"memory": "memory (GB)", "flops": "GFLOPs", "traffic": "traffic (GB)"}


@dataclass(frozen=True)
class Resources:
    """What one row takes.

    Attributes:
        label: the row's.
        ours: the figures that are counted here, in the units above.
        paper: the paper's figures; None where it prints none.
        ratio, paper_ratio: both relative to the figures of the row's reference.
    """

    label: str
    ours: dict[Metric, float]
    paper: dict[Metric, float | None]
    ratio: dict[Metric, float]
    paper_ratio: dict[Metric, float | None]


def run_resource_table(
    table: Table, output: Path, overrides: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> list[Resources]:
    """Count every row of a table and write OUTPUT/table.md, table.csv and table.yaml.

    Args:
        table: of kind `resources`, see `load_table`.
        output: the folder; it is made where it does not exist.
        overrides: `key=value`, for all rows.
        note: is called with each line of progress, and in the end with the table.

    Returns:
        The rows, in the table's order.

    Raises:
        UserError: a recipe is refused, or a file cannot be written.
    """
    recipes = [cell_recipe(table, row, table.seeds[0], overrides) for row in table.rows]
    make_folder(output)
    counted: dict[str, dict[Metric, float]] = {}
    for row, recipe in zip(table.rows, recipes, strict=True):
        note(f"counting {row.label}")
        counted[row.label] = _count(table, row, recipe)
    rows = [_compare(table, row, counted) for row in table.rows]
    header, cells = _cells(table, rows)
    description = " ".join(table.description.split())
    text = "\n\n".join([f"# {table.name}", description, markdown_table(header, cells)]) + "\n"
    write_atomically(output / "table.md", text.encode())
    write_atomically(output / "table.csv", _figures_as_csv(rows).encode())
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
    federation = build_federation(recipe, _made_up_images(row.image or table.image, recipe))
    costs = estimate(federation, newcomers=row.newcomers)
    views = 2 if recipe.objective.name == "simclr" else 1
    return {
        "memory": max(step.memory for cost in costs for step in cost.step.values()) / 1e9,
        "flops": sum(_mean(cost.one_view_flops) for cost in costs) * views * recipe.training.local_epochs / 2 / 1e9,
        "traffic": sum(_mean(cost.bytes_down) + _mean(cost.bytes_up) for cost in costs) / _PAPER_GB,
    }


def _made_up_images(shape: tuple[int, int, int], recipe: Recipe) -> Dataset:
    """Images of noise, one batch a client: what a step takes does not depend on what the images show."""
    samples = recipe.partition.clients * max(recipe.training.batch_size, recipe.partition.min_samples)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *shape), generator=generator, dtype=torch.uint8)
    labels = torch.arange(samples) % 2
    return Dataset("made up", images, labels, images[:2], labels[:2], ("0", "1"), None)


def _mean(values: dict[int, int]) -> float:
    return sum(values.values()) / len(values) if values else 0.0


def _compare(table: Table, row: TableRow, counted: dict[str, dict[Metric, float]]) -> Resources:
    reference = row.relative_to or row.label

    def paper(label: str, metric: Metric) -> float | None:
        figure = table.paper.get(label, {}).get(metric)
        return None if figure is None else float(figure)

    ours = counted[row.label]
    printed = {metric: paper(row.label, metric) for metric in RESOURCES}
    ratios: dict[Metric, float | None] = {}
    for metric, figure in printed.items():
        whole = paper(reference, metric)
        ratios[metric] = None if figure is None or whole is None else figure / whole
    relative = {metric: ours[metric] / counted[reference][metric] for metric in RESOURCES}
    return Resources(row.label, ours, printed, relative, ratios)


def _cells(table: Table, rows: Sequence[Resources]) -> tuple[list[str], list[list[str]]]:
    header = ["row"]
    for metric in table.metrics:
        header += [_TITLES[metric], "ratio", "paper", "ratio"]
    cells = []
    for row in rows:
        line = [row.label]
        for metric in table.metrics:
            line += [
                _number(row.ours[metric], metric),
                f"{row.ratio[metric]:.3f}",
                _number(row.paper[metric], metric),
                "-" if row.paper_ratio[metric] is None else f"{row.paper_ratio[metric]:.2f}",
            ]
        cells.append(line)
    return header, cells


def _number(value: float | None, metric: str) -> str:
    return "-" if value is None else f"{value:.{0 if metric == 'flops' else 2}f}"


def _figures_as_csv(rows: Sequence[Resources]) -> str:
    lines: list[list[object]] = [["row", "resource", "ours", "ratio", "paper", "paper_ratio"]]
    for row in rows:
        for metric in RESOURCES:
            figures = (row.ours[metric], row.ratio[metric], row.paper[metric], row.paper_ratio[metric])
            lines.append([row.label, metric, *("" if figure is None else repr(figure) for figure in figures)])
    return csv_text(lines)
