"""`fedssl cost` predicts the figures that a run then logs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedssl.accounting import StepCounter
from fedssl.cli import main
from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import parse_recipe
from fedssl.reports.cost import estimate, totals
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values
from tests.fedssl.reports.figures import logged, predicted

LAYER_WISE = AVERAGED | {
    "architectures": ["small_convnet"],
    "rounds": 8,
    "schedule": {"name": "layer_wise", "rounds_per_stage": 2},
}
TRANSFORMER = {
    "architectures": ["small_vit"],
    "objective": {"name": "moco_v3", "hidden_features": 16, "output_features": 8},
}
TOKENS = ("cls_token", "pos_embed")
UNEVEN = {"partition": {"name": "dirichlet", "clients": 5, "min_samples": 9, "alpha": 1.0}}
KINDS = {
    "local": {},
    "aligned, two architectures, sampled": ALIGNED | {"clients_per_round": 2, "rounds": 4},
    "uneven clients that drop out": AVERAGED | UNEVEN | {"client_dropout": 0.4, "rounds": 4},
    "uneven clients with equal steps": AVERAGED
    | UNEVEN
    | {"training": {"local_steps": 5, "local_epochs": 3, "batch_size": 8}},
    "two processes a client": AVERAGED | {"training": {"local_epochs": 1, "batch_size": 8, "processes": 2}},
    "quadratic in the batch": AVERAGED | {"regularizers": ["uniformity"]},
    "layer-wise": LAYER_WISE,
    "layer-wise, joining late": LAYER_WISE | {"clients_per_round": 1},
    "layer-wise, dropping out": LAYER_WISE | {"client_dropout": 0.5},
    "layer-wise, aligned to previous models": LAYER_WISE
    | {"regularizers": ["representation_alignment", "proximal"], "client_dropout": 0.4},
    "bfloat16 on the wire": ALIGNED | {"transport": "bfloat16"},
    "layer-wise, bfloat16 on the wire": LAYER_WISE | {"transport": "bfloat16"},
    "layer-wise, int8 on the wire": LAYER_WISE | {"transport": "int8"},
    "depth dropout": LAYER_WISE
    | TRANSFORMER
    | {"schedule": {"name": "layer_wise", "rounds_per_stage": 2, "kept_layers": 2}, "client_dropout": 0.3},
    "progressive": LAYER_WISE | {"schedule": {"name": "progressive", "rounds_per_stage": 4, "layers_per_stage": 2}},
}


@pytest.mark.parametrize("architecture", ["small_vit", "small_resnet10"])
def test_the_stem_counts_forward_only_in_a_stage_that_does_not_train_it(architecture):
    values = tiny_values(**(LAYER_WISE | {"architectures": [architecture]}))
    federation = build_federation(parse_recipe(values))
    model = federation.new_model(None)
    federation.method.schedule.prepare(model, federation.method.plan(model, 8))
    network = model.eval().encoder.network
    stem = network.patch_embed if architecture == "small_vit" else network.conv1
    run_stem, run = StepCounter(model), StepCounter(model)
    images = torch.zeros(1, 1, 8, 8)
    with run_stem.forward():
        stem(images)
    with torch.no_grad(), run.forward():
        stem(images)
    assert run_stem.flops == run.flops > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_sends_and_takes_exactly_what_was_predicted(kind, tmp_path):
    recipe = parse_recipe(tiny_values(**KINDS[kind]))
    run(recipe, tmp_path / "a")
    assert predicted(recipe) == logged(tmp_path / "a")


def test_layers_of_earlier_stages_travel_once_and_to_those_who_lack_them():
    """Two rounds a stage: a client that was there receives a finished layer once, a newcomer all of them each time."""
    federation = build_federation(parse_recipe(tiny_values(**(LAYER_WISE | TRANSFORMER))))
    model = federation.new_model(None)
    block = _bytes_of(model, "online.encoder.network.blocks.0.")
    stem = _bytes_of(model, "online.encoder.network.patch_embed.", *(f"online.encoder.network.{n}" for n in TOKENS))
    heads = _bytes_of(model, "online.projector.", "online.predictor.", "online.encoder.network.norm.")
    costs = estimate(federation)
    assert [set(cost.bytes_down.values()) for cost in costs] == [
        {heads + block + extra} for extra in (stem, stem, stem + block, 0, block, 0, block, 0)
    ]
    worst = [set(cost.bytes_down.values()) for cost in estimate(federation, newcomers=True)]
    assert worst == [{heads + stem + (1 + stage) * block} for stage in range(4) for _ in range(2)]


def _bytes_of(model: nn.Module, *prefixes: str) -> int:
    state = model.state_dict()
    mine = {name: t for name, t in state.items() if name.startswith(prefixes)}
    return Message(mine).num_bytes


def test_a_rate_at_which_a_few_images_diverge_is_counted_as_any_other():
    """The counted steps take two to four images, on which a recipe's own rate may send the weights to infinity."""
    counted = []
    for rate in (0.01, 1e6):
        values = tiny_values(**ALIGNED)
        values["training"]["learning_rate"] = rate
        counted.append(totals(estimate(build_federation(parse_recipe(values)))))
    assert counted[0] == counted[1]


def test_layer_wise_takes_less_and_the_target_network_passes_frozen_layers_with_the_online_one():
    whole, layered = (
        estimate(build_federation(parse_recipe(tiny_values(**(AVERAGED | {"rounds": 8} | changes | TRANSFORMER)))))
        for changes in ({}, LAYER_WISE)
    )
    assert totals(layered)["bytes_up"] < totals(whole)["bytes_up"] / 2
    assert totals(layered)["flops"] < totals(whole)["flops"] / 2
    first, last = layered[0].step[0], layered[-1].step[0]
    assert last.parameters == whole[0].step[0].parameters
    assert last.gradients < whole[0].step[0].gradients
    assert first.flops != last.flops


def test_the_command_prints_stages_and_writes_rounds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    recipe = parse_recipe(tiny_values(**LAYER_WISE))
    Path("r.yaml").write_text(recipe.to_yaml())
    monkeypatch.setattr(sys, "argv", ["fedssl", "cost", "r.yaml", "seed=1", "--rounds", "rounds.csv"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["1", "2", "3", "4"]
    assert any(line.startswith("all") for line in lines)
    with open("rounds.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 3
    costs = estimate(build_federation(parse_recipe(tiny_values(**LAYER_WISE, seed=1))))
    assert sum(int(row["bytes_up"]) for row in rows) == totals(costs)["bytes_up"]
    assert sum(int(row["flops"]) for row in rows) == totals(costs)["flops"]
    assert max(int(row["memory"]) for row in rows) == totals(costs)["memory"]
