"""The logged and the predicted resources of a run's clients, by (round, client, figure)."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from fedssl import training
from fedssl.federation import build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate
from fedssl.run_folder.directory import RunDirectory

Figures = dict[tuple[int, str, str], float]


def logged(path: Path) -> Figures:
    """Return the figures that a run logged of each client."""
    names = ("bytes_down", "bytes_up", "flops", "memory")
    rows = RunDirectory.open(path).read_metrics()
    return {(number, who, name): value for number, who, name, value in rows if name in names and who.isdigit()}


def predicted(recipe: Recipe) -> Figures:
    """Return the figures that `estimate` predicts without running a step, which the parts of fedssl allow."""
    training.STEP_COSTS.clear()  # what the run has counted is not to be taken over
    with patch.object(training, "suppress", lambda *_: nullcontext()):
        costs = estimate(build_federation(recipe))
    found: Figures = {}
    for cost in costs:
        memory = {k: step.memory for k, step in cost.step.items()}
        figures = {"bytes_down": cost.bytes_down, "bytes_up": cost.bytes_up, "flops": cost.flops, "memory": memory}
        found |= {(cost.number, str(k), name): float(v) for name, values in figures.items() for k, v in values.items()}
    return found
