"""``python -m benchmarks.lw_fedssl_resources``: what LW-FedSSL asks of a client, counted beside the paper's tables.

Nothing is trained. In each folder of `FOLDERS`, `table.yaml` holds the rows, and `table.md` and `table.csv` are written
beside it. `relative_to` names the row whose figures are 1; `newcomers: true` is the paper's worst case (section 4.3),
in which a client must download every earlier layer in every round. The figures are counted as in the paper, for one
client:

- `memory` (GB): of one step, at the stage where it is largest, as fedssl/accounting.py counts it.
- `flops` (GFLOPs, a multiply-add counts as one): the local epochs of all rounds, with one image an epoch, through the
  online network only. Frozen layers count once, for their forward pass, active ones three times (appendix A.1). One
  view is counted, or two if the objective is SimCLR, which passes both as one batch. This reproduces the paper's
  figures; `fedssl cost` counts what a step really runs.
- `traffic` (GB): down and up together, over all rounds. The paper's GB is 1,000 MiB: with this unit, its heads and the
  444,864 parameters of a block give its figures to the last digit. The figures here use the same unit.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from benchmarks.measure import ROOT
from fedssl.accounting import StepCounter
from fedssl.data.datasets import Dataset
from fedssl.data.pixels import normalize
from fedssl.federation import Federation, build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate
from fedssl.run_folder.storage import csv_text, write_atomically
from fedssl.tables.files import markdown_table
from fedssl.tables.table import Table, cell_recipe

RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = ("lw_fedssl_resources", "lw_fedssl_resources_blood")
TITLES = {"memory": "memory (GB)", "flops": "GFLOPs", "traffic": "traffic (GB)"}
_PAPER_GB = 1000 * 2**20
#: ours, its ratio to the reference row's, the paper's figure and its ratio; None where the paper has none
Figures = tuple[float, float, float | None, float | None]


def count(values: dict[str, Any]) -> dict[str, dict[str, Figures]]:
    """Return the figures of a table, as `table.yaml` holds it, by row and resource."""
    names = ("label", "recipe", "settings")
    rows = [{name: row[name] for name in names if name in row} for row in values["rows"]]
    table = Table.model_validate({"name": values["name"], "seeds": [0], "settings": values["settings"], "rows": rows})
    counted = {}
    for row, written in zip(table.rows, values["rows"], strict=True):
        print(f"counting {row.label}", flush=True)
        image = tuple(written.get("image", values["image"]))
        counted[row.label] = _count(cell_recipe(table, row, 0), image, written.get("newcomers", False))
    references = {row["label"]: row.get("relative_to", row["label"]) for row in values["rows"]}
    papers = {label: {name: float(text) for name, text in row.items()} for label, row in values["paper"].items()}
    figures: dict[str, dict[str, Figures]] = {}
    for label, reference in references.items():
        figures[label] = {}
        for name, ours in counted[label].items():
            paper, whole = (papers.get(row, {}).get(name) for row in (label, reference))
            ratio = None if paper is None or whole is None else paper / whole
            figures[label][name] = ours, ours / counted[reference][name], paper, ratio
    return figures


def _count(recipe: Recipe, shape: tuple[int, int, int], newcomers: bool) -> dict[str, float]:
    batch = recipe.training.batch_size
    images, labels = torch.zeros((), dtype=torch.uint8).expand(batch, *shape), torch.zeros(batch, dtype=torch.int64)
    federation = build_federation(recipe, Dataset("made up", images, labels, images[:0], labels[:0], (), None))
    costs = estimate(federation)
    received = [fmean(cost.bytes_down.values()) for cost in costs]
    if newcomers:
        method, nobody_was_there = federation.method, federation.method.initial_state()
        received = [method.broadcast(nobody_was_there, [0], cost.number)[0].num_bytes for cost in costs]
    traffic = sum(down + fmean(cost.bytes_up.values()) for down, cost in zip(received, costs, strict=True))
    passes = (2 if recipe.objective.name == "simclr" else 1) * recipe.training.local_epochs
    return {
        "memory": max(step.memory for cost in costs for step in cost.step.values()) / 1e9,
        "flops": _flops_of_one_view(federation) * passes / 2 / 1e9,
        "traffic": traffic / _PAPER_GB,
    }


def _flops_of_one_view(federation: Federation) -> int:
    """Return the operations of one image's passes through the online network, one in each round."""
    method, model = federation.method, federation.new_model(0)
    image = normalize(federation.dataset.train_images[:1])
    counted: dict[tuple[int, int, int], int] = {}
    total = 0
    for number in range(1, method.rounds + 1):
        plan = method.plan(model, number)
        kind = plan.stage, len(plan.active), len(plan.frozen)
        if kind not in counted:
            method.schedule.prepare(model, plan)
            model.eval()  # a single image has no batch statistics
            counter = StepCounter(model)
            with counter.forward():
                model.represent(image)
            counted[kind] = counter.flops
        total += counted[kind]
    return total


def write(folder: Path) -> None:
    """Count the table in a folder and write its files."""
    values = yaml.safe_load((folder / "table.yaml").read_text(encoding="utf-8"))
    figures = count(values)
    header = ["row", *(title for name in TITLES.values() for title in (name, "ratio", "paper", "ratio"))]
    cells = [[label, *(cell for name in TITLES for cell in _cells(name, row[name]))] for label, row in figures.items()]
    description = " ".join(values["description"].split())
    text = "\n\n".join([f"# {values['name']}", description, markdown_table(header, cells)]) + "\n"
    lines: list[list[object]] = [["row", "resource", "ours", "ratio", "paper", "paper_ratio"]]
    for label, row in figures.items():
        for name, found in row.items():
            lines.append([label, name, *("" if figure is None else repr(figure) for figure in found)])
    write_atomically(folder / "table.md", text.encode())
    write_atomically(folder / "table.csv", csv_text(lines).encode())


def _cells(name: str, figures: Figures) -> list[str]:
    digits = [0 if name == "flops" else 2, 3, 0 if name == "flops" else 2, 2]
    return ["-" if figure is None else f"{figure:.{n}f}" for figure, n in zip(figures, digits, strict=True)]


if __name__ == "__main__":
    for folder in FOLDERS:
        write(RESULTS / folder)
