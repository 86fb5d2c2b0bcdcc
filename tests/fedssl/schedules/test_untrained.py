"""A run in which nothing trains: its encoder stays as it was, and is fine-tuned."""

from __future__ import annotations

import torch

from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import LW_FEDSSL
from tests.fedssl.rounds_in_memory import train_rounds

SMALL = [
    "device=cpu",
    "architectures=[small_convnet]",
    "data={name: digits, train_limit: 60, test_limit: 30}",
    "training={local_epochs: 1, batch_size: 8}",
    "objective={name: moco_v3, hidden_features: 16, output_features: 8}",
    "evaluation={neighbors: 3, linear: {epochs: 1}, fine_tune: {epochs: 2, warmup_epochs: 0}}",
]


def test_the_encoder_is_bit_for_bit_that_of_an_untrained_run_of_the_same_seed(tiny):
    recipe = tiny(**LW_FEDSSL | {"schedule": "untrained"})
    federation = build_federation(recipe)
    done = train_rounds(federation, 2)
    first = build_federation(tiny(**LW_FEDSSL | {"schedule": "end_to_end"})).new_model(None).state_dict()
    for k in range(3):
        for name, tensor in done.clients[k].tensors.items():
            if name.startswith("model/online."):
                torch.testing.assert_close(tensor, first[name.removeprefix("model/")], rtol=1e-6, atol=1e-7)
    assert all(reply.metrics == {"memory": 0, "flops": 0} for reply in done.replies[1].values())
    assert [sum(cost.flops.values()) for cost in estimate(federation)] == [0, 0]


def test_one_clients_model_comes_back_from_the_server_unchanged():
    federation = build_federation(load_recipe("scratch", SMALL))
    before = federation.method.initial_state().tensors
    after = train_rounds(federation, 1).server.tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_scratch_run_measures_the_same_before_and_after_and_is_fine_tuned(tmp_path):
    run(load_recipe("scratch", SMALL), tmp_path / "scratch")
    found = {(n, m): v for n, who, m, v in RunDirectory.open(tmp_path / "scratch").read_metrics() if who == "global"}
    for measure in ("knn", "linear", "effective_rank"):
        assert found[0, measure] == found[1, measure]
    assert {metric for number, metric in found if number == 1 and metric.startswith("fine_tune_")}
    page = write_report([tmp_path / "scratch"], collapse=False, images=False)
    assert "scratch" in page.read_text()
