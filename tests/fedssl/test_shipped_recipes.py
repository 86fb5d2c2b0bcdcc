"""Every shipped recipe runs, on a few digits for two rounds; what a method sends and keeps is what it says."""

import dataclasses
import math

import pytest
import torch

from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.recipe.overrides import recipe_names
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.record import read_run
from tests.fedssl.killed_runs import contents, killed_and_resumed
from tests.fedssl.reports.test_cost import logged, predicted
from tests.fedssl.rounds_in_memory import train_rounds

pytestmark = pytest.mark.usefixtures("one_thread")  # networks this small are slower on several
#: what makes a recipe's own parts small enough; everything else is SMALL
PARTS = {
    "fedca": ["aggregators.2.epochs=1"],
    "orchestra": [
        "objective={name: orchestra, clusters: 8, memory: 12, features: 16}",
        "aggregators.1={name: orchestra_clusters, local_clusters: 4, steps: 5}",
    ],
    "l_dawa": ["aggregators.0.plain_rounds=1"],
    "lw_fedssl": ["schedule.layers_per_stage=2", "schedule.rounds_per_stage=1"],
    "prog_fedssl": ["schedule.layers_per_stage=2", "schedule.rounds_per_stage=1"],
}
SMALL = [
    "rounds=2",
    "device=cpu",
    "architectures=[small_convnet]",
    "data={name: digits, train_limit: 60, test_limit: 30, public_holdout: 20}",
    "training={local_epochs: 1, batch_size: 8}",
    "evaluation={neighbors: 3, linear: {epochs: 1}}",
]
#: methods whose clients or server remember something besides the models or draw masks, and other ways to compute steps
REMEMBERING = ["fedu", "fedema", "l_dawa", "orchestra", "fedca", "per_ssfl", "feddino"]
REMEMBERING += ["local_only local_update.keep_optimizer=true training.optimizer=adamw"]
OTHER_STEPS = ["fedu2 training.precision=bfloat16", "fedu2 training.local_steps=3"]


def settings(name: str, *more: str) -> list[str]:
    clients = 1 if name.startswith(("centralised", "scratch")) else 2
    return [*SMALL, f"partition={{name: iid, clients: {clients}}}", *PARTS.get(name, []), *more]


def small(name: str, *more: str) -> Recipe:
    return load_recipe(name, settings(name, *more))


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_runs_two_rounds_that_send_and_take_what_was_foretold(name, finished):
    path = finished(small(name))
    run = read_run(path)
    assert run.finished
    assert all(map(math.isfinite, run.values.values()))
    told = {metric for number, _, metric in run.values if number == 2}
    assert {"knn", "linear", "effective_rank"} <= told
    assert ("loss" in told) == (name != "scratch")  # which trains nothing
    assert predicted(small(name)) == logged(path)


@pytest.mark.parametrize("words", [*REMEMBERING, *OTHER_STEPS])
def test_killed_and_resumed_it_ends_alike(words, finished, tmp_path):
    recipe = small(*words.split())
    assert contents(killed_and_resumed(recipe, tmp_path / "killed")) == contents(finished(recipe))


# What travels


def online_names(federation: Federation) -> set[str]:
    return {name for name in federation.new_model(None).state_dict() if name.startswith("online.")}


@pytest.mark.parametrize("name", ["fedbyol", "fedu", "fedx", "l_dawa"])
def test_the_whole_online_network_travels_and_nothing_else(name):
    """Projector and predictor too, also where a client may keep its own predictor; no target network."""
    federation = build_federation(small(name))
    done, names = train_rounds(federation, 2), online_names(federation)
    parts = {n.split(".")[1] for n in names}
    assert parts == {"encoder", "projector"} | (set() if name == "l_dawa" else {"predictor"})
    messages = [m for rounds in (done.sent, done.replies) for round_ in rounds.values() for m in round_.values()]
    assert len(messages) == 8
    assert all(set(message.tensors) == names for message in messages)


def test_orchestra_sends_weights_centroids_and_the_mean_of_the_target_networks_with_which_clients_begin():
    federation = build_federation(small("orchestra"))
    done, names = train_rounds(federation, 2), online_names(federation)
    assert {n.split(".")[1] for n in names} == {"encoder", "projector", "rotation"}
    assert set(done.sent[0][0].tensors) == names
    assert set(done.replies[0][0].tensors) == {"local_centroids"}
    target = {name for name in federation.method.global_model.state_dict() if name.startswith("target.")}
    assert {n.split(".")[1] for n in target} == {"encoder", "projector"}
    for number in (1, 2):
        down, up = done.sent[number][0].tensors, done.replies[number][0].tensors
        assert set(down) == names | target | {"centroids"}
        assert down["centroids"].shape == (8, 16)
        assert set(up) == names | target | {"local_centroids"}
        assert up["local_centroids"].shape == (4, 16)
    first, second = done.sent[1][0], done.sent[2][0]
    images = [len(rows) for rows in federation.client_rows]
    for name, tensor in second.tensors.items():
        if name.startswith("target."):
            assert torch.equal(first.tensors[name], first.tensors[name.replace("target.", "online.")])
            replies = [done.replies[1][k].tensors[name] for k in (0, 1)]
            mean = sum(n * reply.double() for n, reply in zip(images, replies, strict=True)) / sum(images)
            torch.testing.assert_close(tensor.double(), mean.round() if "num_batches" in name else mean)
    # a client trains with that mean, here one that it does not move; also if it takes part for the first time
    objective = federation.method.objective.model_copy(update={"target_momentum": 1.0})
    method = dataclasses.replace(federation.method, objective=objective)
    weight = "target.projector.0.weight"
    assert not torch.equal(second.tensors[weight], second.tensors[weight.replace("target", "online")])
    for rounds_taken in (0, 1):
        client = federation.client(0, Message())
        client.memory.numbers |= {"rounds_taken": 1} if rounds_taken else {}
        method.client_round(client, second, 2)
        assert torch.equal(client.model.state_dict()[weight], second.tensors[weight])


def test_fedca_sends_weights_the_dictionary_and_the_base_model_once():
    federation = build_federation(small("fedca"))
    done, names = train_rounds(federation, 2), online_names(federation)
    base = {"base_model." + n.removeprefix("online.encoder.") for n in names if n.startswith("online.encoder.")}
    assert set(done.sent[1][0].tensors) == names | base
    assert set(done.sent[2][0].tensors) == names | {"dictionary"}
    images = [len(rows) for rows in federation.client_rows]
    assert done.sent[2][0].tensors["dictionary"].shape == (sum(images), 128)
    for number in (1, 2):
        up = done.replies[number][1].tensors
        assert set(up) == names | {"dictionary.1"}
        assert up["dictionary.1"].shape == (images[1], 128)
    state = federation.method.initial_state().tensors
    assert any(not torch.equal(state[n], state["online.encoder." + n.removeprefix("base_model.")]) for n in base)
