"""A model of one's own beside the averaged one: what travels, what stays, what pulls, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.reports.cost import estimate
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import train_rounds

SIMSIAM = {"name": "simsiam", "output_features": 16, "bottleneck_features": 8}


def near(weight: float) -> dict[str, Any]:
    return {
        "objective": SIMSIAM,
        "aggregators": ["weighted_mean"],
        "local_update": "personal",
        "regularizers": [{"name": "distance_to_global", "weight": weight}],
    }


def weights(state) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.tensors.items() if "online." in name}


def test_the_global_model_is_exactly_that_of_federated_averaging(tiny):
    """The own models change nothing for the server, whatever pulls at them."""
    averaged = train_rounds(build_federation(tiny(**AVERAGED | {"objective": SIMSIAM})), 2)
    personal = train_rounds(build_federation(tiny(**near(0.7))), 2)
    assert averaged.server.tensors.keys() == personal.server.tensors.keys()
    assert all(torch.equal(t, personal.server.tensors[name]) for name, t in averaged.server.tensors.items())
    for k in range(3):
        assert personal.replies[2][k].metrics["global_loss"] == averaged.replies[2][k].metrics["loss"]
        assert personal.replies[2][k].metrics["loss"] != averaged.replies[2][k].metrics["loss"]


def test_without_a_pull_the_own_model_is_trained_alone_from_the_first_global_one(tiny):
    """Its two rounds are those of a client that keeps its own weights, from the global model of before round 1."""
    federation = build_federation(tiny(**near(0.0)))
    first = federation.method.initial_state().tensors
    done = train_rounds(federation, 2)
    alone = build_federation(tiny(objective=SIMSIAM))
    client = alone.client(1, Message())
    client.model.load_state_dict(first, strict=False)
    for number in (1, 2):
        alone.method.client_round(client, Message(), number)
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(done.clients[1].tensors[f"model/{name}"], tensor, rtol=0, atol=0)


def test_a_stronger_pull_leaves_the_own_model_nearer_to_the_received_one(tiny):
    distances = []
    training = {"local_epochs": 2, "batch_size": 8, "learning_rate": 0.005}
    for weight in (0.0, 20.0):
        replies = train_rounds(build_federation(tiny(**near(weight), training=training)), 2).replies[2]
        distances.append(sum(reply.metrics["global_distance"] for reply in replies.values()))
    assert distances[1] < 0.7 * distances[0]


def test_the_own_models_are_kept_and_evaluated_and_the_cost_is_that_of_both(tiny, tmp_path):
    recipe = tiny(**near(1.0))
    directory = run(recipe, tmp_path / "run")
    rows = directory.read_metrics()
    assert {who for number, who, metric, _ in rows if (number, metric) == (2, "knn")} == {"0", "1", "2", "mean"}
    own = [weights(directory.client_state(k)) for k in range(3)]
    name = next(name for name in own[0] if name.endswith("weight"))
    sent = directory.server_state().tensors[name.removeprefix("model/")]
    assert len({float(tensors[name].sum()) for tensors in own} | {float(sent.sum())}) == 4
    logged = {(n, who, m): v for n, who, m, v in rows if m in ("memory", "flops", "bytes_up") and who.isdigit()}
    for cost in estimate(build_federation(recipe)):
        for k, step in cost.step.items():
            assert logged[cost.number, str(k), "memory"] == step.memory
            assert logged[cost.number, str(k), "flops"] == cost.flops[k]
            assert logged[cost.number, str(k), "bytes_up"] == cost.bytes_up[k]
    averaged = estimate(build_federation(tiny(**AVERAGED | {"objective": SIMSIAM})))[0]
    assert estimate(build_federation(recipe))[0].flops[0] > 2 * averaged.flops[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregators": [], "regularizers": []}, "local_update personal does not go with aggregators"),
        ({"schedule": {"name": "layer_wise", "rounds_per_stage": 1}}, "local_update personal works with a whole model"),
        (
            {"engine": "flower-simulation", "flower": {"secure_aggregation": {"name": "secagg_plus"}}},
            "clients also send the measures of their own models",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes, message, tiny):
    with pytest.raises(UserError, match=message):
        build_federation(tiny(**near(1.0) | changes))
