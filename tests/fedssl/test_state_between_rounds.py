"""What one round leaves to the next: nothing of a round that is over, and nothing that was undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedssl.aggregators.representation_mean import RepresentationMean
from fedssl.augmentations.random_views import RandomViews
from fedssl.client import Client, LocalRound
from fedssl.engines.in_process import ClientStates
from fedssl.federation import build_federation
from fedssl.guard import Asked, refusals, refused_in
from fedssl.local_updates.fedu import DIVERGENCE, FedU
from fedssl.messages import Message
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED

EUA: dict[str, Any] = {"aggregators": ["eua"], "local_update": "replace"}


def test_the_server_forgets_the_metrics_and_refusals_of_the_round_before(tiny):
    method = build_federation(tiny(**EUA)).method
    first = method.initial_state()
    near, far = first.copy(), first.copy()
    for distance, state in ((1.0, near), (2.0, far)):
        state.numbers = {"samples": 10}
        for tensor in state.tensors.values():
            if tensor.is_floating_point():
                tensor += distance
    broken = Message(dict(near.tensors))  # it does not say how many samples
    server = method.aggregate(first, {0: near, 1: far, 2: broken}, 1)
    assert {"eua_weight/0", "eua_weight/1"} <= server.metrics.keys()
    assert refused_in(server).keys() == {2}
    server = method.aggregate(server, {0: near, 2: far}, 2)
    assert {name for name in server.metrics if "eua_weight" in name} == {"eua_weight/0", "eua_weight/2"}
    assert refused_in(server) == {}
    nobody = method.aggregate(server, {}, 3)
    assert nobody.metrics == {}
    assert all(torch.equal(tensor, server.tensors[name]) for name, tensor in nobody.tensors.items())


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_discarded_state_is_the_committed_one_again(place, tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {"recipe.yaml": ""})
    states = ClientStates(directory, place)
    for k in (3, 4):
        states.store(k, 1, Message({"a": torch.full((2,), 1.0)}, {"round": 1.0}))
    directory.commit(1, Message(), finished=False)
    for k in (3, 4):
        states.store(k, 2, Message({"a": torch.full((2,), 2.0)}, {"round": 2.0}))
    states.discard(3)
    assert (states.load(3).tensors["a"].tolist(), states.load(3).numbers) == ([1.0, 1.0], {"round": 1.0})
    directory.commit(2, Message(), finished=False)
    assert [states.load(k).numbers["round"] for k in (3, 4)] == [1.0, 2.0]
    assert [directory.client_state(k).numbers["round"] for k in (3, 4)] == [1.0, 2.0]


def test_clients_that_have_not_answered_yet_shift_nobodys_weight():
    """Clients 1 and 3 of four have answered; their weights are 3 and 1, whatever the others' are."""
    part = RepresentationMean(name="representation_mean", weights=[100.0, 3.0, 10.0, 1.0])
    one, three = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    server = Message({"representation.1": one, "representation.3": three})
    message = part.broadcast(server, [0], [])[0]
    kernels = [tensor if tensor.shape == (2, 2) else tensor @ tensor.T for tensor in message.tensors.values()]
    assert len(kernels) == 1
    torch.testing.assert_close(kernels[0].diagonal(), torch.tensor([0.75, 0.25]))


def test_of_two_sizes_that_as_many_answers_have_the_lowest_clients_is_right():
    sizes = {7: (4, 2), 2: (5, 2)}
    replies = {k: Message({f"r.{k}": torch.ones(size)}, {"samples": 1.0}) for k, size in sizes.items()}
    expected = {k: {f"r.{k}": ("images", None)} for k in replies}
    assert refusals(Message(), replies, Asked(expected), 1e6).keys() == {7}


@pytest.mark.parametrize(("divergence", "kept"), [(0.39, False), (0.4, True), (0.41, True)])
def test_fedu_keeps_a_predictor_from_its_threshold_on(divergence, kept, tiny):
    recipe = tiny(**AVERAGED | {"local_update": {"name": "fedu", "threshold": 0.4}})
    federation = build_federation(recipe)
    client: Client = federation.client(0, Message())
    client.memory.numbers[DIVERGENCE] = divergence
    sent = federation.method.broadcast(federation.method.initial_state(), [0], 2)[0]
    own = client.model.online_state()
    FedU(name="fedu", threshold=0.4).receive(LocalRound(client, sent, 2, 0, recipe.objective, RandomViews(flip=0.0)))
    for name, tensor in client.model.online_state().items():
        is_own = kept and name.startswith("online.predictor.")
        assert torch.equal(tensor, own[name] if is_own else sent.tensors[name]), name
