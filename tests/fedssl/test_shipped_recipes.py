"""Every shipped recipe runs, on a few digits for two rounds; what a method sends and keeps is what it says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.recipe.overrides import recipe_names
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import RunDirectory
from fedssl.training import STEP_COSTS
from tests.fedssl.reports.figures import logged, predicted

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
#: methods whose clients or server remember something besides the models
REMEMBERING = ["fedu", "fedema", "l_dawa", "orchestra", "fedca", "per_ssfl"]


def small(name: str, *more: str) -> Recipe:
    clients = 1 if name.startswith(("centralised", "scratch")) else 2
    return load_recipe(name, [*SMALL, f"partition={{name: iid, clients: {clients}}}", *PARTS.get(name, []), *more])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Networks this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a recipe's run of two rounds; each recipe runs once for all tests."""
    folder, paths = tmp_path_factory.mktemp("finished"), {}

    def path(name: str) -> Path:
        if name not in paths:
            run(small(name), folder / name)
            paths[name] = folder / name
        return paths[name]

    return path


def metrics(path: Path) -> dict[tuple[int, str, str], float]:
    return {(number, who, metric): v for number, who, metric, v in RunDirectory.open(path).read_metrics()}


def states(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (path / "checkpoints").iterdir() if f.suffix == ".safetensors"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_runs_two_rounds(name, finished):
    assert RunDirectory.open(finished(name)).checkpoint.finished
    found = metrics(finished(name))
    assert all(math.isfinite(value) for value in found.values())
    told = {metric for number, _, metric in found if number == 2}
    assert {"knn", "linear", "effective_rank"} <= told
    assert ("loss" in told) == (name != "scratch")  # which trains nothing


@pytest.mark.parametrize("name", recipe_names())
def test_it_sends_and_takes_what_was_foretold(name, finished):
    assert predicted(small(name)) == logged(finished(name))


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may catch it."""


class KilledInRoundTwo(Observer):
    """Dies after the first client of round 2 has stored its state."""

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if (round_number, position) == (2, 1):
            raise Killed


@pytest.mark.parametrize("name", REMEMBERING)
def test_killed_and_resumed_it_ends_alike(name, finished, tmp_path):
    with pytest.raises(Killed):
        run(small(name), tmp_path / "killed", KilledInRoundTwo())
    resume(tmp_path / "killed")
    assert states(tmp_path / "killed") == states(finished(name))
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (finished(name) / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ["training.precision=bfloat16"],
        ["training.precision=bfloat16", "training.join_views=true"],
        ["training.local_steps=3"],
    ],
    ids=" ".join,
)
def test_killed_and_resumed_it_ends_alike_however_steps_compute(options, tmp_path):
    """The process that resumes has counted no step yet."""
    recipe = small("fedu2", *options)
    run(recipe, tmp_path / "whole")
    with pytest.raises(Killed):
        run(recipe, tmp_path / "killed", KilledInRoundTwo())
    STEP_COSTS.clear()
    resume(tmp_path / "killed")
    assert states(tmp_path / "killed") == states(tmp_path / "whole")
    assert (tmp_path / "killed" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


# What each method is there for, seen in a run


def test_fedema_keeps_each_clients_first_lambda(finished):
    found, directory = metrics(finished("fedema")), RunDirectory.open(finished("fedema"))
    for client in ("0", "1"):
        moved = found[1, client, "divergence"]
        assert found[2, client, "divergence"] != moved
        assert found[1, client, "lambda"] == found[2, client, "lambda"] == pytest.approx(0.7 / moved)
        assert directory.client_state(int(client)).numbers["fedema.lambda"] == found[1, client, "lambda"]
        assert [found[number, client, "mu"] for number in (1, 2)] == pytest.approx([0, 0.7])
    assert found[1, "0", "lambda"] != found[1, "1", "lambda"]


@pytest.mark.parametrize(("threshold", "taken"), [(1e-6, 0.0), (1e6, 1.0)])
def test_fedu_takes_the_global_predictor_below_the_threshold(threshold, taken, tmp_path):
    run(small("fedu", f"local_update.threshold={threshold}"), tmp_path / "run")
    found = metrics(tmp_path / "run")
    assert [found[number, "mean", "global_predictor"] for number in (1, 2)] == [1.0, taken]


def test_l_dawa_logs_the_angles_once_the_plain_rounds_are_over(finished):
    cosines = {
        (number, who): v for (number, who, metric), v in metrics(finished("l_dawa")).items() if "cosine" in metric
    }
    assert {number for number, _ in cosines} == {2}
    assert all(0 < value <= 1 for value in cosines.values())


def test_orchestras_clusters_move_and_are_used(finished):
    found, directory = metrics(finished("orchestra")), RunDirectory.open(finished("orchestra"))
    assert 1 <= found[2, "global", "clusters_used"] <= 8
    server = directory.server_state().tensors["centroids"]
    client = directory.client_state(0)
    assert not torch.equal(client.tensors["model/centroids"], server)  # the client has those of the round before
    torch.testing.assert_close(server.norm(dim=1), torch.ones(8))
    torch.testing.assert_close(client.tensors["model/memory"].norm(dim=1), torch.ones(12))


def test_fedcas_terms_are_there_from_the_round_on_in_which_they_can(finished):
    found = metrics(finished("fedca"))
    assert (1, "0", "dictionary_loss") not in found
    assert found[2, "0", "dictionary_loss"] > 0
    assert found[1, "0", "base_distance"] > 0
    kept = RunDirectory.open(finished("fedca")).client_state(0).tensors
    assert any(name.startswith("memory/base_model.") for name in kept)


# What travels


def exchange(recipe: Recipe) -> tuple[Federation, list[dict[int, Message]], list[dict[int, Message]], Message]:
    """What went down and up in the opening round, where there is one, and in rounds 1 and 2."""
    federation = build_federation(recipe)
    method = federation.method
    server, kept, downs, ups = method.initial_state(), {0: Message(), 1: Message()}, [], []
    for number in range(0 if method.opening_round else 1, 3):
        down = method.broadcast(server, [0, 1], number) if number else method.broadcast_opening(server, [0, 1])
        up = {}
        for k in (0, 1):
            client = federation.client(k, kept[k])
            up[k] = method.client_round(client, down[k], number)
            kept[k] = federation.client_state(client, number)
        server = method.aggregate(server, up, number)
        downs.append(down)
        ups.append(up)
    return federation, downs, ups, server


def online_names(federation: Federation) -> set[str]:
    return {name for name in federation.new_model(None).state_dict() if name.startswith("online.")}


@pytest.mark.parametrize("name", ["fedbyol", "fedu", "fedema", "feddecorr", "fedx", "l_dawa"])
def test_the_whole_online_network_travels_and_nothing_else(name):
    """Projector and predictor too, also where a client may keep its own predictor; no target network."""
    federation, downs, ups, _ = exchange(small(name))
    names = online_names(federation)
    parts = {n.split(".")[1] for n in names}
    assert parts == {"encoder", "projector"} | (set() if name == "l_dawa" else {"predictor"})
    assert all(set(message.tensors) == names for round_ in (*downs, *ups) for message in round_.values())


def test_orchestra_sends_weights_and_centroids():
    federation, downs, ups, _ = exchange(small("orchestra"))
    names = online_names(federation)
    assert {n.split(".")[1] for n in names} == {"encoder", "projector", "rotation"}
    opening, *rounds = zip(downs, ups, strict=True)
    assert set(opening[0][0].tensors) == names
    assert set(opening[1][0].tensors) == {"local_centroids"}
    target = {name for name in federation.method.global_model.state_dict() if name.startswith("target.")}
    assert {n.split(".")[1] for n in target} == {"encoder", "projector"}
    for down, up in rounds:
        assert set(down[0].tensors) == names | target | {"centroids"}
        assert down[0].tensors["centroids"].shape == (8, 16)
        assert set(up[0].tensors) == names | target | {"local_centroids"}
        assert up[0].tensors["local_centroids"].shape == (4, 16)
    # in the opening round both clients cluster with the same, the server's, network, and train nothing
    client = federation.client(0, Message())
    federation.method.client_round(client, opening[0][0], 0)
    for name, tensor in opening[0][0].tensors.items():
        assert torch.equal(client.model.state_dict()[name], tensor)
        twin = client.model.state_dict().get(name.replace("online.", "target."))
        assert twin is None or torch.equal(twin, tensor)


def test_orchestras_clients_begin_a_round_with_the_mean_of_their_target_networks():
    federation, downs, ups, _ = exchange(small("orchestra"))
    _, first, second = downs
    images = [len(rows) for rows in federation.client_rows]
    for name, tensor in second[0].tensors.items():
        if name.startswith("target."):
            assert torch.equal(first[0].tensors[name], first[0].tensors[name.replace("target.", "online.")])
            replies = [ups[1][k].tensors[name] for k in (0, 1)]
            mean = sum(n * reply.double() for n, reply in zip(images, replies, strict=True)) / sum(images)
            torch.testing.assert_close(tensor.double(), mean.round() if "num_batches" in name else mean)
    # a client trains with that mean, here one that it does not move; also if it takes part for the first time
    objective = federation.method.objective.model_copy(update={"target_momentum": 1.0})
    method = dataclasses.replace(federation.method, objective=objective)
    weight = "target.projector.0.weight"
    assert not torch.equal(second[0].tensors[weight], second[0].tensors[weight.replace("target", "online")])
    for rounds_taken in (0, 1):
        client = federation.client(0, Message())
        client.memory.numbers |= {"rounds_taken": 1} if rounds_taken else {}
        method.client_round(client, second[0], 2)
        assert torch.equal(client.model.state_dict()[weight], second[0].tensors[weight])


def test_orchestras_target_networks_may_stay_with_their_clients():
    _, downs, ups, _ = exchange(small("orchestra", "aggregators.1.average_target=false"))
    assert not [name for message in (*downs, *ups) for name in message[0].tensors if name.startswith("target.")]


def test_fedca_sends_weights_the_dictionary_and_the_base_model_once():
    federation, downs, ups, _ = exchange(small("fedca"))
    names = online_names(federation)
    base = {"base_model." + n.removeprefix("online.encoder.") for n in names if n.startswith("online.encoder.")}
    assert set(downs[0][0].tensors) == names | base
    assert set(downs[1][0].tensors) == names | {"dictionary"}
    images = [len(rows) for rows in federation.client_rows]
    assert downs[1][0].tensors["dictionary"].shape == (sum(images), 128)
    for up in ups:
        assert set(up[1].tensors) == names | {"dictionary.1"}
        assert up[1].tensors["dictionary.1"].shape == (images[1], 128)
    state = federation.method.initial_state()
    trained = [n for n in base if not torch.equal(state.tensors[n], state.tensors["online.encoder." + n[11:]])]
    assert trained


def test_the_opening_broadcast_is_counted(finished):
    found = metrics(finished("orchestra"))
    weights = sum(t.numel() * t.element_size() for t in _server_weights(finished("orchestra")).values())
    assert found[0, "1", "bytes_down"] == weights
    target = {
        n: t for n, t in RunDirectory.open(finished("orchestra")).server_state().tensors.items() if "target." in n
    }
    assert found[1, "1", "bytes_down"] == weights + 8 * 16 * 4 + sum(
        t.numel() * t.element_size() for t in target.values()
    )
    assert found[0, "1", "bytes_up"] == 4 * 16 * 4 + 8  # the centroids and the number of samples


def _server_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = RunDirectory.open(path).server_state().tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("online.")}


# What does not fit


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("fedu", "objective.name=simclr", "fedu updates the predictor.*use byol or simsiam"),
        ("fedema", "objective.name=supervised", "fedema updates the predictor"),
        ("fedx", "objective.name=simclr", "global_distillation trains the predictor.*use fedx"),
        ("fedca", "objective.name=supervised", "supervised trains on labels, but base_model trains it"),
        ("fedca", "data.public_holdout=0", "base_model needs public images"),
        ("fedca", "aggregators=[weighted_mean]", "dictionary_contrast reads what dictionary sends"),
        ("orchestra", "aggregators=[weighted_mean]", "orchestra reads what orchestra_clusters sends"),
        ("orchestra", "objective.name=byol", "orchestra_clusters needs objective orchestra"),
        ("orchestra", "objective.memory=3", "local_clusters is 4, but objective.memory is only 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(name, override, message):
    with pytest.raises(UserError, match=message) as caught:
        build_federation(small(name, override))
    assert "\n" not in str(caught.value)
