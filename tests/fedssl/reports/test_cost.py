"""`fedssl cost` predicts the figures that a run then logs."""

import csv
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fedssl import training
from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.recipe.reading import parse_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate, totals
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL, tiny_values

LAYER_WISE: dict[str, Any] = AVERAGED | {"rounds": 8, "schedule": {"name": "layer_wise", "rounds_per_stage": 2}}
TWO_STAGES = LAYER_WISE | {"rounds": 4, "schedule": LAYER_WISE["schedule"] | {"layers_per_stage": 2}}
UNEVEN = {"partition": {"name": "dirichlet", "clients": 5, "min_samples": 9, "alpha": 1.0}}
#: what no shipped recipe has; test_shipped_recipes.py does the same with each of these
KINDS = {
    "aligned, two architectures, sampled, bfloat16 on the wire": ALIGNED
    | {"clients_per_round": 2, "rounds": 3, "transport": "bfloat16"},
    "aligned to kernels that are renewed every second round": ALIGNED
    | {"rounds": 3, "aggregators": [{"name": "representation_mean", "renew_every": 2}]},
    "uneven clients that drop out": AVERAGED | UNEVEN | {"client_dropout": 0.4, "rounds": 3},
    "uneven clients with equal steps, quadratic in the batch": AVERAGED
    | UNEVEN
    | {"training": {"local_steps": 5, "local_epochs": 3, "batch_size": 8, "stop_at_collapse": True}}
    | {"rounds": 1, "regularizers": ["uniformity"]},
    "layer-wise, joining late, int8 on the wire": TWO_STAGES | {"clients_per_round": 1, "transport": "int8"},
    "layer-wise, aligned to previous models, dropping out, bfloat16 on the wire": TWO_STAGES
    | {"regularizers": ["representation_alignment", "proximal"], "client_dropout": 0.4, "transport": "bfloat16"},
    "depth dropout": TWO_STAGES
    | {"architectures": ["small_vit"], "objective": LW_FEDSSL["objective"]}
    | {"schedule": TWO_STAGES["schedule"] | {"kept_layers": 1}, "client_dropout": 0.3},
}


#: by round, client and name
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_sends_and_takes_exactly_what_was_predicted(kind, noisy, tmp_path):
    recipe = noisy(**KINDS[kind])
    run(recipe, tmp_path / "a")
    assert predicted(recipe) == logged(tmp_path / "a")


def test_a_part_that_reads_numbers_is_counted_on_a_real_step(tiny, monkeypatch):
    """At a rate that sends the weights to infinity, which the counted steps do not take."""
    values = tiny_values(**ALIGNED)
    values["training"]["learning_rate"] = 1e6
    expected = totals(estimate(build_federation(parse_recipe(values))))
    objective, read = type(tiny(**ALIGNED).objective), []
    step = objective.step

    def reads(self, *given):
        result = step(self, *given)
        read.append(result.loss.item())
        return result

    monkeypatch.setattr(objective, "step", reads)
    assert totals(estimate(build_federation(parse_recipe(values)))) == expected
    assert len(set(read)) > 1


def test_the_command_prints_stages_and_writes_rounds(fedssl):
    Path("r.yaml").write_text(parse_recipe(tiny_values(**LAYER_WISE)).to_yaml())
    code, out, err = fedssl("cost", "r.yaml", "seed=1", "--rounds", "rounds.csv")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()] == ["1", "2", "3", "4"]
    with open("rounds.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 3
    found = totals(estimate(build_federation(parse_recipe(tiny_values(**LAYER_WISE, seed=1)))))
    assert sum(int(row["bytes_up"]) for row in rows) == found["bytes_up"]
    assert sum(int(row["flops"]) for row in rows) == found["flops"]
    assert max(int(row["memory"]) for row in rows) == found["memory"]
