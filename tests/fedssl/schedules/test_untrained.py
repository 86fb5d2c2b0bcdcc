"""A run in which nothing trains: its encoder stays as it was, and what fine-tuning makes of it is a table's row."""

from __future__ import annotations

import torch
import yaml

from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.tables.runner import run_table
from fedssl.tables.table import load_table
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
    method = federation.method
    server = method.initial_state()
    before = {name: tensor.clone() for name, tensor in server.tensors.items()}
    client = federation.client(0, Message())
    reply = method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
    after = method.aggregate(server, {0: reply}, 1).tensors
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


def test_it_is_a_row_of_a_table(tmp_path):
    settings = {
        "rounds": 2,
        "preset": "digits",
        "device": "cpu",
        "architectures": ["small_convnet"],
        "data": {"name": "digits", "train_limit": 60, "test_limit": 30},
        "partition": {"name": "iid", "clients": 2},
        "training": {"local_epochs": 1, "batch_size": 8, "optimizer": "adamw"},
        "objective": {"hidden_features": 16, "output_features": 8},
        "evaluation": {"neighbors": 3, "linear": {"epochs": 1}, "fine_tune": {"epochs": 2, "warmup_epochs": 0}},
    }
    rows = [{"label": "Scratch", "recipe": "scratch"}, {"label": "FedMoCoV3", "recipe": "fedmoco_v3"}]
    paper = {"Scratch": {"fine_tune_accuracy": "63.28"}}
    table = {"name": "t", "seeds": [0], "metrics": ["fine_tune_accuracy"], "settings": settings, "rows": rows}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(table | {"paper": paper}))
    run_table(load_table(tmp_path / "t.yaml"), tmp_path / "out")
    text = "\n".join(path.read_text() for path in (tmp_path / "out").glob("*.md"))
    assert "Scratch" in text
    assert "63.28" in text
