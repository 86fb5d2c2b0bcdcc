"""Tables of kind `resources`: what each row's method takes, without training, beside a paper's figures.

They count as the LW-FedSSL paper does, for one client:

- `memory` (GB): of one step, at the stage where it is largest. Ours is what accounting.py counts.
- `flops` (GFLOPs, a multiply-add as one): local epochs of all rounds, one image an epoch, online network only; frozen
  layers forward, active ones three times (appendix A.1). One view is passed, two where the objective is SimCLR, which
  passes both as one batch. This is what reproduces the paper's figures; what a step really runs is in `fedssl cost`.
- `traffic` (GB): down and up together, all rounds. The paper's GB are 1,000 MiB: with that, its heads and the 444,864
  parameters of a block give its figures to the last digit. So are ours here.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data.datasets import Dataset
from ..federation import build_federation
from ..recipe import Recipe
from ..reports.cost import estimate
from ..storage import cannot_write, write_atomically
from .table import RESOURCES, Metric, Table, TableRow, cell_recipe

_PAPER_GB = 1000 * 2**20
_TITLES = {"memory": "memory (GB)", "flops": "GFLOPs", "traffic": "traffic (GB)"}


@dataclass(frozen=True)
class Resources:
    """One row: ours and the paper's figures (None where it prints none), and both relative to the row's reference."""

    label: str
    ours: dict[Metric, float]
    paper: dict[Metric, float | None]
    ratio: dict[Metric, float]
    paper_ratio: dict[Metric, float | None]


def run_resource_table(
    table: Table, output: Path, overrides: Sequence[str] = (), note: Callable[[str], None] | None = None
) -> list[Resources]:
    """Count every row of a table and write OUTPUT/table.md, table.csv and table.yaml.

    Args:
        table: of kind `resources`.
        output: the folder.
        overrides: `key=value`, for all rows.
        note: is told lines of progress, and in the end the table.

    Returns:
        The rows.

    Raises:
        UserError: a recipe that is refused; a file that cannot be written.
    """
    say = note or (lambda text: None)
    recipes = [cell_recipe(table, row, table.seeds[0], overrides) for row in table.rows]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    counted: dict[str, dict[Metric, float]] = {}
    for row, recipe in zip(table.rows, recipes, strict=True):
        say(f"counting {row.label}")
        counted[row.label] = _count(table, row, recipe)
    rows = [_compare(table, row, counted) for row in table.rows]
    header, cells = _cells(table, rows)
    described = " ".join(table.description.split())
    text = "\n".join([f"# {table.name}", "", described, "", _markdown(header, cells), ""])
    settings = yaml.safe_dump(table.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    comment = "".join(f"# with {' '.join(override.split())}\n" for override in overrides)
    write_atomically(output / "table.md", text.encode())
    write_atomically(output / "table.csv", _csv(rows).encode())
    write_atomically(output / "table.yaml", (comment + settings).encode())
    say("\n" + _plain(header, cells))
    say(f"\nwritten: {output / 'table.md'}")
    return rows


def _count(table: Table, row: TableRow, recipe: Recipe) -> dict[Metric, float]:
    federation = build_federation(recipe, _made_up_images(table, recipe))
    costs = estimate(federation, newcomers=row.newcomers)
    views = 2 if recipe.objective.name == "simclr" else 1
    return {
        "memory": max(step.memory for cost in costs for step in cost.step.values()) / 1e9,
        "flops": sum(_mean(cost.one_view_flops) for cost in costs) * views * recipe.training.local_epochs / 2 / 1e9,
        "traffic": sum(_mean(cost.bytes_down) + _mean(cost.bytes_up) for cost in costs) / _PAPER_GB,
    }


def _made_up_images(table: Table, recipe: Recipe) -> Dataset:
    """Noise, one batch a client: what a step takes does not depend on what the images show."""
    samples = recipe.partition.clients * max(recipe.training.batch_size, recipe.partition.min_samples)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *table.image), generator=generator, dtype=torch.uint8)
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


def _markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in [header, *cells]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _csv(rows: Sequence[Resources]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "resource", "ours", "ratio", "paper", "paper_ratio"])
    for row in rows:
        for metric in RESOURCES:
            figures: list[Any] = [row.ours[metric], row.ratio[metric], row.paper[metric], row.paper_ratio[metric]]
            writer.writerow([row.label, metric, *("" if figure is None else repr(figure) for figure in figures)])
    return text.getvalue()
