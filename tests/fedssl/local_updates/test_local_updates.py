"""Local updates: FedU's and FedEMA's by hand, an optimiser that is kept, and a model of one's own."""

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedssl.aggregators.representation_mean import WHITENING
from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.local_updates.fedema import FedEMA
from fedssl.local_updates.fedu import DIVERGENCE, FedU
from fedssl.local_updates.replace import Replace
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.reports.test_cost import logged, predicted
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.small_models import local_round, scalar_model, value


def online(model: Model) -> Message:
    return Message({name: t.clone() for name, t in model.state_dict().items() if name.startswith("online.")})


def one_round(part, model, memory, received, number, by, second=0.0, predictor=None) -> LocalRound:
    """A round in which the weights of the encoder's layers move by so much, and the predictor is set."""
    local = local_round(model, received, number, memory=memory)
    after_training = part.receive(local)
    with torch.no_grad():
        for layer, change in zip(model.encoder, (by, second), strict=False):
            layer.weight += change
        if predictor is not None:
            model.online["predictor"].weight.fill_(predictor)
    after_training()
    return local


def test_weights_of_another_shape_are_refused_and_not_broadcast():
    model = scalar_model(0.0, 0.0)
    received = Message({name: tensor.flatten()[:1] for name, tensor in online(scalar_model(1.0, 1.0)).tensors.items()})
    with pytest.raises(UserError, match="clients that exchange weights need the same architecture"):
        Replace().receive(local_round(model, received, 1, memory=Message()))
    assert value(model, "encoder") == 0.0


@pytest.mark.parametrize(("second", "divergence", "predictor"), [(-0.375, 0.3125, 7.0), (0.5, 0.375, 5.0)])
def test_fedu_keeps_the_predictor_of_the_client_that_moved_far(second, divergence, predictor):
    """Divergences: near (|0.25| + |-0.375|) / 2, far (0.25 + 0.5) / 2, which is the threshold and counts as far."""
    assert FedU().threshold == 0.4
    part, model, memory = FedU(threshold=0.375), scalar_model(0.0, 0.0), Message()
    first = online(scalar_model(1.0, 1.0, predictor=2.0))
    local = one_round(part, model, memory, first, 1, by=0.25, second=second, predictor=5.0)
    assert local.logged()["global_predictor"] == 1  # the first round takes everything
    assert memory.numbers[DIVERGENCE] == pytest.approx(divergence)
    local = local_round(model, online(scalar_model(6.0, 6.0, predictor=7.0)), 2, memory=memory)
    part.receive(local)
    assert value(model, "encoder") == 6.0
    assert value(model, "predictor") == predictor
    assert local.logged()["global_predictor"] == float(predictor == 7.0)


def test_fedema_mixes_by_each_clients_divergence_and_sets_lambda_once():
    """tau = 0.7. Client a moves by 0.5, then 0.25: lambda = 1.4, mu = 0.7, then 0.35.
    Client b moves by 2, then 4: lambda = 0.35, mu = 0.7, then min(1, 1.4) = 1.

    Round 1 starts from 1, so the clients have 1.5 and 3. Round 2 brings 10: they start from
    0.7 * 1.5 + 0.3 * 10 = 4.05 and 0.7 * 3 + 0.3 * 10 = 5.1, and end at 4.3 and 9.1.
    Round 3 brings 20: 0.35 * 4.3 + 0.65 * 20 = 14.505, and 9.1 unchanged.
    """
    part = FedEMA()
    rows = {"a": (0.5, 0.25, 1.4, 4.05, 14.505, 0.35), "b": (2.0, 4.0, 0.35, 5.1, 9.1, 1.0)}
    for by1, by2, rate, start2, start3, mu3 in rows.values():
        model, memory = scalar_model(), Message()
        local = one_round(part, model, memory, online(scalar_model(1.0, predictor=1.0)), 1, by=by1)
        assert local.logged() == pytest.approx({"mu": 0.0, "divergence": by1, "lambda": rate})
        local = one_round(part, model, memory, online(scalar_model(10.0, predictor=10.0)), 2, by=by2)
        assert local.logged() == pytest.approx({"mu": 0.7, "divergence": by2, "lambda": rate}, rel=1e-5)
        assert value(model, "encoder") == pytest.approx(start2 + by2)
        assert value(model, "predictor") == pytest.approx(0.7 * 1 + 0.3 * 10)
        local = local_round(model, online(scalar_model(20.0)), 3, memory=memory)
        part.receive(local)
        assert value(model, "encoder") == pytest.approx(start3, rel=1e-5)
        assert local.logged()["mu"] == pytest.approx(mu3, rel=1e-5)


@pytest.mark.parametrize(("moved", "second"), [(0.5, 3), (0.0, 2)], ids=["a round missed", "no movement"])
def test_fedema_takes_the_global_model_after_a_round_without_the_client_or_without_lambda(moved, second):
    part, model, memory = FedEMA(), scalar_model(), Message()
    one_round(part, model, memory, online(scalar_model(1.0)), 1, by=moved)
    assert ("fedema.lambda" in memory.numbers) == (moved > 0)
    local = one_round(part, model, memory, online(scalar_model(10.0)), second, by=0.5)
    assert local.logged()["mu"] == 0
    assert value(model, "encoder") == 10.5
    assert float(model.target["encoder"][0].weight) == 10.0
    assert memory.numbers["fedema.lambda"] == pytest.approx(1.4)


# An optimiser that lives as long as the run

KEPT = {"local_update": {"name": "keep_own", "keep_optimizer": True}}
OPTIMIZERS = {"sgd": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}


def training(optimizer, **more):
    return {"local_epochs": 1, "batch_size": 8, "optimizer": optimizer, "learning_rate": 0.01} | more


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_rounds_are_the_steps_of_one_optimizer_whose_state_stays_with_the_client(optimizer, tiny):
    """The gradients of both rounds, given to one torch optimiser, take the first weights to the last ones."""
    options = training(optimizer, learning_rate_schedule="cosine")
    federation = build_federation(tiny(**SMALL | KEPT, training=options))
    taken: list[list[torch.Tensor]] = []

    def note(rule: torch.optim.Optimizer, *_: Any) -> None:
        taken.append([parameter.grad.clone() for parameter in rule.param_groups[0]["params"]])

    handle = register_optimizer_step_pre_hook(note)
    done = train_rounds(federation, 2, [0])
    handle.remove()
    state, decay = done.clients[0].tensors, federation.method.training.weight_decay
    trained = {name: p for name, p in federation.new_model(0).named_parameters() if p.requires_grad}
    rule: torch.optim.Optimizer = torch.optim.AdamW(trained.values(), weight_decay=decay)
    if optimizer == "sgd":
        rule = torch.optim.SGD(trained.values(), weight_decay=decay, momentum=federation.method.training.momentum)
    for number, gradients in enumerate(taken):
        rule.param_groups[0]["lr"] = 0.01 if number < len(taken) / 2 else 0.005  # cosine over two rounds
        for parameter, gradient in zip(trained.values(), gradients, strict=True):
            parameter.grad = gradient
        rule.step()
    for name, expected in trained.items():
        torch.testing.assert_close(state[f"model/{name}"], expected.detach(), rtol=0, atol=0)
    kept = [name for name in state if name.startswith("memory/optimizer/")]
    assert {name.rpartition("/")[2] for name in kept} == OPTIMIZERS[optimizer]
    assert len(kept) == len(trained) * len(OPTIMIZERS[optimizer])
    assert all(reply.tensors == {} for replies in done.replies.values() for reply in replies.values())
    renewed = train_rounds(build_federation(tiny(**SMALL, training=options)), 2).clients[0].tensors
    assert not any("optimizer" in name for name in renewed)
    assert any(not torch.equal(tensor, state[name]) for name, tensor in renewed.items())


def test_centralised_recipes_keep_it_and_their_target_network():
    for name in ("byol", "simclr", "simsiam", "moco_v3"):
        recipe = load_recipe(f"centralised_{name}")
        assert (recipe.objective.name, recipe.partition.clients, recipe.aggregators) == (name, 1, [])
        assert recipe.local_update.keeps_optimizer
        assert not recipe.objective.fresh_target


# A model of one's own beside the averaged one

SIMSIAM = {"name": "simsiam", "output_features": 16, "bottleneck_features": 8}


def near(weight: float) -> dict[str, Any]:
    return SMALL | {
        "objective": SIMSIAM,
        "aggregators": ["weighted_mean"],
        "local_update": "personal",
        "regularizers": [{"name": "distance_to_global", "weight": weight}],
    }


def test_the_global_model_is_exactly_that_of_federated_averaging(tiny):
    """The own models change nothing for the server, whatever pulls at them."""
    averaged = train_rounds(build_federation(tiny(**AVERAGED | SMALL | {"objective": SIMSIAM})), 2)
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
    alone = build_federation(tiny(**SMALL, objective=SIMSIAM))
    client = alone.client(1, Message())
    client.model.load_state_dict(first, strict=False)
    for number in (1, 2):
        alone.method.client_round(client, Message(), number)
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(done.clients[1].tensors[f"model/{name}"], tensor, rtol=0, atol=0)


def test_the_own_models_are_kept_and_evaluated_and_the_cost_is_that_of_both(tiny, finished):
    kernels = {"name": "representation_mean", "kernel": "half_whitened"}
    recipe = tiny(**near(1.0) | {"aggregators": ["weighted_mean", kernels]})
    directory = RunDirectory.open(finished(recipe))
    rows = directory.read_metrics()
    for name in ("knn", "public_effective_rank"):
        assert {who for number, who, metric, _ in rows if (number, metric) == (2, name)} == {"0", "1", "2", "mean"}
    federation = build_federation(recipe)
    client = federation.client(0, directory.client_state(0))
    whitening, again = client.memory.tensors[WHITENING], federation.method._local_round(client, Message(), 2)
    federation.method.aggregators[1].collect(again, [])
    torch.testing.assert_close(whitening, client.memory.tensors[WHITENING])
    assert (2, "0", "public_effective_rank", again.logged()["public_effective_rank"]) in rows
    sent = directory.server_state().tensors
    name = next(name for name in sent if name.endswith("weight"))
    models = [sent[name], *(directory.client_state(k).tensors[f"model/{name}"] for k in range(3))]
    assert len({tuple(tensor.flatten().tolist()) for tensor in models}) == 4
    assert predicted(recipe) == logged(directory.path)
    averaged = estimate(build_federation(tiny(**AVERAGED | SMALL | {"objective": SIMSIAM})))[-1]
    assert estimate(federation)[-1].flops[0] > 2 * averaged.flops[0]


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
