"""The logged and the predicted resources of a run's clients, by (round, client, figure)."""

from __future__ import annotations

from pathlib import Path

from fedssl.federation import build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate
from fedssl.run_folder.directory import RunDirectory
from fedssl.training import STEP_COSTS

Figures = dict[tuple[int, str, str], float]


def logged(path: Path) -> Figures:
    """Return the figures that a run logged of each client."""
    names = ("bytes_down", "bytes_up", "flops", "memory")
    rows = RunDirectory.open(path).read_metrics()
    return {(number, who, name): value for number, who, name, value in rows if name in names and who.isdigit()}


def predicted(recipe: Recipe) -> Figures:
    """Return the figures that `estimate` predicts."""
    STEP_COSTS.clear()  # what the run has counted is not to be taken over
    found: Figures = {}
    for cost in estimate(build_federation(recipe)):
        memory = {k: step.memory for k, step in cost.step.items()}
        figures = {"bytes_down": cost.bytes_down, "bytes_up": cost.bytes_up, "flops": cost.flops, "memory": memory}
        found |= {(cost.number, str(k), name): float(v) for name, values in figures.items() for k, v in values.items()}
    return found
